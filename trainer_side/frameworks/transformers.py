"""Hugging Face's Trainer: a callback that saves and restores.

    callback = HoldfastCallback(every=100)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.restore(trainer))

docs/guides/transformers.md says what is restored exactly.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StateError
from trainer_side.checkpointer import Checkpointer
from trainer_side.frameworks.missing import ReloadableRngState, missing_framework, reject_taken_names
from trainer_side.opaque import opaque_methods
from trainer_side.state.per_rank import PerRank

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing_framework("transformers", error) from error

__all__ = ["HoldfastCallback"]

_STATE = "trainer_state.json"  # as Trainer names it


@opaque_methods
class HoldfastCallback(TrainerCallback):
    """Takes checkpoints while `Trainer.train` trains; `restore` loads the newest one before.

    A checkpoint has the model, optimizer, scheduler, the gradient scaler of fp16, TrainerState (step, epoch, log, the
    best metric, callbacks that have a state) and each rank's random state. Trainer itself skips the batches that the
    epoch has already had.

    Call `restore` before each `train`, and `init_torch_distributed` before you make the `TrainingArguments`.

    Args:
        every: Number of optimizer steps from one checkpoint to the next. 0: checkpoints only after a preemption notice.
        state: Further objects to save, by name, as `Checkpointer` takes them.
        config: Settings. None: from `HOLDFAST_*` in the environment and from `holdfast.toml`.

    Attributes:
        checkpointer: The Checkpointer, from `restore` until `train` is done; None otherwise.
    """

    def __init__(
        self, *, every: int = 0, state: Mapping[str, Any] | None = None, config: TrainerConfig | None = None
    ) -> None:
        self._every, self._extra_state, self._config = every, dict(state or {}), config
        self.checkpointer: Checkpointer | None = None
        self._random = ReloadableRngState()
        self._scheduler = _Scheduler()
        self._groups: list[dict[str, Any]] = []
        self._last_checked = -1
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._last_batch = _LastBatch()

    def restore(self, trainer: Trainer) -> str | None:
        """Restore the newest checkpoint. Collective: every rank calls it before `train`.

        Returns:
            The value for `train(resume_from_checkpoint=…)`: a folder that lives as long as this callback; None on a new
            run.

        Raises:
            DamageError, StateError, StoreError: As `Checkpointer.restore`.
            ConfigError: Trainer shards the model by DeepSpeed, FSDP1 or XLA, `train` would make another model
                (`model_init`), or the callback itself uses a name in `state`.
        """
        _reject_unsupported(trainer)
        optimizer = trainer.create_optimizer()  # train() keeps it
        if trainer.is_fsdp_enabled:
            _shard(trainer, optimizer)
        trainer_state = _SavedTrainerState(trainer)
        # Older releases did not save the scaler: a script may have it in its own state, and a checkpoint may lack it.
        scaler = None if "scaler" in self._extra_state else trainer.accelerator.scaler
        own = {
            "model": trainer.model,
            "optimizer": optimizer,
            "scheduler": self._scheduler,
            "trainer": trainer_state,
            **({} if scaler is None else {"scaler": scaler}),
            "rng": PerRank(self._random),
        }
        reject_taken_names(own, self._extra_state)
        self.checkpointer = Checkpointer({**own, **self._extra_state}, config=self._config, every=self._every)
        self._last_batch.attach(trainer)
        self._last_checked = self.checkpointer.restore(may_lack=() if scaler is None else ("scaler",))
        if self._last_checked == 0:
            return None
        self._groups = [dict(group) for group in optimizer.param_groups]
        for group in self._groups:
            del group["params"]
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        folder = Path(self._folder.name)
        (folder / _STATE).write_text(trainer_state.restored_json, encoding="utf-8")
        _skip_loading_weights(trainer, self._folder.name)
        return self._folder.name

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Restore the scheduler and the learning rates, which Trainer makes in `train`."""
        if self.checkpointer is None:
            raise StateError(
                "transformers: restore() of HoldfastCallback was not called before train(); call "
                "train(resume_from_checkpoint=callback.restore(trainer))"
            )
        if state.global_step != self._last_checked:
            raise StateError(
                f"transformers: the restored checkpoint has {self._last_checked} steps, but Trainer begins after "
                f"{state.global_step}; call train(resume_from_checkpoint=callback.restore(trainer))"
            )
        self._scheduler.attach(given["lr_scheduler"])
        for group, saved in zip(given["optimizer"].param_groups, self._groups, strict=bool(self._groups)):
            group.update(saved)

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save the state after the previous step, its logs and its evaluation, if a checkpoint is due."""
        self._random.reload()
        self._step(state)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save the last step if a checkpoint is due, and wait until all checkpoints are durable."""
        self._step(state)
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def _step(self, state: TrainerState) -> None:
        if self.checkpointer is not None and state.global_step > self._last_checked:
            self._last_checked, last = state.global_step, self._last_batch
            self.checkpointer.step(state.global_step - 1, batch=last.batch, loss=last.loss)


