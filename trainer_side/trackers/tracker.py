"""The interface of an experiment tracker, for holdfast and for logging from a script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainer_side.trackers.mark import Mark


class Tracker(ABC):
    """A run of an experiment tracker, which resumes where the training resumes.

    To support another tracker, write a subclass, and pass a function that makes it to `Checkpointer.track`.

    Attributes:
        kind: Name of the tracker in checkpoints.
        run: The library's own object; None on ranks other than 0.
        run_id: Id by which the library finds the run again. At most 1024 characters.
        last_step: Newest step of which the run already has points; `log` skips steps up to it. -1: none, or the
            library itself hides points that are logged twice.
    """

    kind: ClassVar[str]
    run: Any = None
    run_id: str = ""
    last_step: int = -1

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one training step, unless the run already has them. Training thread.

        Args:
            metrics: Name → number.
            step: The training step, from 0, as in `Checkpointer.step`.
        """

    @abstractmethod
    def mark(self, marks: Sequence[Mark]) -> None:
        """Show marks, oldest first. Called on a thread of holdfast, about every second, also without marks.

        After an exception, which is logged, this tracker gets no more marks.
        """

    def flush(self) -> None:  # noqa: B027 - most libraries need nothing
        """Write buffered points: a resume from the checkpoint now being taken does not log them again. As `mark`."""

    def end(self) -> None:
        """Finish after the last mark. The run itself stays open. As `mark`."""
        self.flush()


class NullTracker(Tracker):
    """Null tracker of ranks other than 0."""

    kind = "none"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def mark(self, marks: Sequence[Mark]) -> None:
        pass
