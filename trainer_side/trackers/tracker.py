"""The interface of an experiment tracker, for holdfast and for scripts, and what it is given: marks, a start point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

PREFIX = "holdfast"


@dataclass(frozen=True)
class Mark:
    """One point of a chart about checkpoints.

    Attributes:
        name: The chart: `stall_seconds`, `staged_seconds`, `durable_seconds`, `kept_seconds`, `attempt`, `lost_steps`.
        step: The training step, which may be long past.
        value: The number.
        text: For people; empty if the number says all.
    """

    name: str
    step: int
    value: float
    text: str = ""

    @property
    def title(self) -> str:
        """Name of the chart among those of the script."""
        return f"{PREFIX}/{self.name}"


@dataclass(frozen=True)
class StartPoint:
    """The start of this attempt.

    Attributes:
        first_step: The step to run first; 0 on a new run.
        attempt: Number of this attempt of the job, from 1.
        runs: Tracker → its run, from the checkpoint; empty on a new run.
        text: For people; empty on a new run.
        branched: Whether an older step was chosen on purpose: points of later steps then belong to an abandoned branch,
            and new ones replace them.
    """

    first_step: int
    attempt: int
    runs: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    branched: bool = False

    def marks(self, last_step: int) -> list[Mark]:
        """Return the marks of this start.

        Args:
            last_step: The newest step of which the tracker has points; -1: none, or unknown.
        """
        found = [Mark("attempt", self.first_step, self.attempt, self.text)]
        if self.text and last_step >= 0:
            found.append(Mark("lost_steps", self.first_step, max(0, last_step - self.first_step + 1)))
        return found


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