def _reject_unsupported(trainer: Trainer) -> None:
    what, advice = "", "use FSDP2 (fsdp=True, fsdp_config={'version': 2}) or plain data parallelism"
    if trainer.is_deepspeed_enabled:
        what = "shards the model by DeepSpeed"
    elif trainer.is_fsdp_xla_enabled:
        what = "shards the model by FSDP of XLA"
    elif trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        what = "shards the model by FSDP1 (fsdp_config version 1)"
    elif trainer.model_init is not None:
        what, advice = "makes a new model in train() (model_init)", "give Trainer the model itself"
    if what:
        raise ConfigError(
            f"transformers: this Trainer {what}, which HoldfastCallback cannot restore; {advice}"
        )


def _shard(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Shard model and optimizer now, and not in `train`, where Trainer reads its step from the checkpoint first.

    Accelerate must not shard them again in `train`: that would reorder parameters of which a rank has no part.
    """
    accelerator = trainer.accelerator
    model, wrapped = accelerator.prepare(trainer.model, optimizer)
    trainer.model = trainer.model_wrapped = model
    trainer.optimizer = wrapped
    prepare = accelerator.prepare

    def prepare_others(*parts: Any, **given: Any) -> Any:
        if not (len(parts) == 2 and parts[0] is model and parts[1] is wrapped):
            return prepare(*parts, **given)
        accelerator._models.append(model)  # train() has emptied both lists
        accelerator._optimizers.append(wrapped)
        return parts

    accelerator.prepare = prepare_others


def _skip_loading_weights(trainer: Trainer, folder: str) -> None:
    """Keep Trainer from loading weights from `folder`: it has none, and the model is restored already."""
    load = trainer._load_from_checkpoint

    def load_others(resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != folder:
            load(resume_from_checkpoint, model)

    trainer._load_from_checkpoint = load_others  # type: ignore[method-assign]


class _Scheduler:
    """Trainer's scheduler, which is made only after the restore: keeps its saved state until `attach` is called."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._saved: dict[str, Any] | None = None

    def attach(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        if self._saved is not None:
            scheduler.load_state_dict(self._saved)
            self._saved = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved


class _LastBatch:
    """Trainer's last batch and loss, for the proof of a resume: Trainer passes neither to callbacks."""

    def __init__(self) -> None:
        self.batch: Any = None  # this rank's last one; with accumulated gradients a step has several
        self.loss: torch.Tensor | None = None
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        if self._trainer is trainer:
            return
        self._trainer, train = trainer, trainer.training_step

        def training_step(model: torch.nn.Module, inputs: Any, *more: Any, **given: Any) -> torch.Tensor:
            # A shallow copy, because `compute_loss` may remove the labels.
            self.batch = dict(inputs) if isinstance(inputs, Mapping) else inputs
            self.loss = loss = train(model, inputs, *more, **given)
            return loss

        trainer.training_step = training_step  # type: ignore[method-assign]


class _SavedTrainerState:
    """TrainerState as JSON, with the callbacks that have a state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.restored_json = ""  # the restored one; empty before

    def state_dict(self) -> dict[str, str]:
        trainer = self._trainer
        # Not `asdict`, which would copy the log, and that grows at every logged step.
        state = {one.name: getattr(trainer.state, one.name) for one in dataclasses.fields(trainer.state)}
        kinds: dict[str, list[dict[str, Any]]] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                kinds.setdefault(type(callback).__name__, []).append(callback.state())
        state["stateful_callbacks"] = {name: of[0] if len(of) == 1 else of for name, of in kinds.items()}
        return {"json": json.dumps(state)}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        self.restored_json = saved["json"]
