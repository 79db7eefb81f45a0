"""holdfast itself, as a training script uses it: a `Checkpointer`, and an optimizer step that may wait.

A save waits for room (`on_full = "wait"`), as every other peer does here: declined steps would make the training look
faster than it is. All times are those at which the training process learns of an event: `staged` is PGT-1, the end is
PGT-2.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.complete import require_same
from benchmarks.peers import load
from benchmarks.workload import Workload
from holdfast import Checkpointer
from holdfast.config import TrainerConfig
from holdfast.image.manifest import step_file_name

__all__ = ["Holdfast"]


class Holdfast:
    """One rank of the job that `holdfast stager` is part of."""

    def __init__(self, workload: Workload, store: str) -> None:
        self._workload, self._store = workload, store
        config = TrainerConfig.from_sources(on_full="wait")
        self.checkpointer = Checkpointer(workload.state(), config=config)
        self.checkpointer.restore()
        self._step = -1
        self._marks: dict[str, float] = {}

    def save(self, step: int) -> None:
        self._marks, self._step = {}, step
        if not self.checkpointer.save(step):
            raise RuntimeError(f"step {step} was declined, though holdfast was told to wait")

    def before_update(self) -> None:
        """Do nothing: the optimizer's own hook waits."""

    def done(self) -> bool:
        if "staged" not in self._marks and self.checkpointer.staged_step >= self._step:
            self._marks["staged"] = time.monotonic()
        return self.checkpointer.durable_step >= self._step

    def marks(self) -> dict[str, float]:
        return dict(self._marks)

    def verify(self) -> int:
        if "://" in self._store:
            return 0  # the flusher's read-back has compared it, and there is no file to open
        if self.checkpointer.rank and not self._workload.is_sharded:
            return 0  # rank 0 compares the same file
        path = Path(self._store) / step_file_name(self._step)
        return require_same(self._workload.state_dict(), load(path), what="holdfast")

    def clean(self) -> None:
        """Do nothing: the run's retention removes old checkpoints (`keep_last`)."""

    def close(self) -> None:
        self.checkpointer.close()
