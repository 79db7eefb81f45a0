"""torchtitan: a checkpoint manager with the methods that its training loop calls.

    trainer.checkpointer = HoldfastCheckpointManager(config.checkpoint, dataloader=trainer.dataloader, …)
    trainer.train()

    load()                     restores, before the first step
    maybe_wait_for_staging()   waits until the state is copied, before each step of the optimizers
    save()                     saves if a checkpoint is due, after each step
    close()                    waits until all checkpoints are durable

torchtitan itself is not imported: any loop may call these. torchtitan counts steps from 1, holdfast from 0. Optimizers
are taken out of torchtitan's container, so that each step can be delayed on its own. More: docs/guides/torchtitan.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from trainer_side.checkpointer import Checkpointer
from trainer_side.data.sampler import ResumableSampler
from trainer_side.frameworks.epochs import EpochLoader
from trainer_side.frameworks.missing import numbered
from trainer_side.opaque import opaque_methods
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState

__all__ = ["HoldfastCheckpointManager"]

_IMPORT = "begin the run with `holdfast import FILE URL` instead"
# Settings of torchtitan that holdfast replaces, and by what.
_ELSEWHERE = {
    "initial_load_path": _IMPORT,
    "initial_load_in_hf": _IMPORT,
    "initial_load_in_hf_quantized": _IMPORT,
    "last_save_in_hf": "run `holdfast export URL OUT --to safetensors --only model` afterwards",
    "create_seed_checkpoint": "leave it out: a checkpoint of any mesh is resumed on any other",
}
_ALWAYS_LOADED = (torch.nn.Module, torch.optim.Optimizer)


@opaque_methods
class HoldfastCheckpointManager:
    """Saves and restores in torchtitan's training loop, or in a similar one.

    A checkpoint has the model, the optimizers, the schedulers, the loader, all of `states`, and each rank's random
    state. Each rank saves its part of a DTensor. The constructor is collective, like that of `Checkpointer`.

    Args:
        config: torchtitan's settings of checkpoints, or any object with some of them: `enable`, `interval`,
            `enable_first_step_checkpoint`, `load_only`, `exclude_from_loading`; the others have no effect, or are
            refused. Settings of the stager say where checkpoints go and how many are kept.
        dataloader: With `state_dict()` and `load_state_dict()`, a different one on each rank. None: no loader to save.
        model_parts: The one module of this rank.
        optimizers: An optimizer, or a container of them (`OptimizersContainer`).
        lr_schedulers: With `state_dict()` and `load_state_dict()` (`LRSchedulersContainer`).
        states: Further objects by name, such as `{"train_state": trainer}`.
        settings: Settings of holdfast. None: from `HOLDFAST_*` in the environment and from `holdfast.toml`.
        _others: Further arguments of torchtitan's own manager (`sd_adapter`, `base_folder`) have no effect.

    Attributes:
        checkpointer: The Checkpointer; None if `config.enable` is false.

    Raises:
        ConfigError: `config` has a setting that holdfast replaces, the model is in several parts (pipeline
            parallelism), or a name in `states` is taken.
        StateError, StoreError, PeerLost: As `Checkpointer`.
    """

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        settings: TrainerConfig | None = None,
        **_others: Any,
    ) -> None:
        self.checkpointer: Checkpointer | None = None
        if not getattr(config, "enable", True):
            return
        for name, advice in _ELSEWHERE.items():
            if getattr(config, name, None):
                raise ConfigError(f"torchtitan: HoldfastCheckpointManager does not take {name}; {advice}")
        if len(model_parts) != 1:
            raise ConfigError(
                f"torchtitan: expected one model part on each rank, got {len(model_parts)}: schedules of pipelines "
                "with several stages on a rank are not supported; use FSDP2, HSDP or tensor parallelism"
            )
        own = {
            "model": model_parts[0],
            **numbered("optimizer", optimizers if isinstance(optimizers, Iterable) else [optimizers]),
            "lr_scheduler": lr_schedulers,
            **({} if dataloader is None else {"dataloader": dataloader}),
        }
        if twice := (own.keys() | {"rng"}) & states.keys():
            raise ConfigError(
                f"torchtitan: states has {', '.join(sorted(twice))}, which the manager itself saves; choose other names"
            )
        full_state = {**own, **states}
        excludable = [name for name, value in full_state.items() if not isinstance(value, _ALWAYS_LOADED)]
        for name in getattr(config, "exclude_from_loading", None) or ():
            if name not in excludable:
                raise ConfigError(
                    f"torchtitan: exclude_from_loading has {name!r}, expected names of {', '.join(excludable)}"
                )
            full_state[name] = _NotLoaded(full_state[name])
        if dataloader is not None and not isinstance(dataloader, ResumableSampler | EpochLoader):
            # A loader's place belongs to one rank of this world size: in another, samples would repeat or be skipped.
            left_out = isinstance(full_state["dataloader"], _NotLoaded)
            full_state["dataloader"] = PerRank(full_state["dataloader"], same_ranks=not left_out)
        self._interval = int(getattr(config, "interval", 0))
        self._first_step = bool(getattr(config, "enable_first_step_checkpoint", False))
        self._load_only = bool(getattr(config, "load_only", False))
        self.checkpointer = Checkpointer(
            {**full_state, "rng": PerRank(RngState())}, config=settings, every=self._interval
        )

    def load(self, step: int = -1) -> bool:
        """Restore a checkpoint. Collective: every rank calls it once, before the first step.

        Args:
            step: Number of steps in the checkpoint, as passed to `save`. -1: the newest good checkpoint.

        Returns:
            Whether there was a checkpoint; False on a new run.

        Raises:
            DamageError, StateError, StoreError, StoreMissing: As `Checkpointer.restore`.
        """
        if self.checkpointer is None:
            return False
        self.checkpointer.restore(step=None if step == -1 else step - 1)
        return self.checkpointer.restored is not None

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save the state after step `curr_step` (from 1), if a checkpoint is due; training continues meanwhile.

        A checkpoint is due every `config.interval` steps, at the last step, and after a preemption notice at the step
        on which all ranks agree. It always has the whole state.

        Args:
            curr_step: Number of steps that are done. Call `save` after each step, so that notices are handled.
            last_step: Whether training ends with this step.

        Returns:
            Whether a save was started.
        """
        if self.checkpointer is None or self._load_only:
            return False
        done = curr_step - 1
        saved = self.checkpointer.step(done)
        wanted = last_step or (self._first_step and curr_step == 1)
        if wanted and not saved and not (self._interval and curr_step % self._interval == 0):
            saved = self.checkpointer.save(done)
        return saved

    def maybe_wait_for_staging(self) -> None:
        """Wait until the last `save` has copied the whole state. Not collective.

        Your own loop need not call this before steps of optimizers: they wait by themselves until the tensors that they
        change are copied.
        """
        if self.checkpointer is not None:
            self.checkpointer.wait_copied()

    def close(self) -> None:
        """Wait until every started checkpoint is durable, and leave the job. A second call does nothing."""
        if self.checkpointer is not None:
            self.checkpointer.close()


class _NotLoaded:
    """Saves the object inside, but does not restore it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        pass
