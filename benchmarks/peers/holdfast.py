"""holdfast itself, as a training script uses it: a `Checkpointer`, and an optimizer step that may wait.

Its moments are what the training process learns, messages included: `staged` is PGT-1, the end is PGT-2.
"""

from __future__ import annotations

import time

from benchmarks.workload import Workload
from trainer_side import Checkpointer

__all__ = ["Holdfast"]


class Holdfast:
    """One rank of the job that `holdfast stager` is part of."""

    def __init__(self, workload: Workload) -> None:
        self._checkpointer = Checkpointer(workload.state())
        self._checkpointer.restore()
        self._step = -1
        self._marks: dict[str, float] = {}

    def save(self, step: int) -> None:
        self._marks, self._step = {}, step
        if not self._checkpointer.save(step):
            raise RuntimeError(f"step {step} was declined, though nothing was under way")

    def before_update(self) -> None:
        """The optimizer's own hook waits."""

    def done(self) -> bool:
        if "staged" not in self._marks and self._checkpointer.staged_step >= self._step:
            self._marks["staged"] = time.monotonic()
        return self._checkpointer.durable_step >= self._step

    def marks(self) -> dict[str, float]:
        return dict(self._marks)

    def clean(self, step: int) -> None:
        """The run's own retention removes it (`keep_last`)."""

    def close(self) -> None:
        self._checkpointer.close()
