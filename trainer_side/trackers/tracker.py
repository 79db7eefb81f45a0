"""The interface of an experiment tracker, as holdfast uses it, and as a script logs through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainer_side.trackers.mark import Mark


class Tracker(ABC):
    """A run of an experiment tracker, which goes on where the training goes on.

    A class of your own makes holdfast work with another tracker: give `Checkpointer.track` a function that makes it.

    Attributes:
        kind: Name under which checkpoints have the run.
        run: The library's own object; None on ranks other than 0.
        run_id: The run, as the library finds it again. At most 1024 characters.
        last_step: Newest step of which the run already has points, which `log` therefore leaves out; -1: none, or the
            library itself hides the points that are logged twice.
    """

    kind: ClassVar[str]
    run: Any = None
    run_id: str = ""
    last_step: int = -1

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one training step, unless the run has them already. Training thread.

        Args:
            metrics: Name → number.
            step: The training step, from 0, as `Checkpointer.step` takes it.
        """

    @abstractmethod
    def mark(self, marks: Sequence[Mark]) -> None:
        """Show marks, the oldest first. Holdfast calls it in a thread of its own, every second or so, also without any.

        An exception is logged, and this tracker gets no more marks.
        """

    def flush(self) -> None:  # noqa: B027 - most libraries need nothing
        """Write what was logged: a restart from the checkpoint that is being taken logs none of it again. As `mark`."""

    def end(self) -> None:
        """No more marks follow. The run itself stays open. As `mark`."""
        self.flush()


class NoTracker(Tracker):
    """In the place of a tracker on ranks other than 0."""

    kind = "none"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def mark(self, marks: Sequence[Mark]) -> None:
        pass
