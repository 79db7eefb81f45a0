"""Where a training resumes, for an experiment tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_side.trackers.mark import Mark


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
