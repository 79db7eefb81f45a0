"""Hugging Face's Trainer: a callback that saves and restores.

    callback = HoldfastCallback(every=100)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.restore(trainer))

    restore          model, optimizer, TrainerState; a folder with the latter, where Trainer finds its epoch and batch
    on_train_begin   the scheduler, which Trainer has made by now; the learning rates, which making it has changed
    on_step_begin    step() for the step before: all that Trainer does after a step (logs, evaluation) is done by now.
                     The first one: random numbers as they were there
    on_train_end     step() for the last step; close()

docs/frameworks.md says what comes back exactly.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StateError
from trainer_side.checkpointer import Checkpointer
from trainer_side.frameworks.missing import RngAgain, missing
from trainer_side.state.per_rank import PerRank

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["HoldfastCallback"]

_STATE = "trainer_state.json"  # as Trainer names it


class HoldfastCallback(TrainerCallback):
    """Saves while `Trainer.train` trains, and brings the newest checkpoint back before it.

    Model, optimizer, scheduler, TrainerState (step, epoch, log, the best metric, callbacks that have a state) and each
    rank's random numbers are in the checkpoint. Trainer itself skips what the epoch has had of its data.

    Call `restore` before each `train`; set up `torch.distributed` with `init_torch_distributed` before the
    `TrainingArguments` are made.

    Args:
        every: Save after every so many steps of the optimizer; 0: only after a notice.
        state: More to save, by name, as `Checkpointer` takes it.
        config: Settings; by default `HOLDFAST_*` in the environment and `holdfast.toml`.

    Attributes:
        checkpointer: From `restore` until `train` is done.
    """

    def __init__(
        self, *, every: int = 0, state: Mapping[str, Any] | None = None, config: TrainerConfig | None = None
    ) -> None:
        self._every, self._more, self._config = every, dict(state or {}), config
        self.checkpointer: Checkpointer | None = None
        self._random = RngAgain()
        self._scheduler = _Scheduler()
        self._groups: list[dict[str, Any]] = []
        self._looked_at = -1
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def restore(self, trainer: Trainer) -> str | None:
        """Bring the newest checkpoint back. Collective; before `train`.

        Returns:
            For `train(resume_from_checkpoint=…)`: a folder that lives as long as this; None on a new run.

        Raises:
            DamageError, StateError, StoreError: As `Checkpointer.restore`.
            ConfigError: Trainer shards the model or its optimizer; or a name in `state` is taken.
        """
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise ConfigError(
                "transformers: holdfast saves models that every rank has whole; this Trainer has one that is sharded "
                "(DeepSpeed or FSDP); use plain data parallelism"
            )
        optimizer = trainer.create_optimizer()  # train() keeps it
        seen = _Seen(trainer)
        own = {
            "model": trainer.model,
            "optimizer": optimizer,
            "scheduler": self._scheduler,
            "trainer": seen,
            "rng": PerRank(self._random),
        }
        if twice := own.keys() & self._more.keys():
            raise ConfigError(
                f"HoldfastCallback(state=…): {', '.join(sorted(twice))} is there already; rename it"
            )
        self.checkpointer = Checkpointer({**own, **self._more}, config=self._config, every=self._every)
        self._looked_at = self.checkpointer.restore()
        if self._looked_at == 0:
            return None
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        folder = Path(self._folder.name)
        (folder / _STATE).write_text(seen.found, encoding="utf-8")
        _leave_weights(trainer, self._folder.name)
        return self._folder.name

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """What Trainer makes in `train` goes on where it was."""
        if self.checkpointer is None:
            raise StateError(
                "transformers: train(resume_from_checkpoint=callback.restore(trainer)): restore() was not called"
            )
        if state.global_step != self._looked_at:
            raise StateError(
                f"transformers: restored {self._looked_at} steps, Trainer begins after {state.global_step}; call "
                "train(resume_from_checkpoint=callback.restore(trainer))"
            )
        self._scheduler.made(given["lr_scheduler"])
        for group, saved in zip(given["optimizer"].param_groups, self._groups, strict=bool(self._groups)):
            group.update(saved)

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save what the step before has left, if it is time."""
        self._random.again()
        self._step(state)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save the last step, if it is time, and wait until it is durable."""
        self._step(state)
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def _step(self, state: TrainerState) -> None:
        if self.checkpointer is not None and state.global_step > self._looked_at:
            self._looked_at = state.global_step
            self.checkpointer.step(state.global_step - 1)


def _leave_weights(trainer: Trainer, folder: str) -> None:
    """Trainer wants weights in the folder that it resumes from. Those of the model are restored already."""
    load = trainer._load_from_checkpoint

    def load_others(resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != folder:
            load(resume_from_checkpoint, model)

    trainer._load_from_checkpoint = load_others  # type: ignore[method-assign]


class _Scheduler:
    """Trainer's scheduler, which is made after the restore."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._saved: dict[str, Any] | None = None

    def made(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        if self._saved is not None:
            scheduler.load_state_dict(self._saved)
            self._saved = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved


class _Seen:
    """TrainerState as JSON, with the callbacks that have a state.

    Attributes:
        found: What was restored.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.found = ""

    def state_dict(self) -> dict[str, str]:
        trainer = self._trainer
        # Not `asdict`: that copies the log, which grows at every step that is logged, for nothing.
        state = {
            field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)
        }
        kinds: dict[str, list[dict[str, Any]]] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                kinds.setdefault(type(callback).__name__, []).append(callback.state())
        state["stateful_callbacks"] = {name: of[0] if len(of) == 1 else of for name, of in kinds.items()}
        return {"json": json.dumps(state)}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        self.found = saved["json"]
