"""Verdicts on their way to one tier, held back while somebody still reads a slot that the tier would give away."""

from __future__ import annotations

from trainer_side.tiers.keeping import Keeping
from trainer_side.tiers.tally import StepVerdict


class VerdictQueue:
    """See the module. Not thread-safe: the lane's lock guards it.

    Args:
        tier: Number of the tier.
    """

    def __init__(self, tier: int) -> None:
        self._tier = tier
        self._waiting: list[StepVerdict] = []
        self._read: list[
            Keeping
        ] = []  # steps whose slot in this tier is the area, which others may still read
        self._delivering = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a verdict has not been taken yet."""
        return bool(self._waiting)

    @property
    def is_pending(self) -> bool:
        """Whether a verdict has not been delivered yet."""
        return bool(self._waiting or self._delivering)

    def reads(self, keeping: Keeping) -> None:
        """The slot of this step is the area that the link and other lanes read."""
        self._read.append(keeping)

    def add(self, verdict: StepVerdict) -> None:
        """Deliver a verdict, as soon as nobody reads the slots that it is about."""
        self._waiting.append(verdict)

    def take(self) -> list[StepVerdict]:
        """Verdicts that nothing holds back any more. Follow each with `delivered`."""
        self._read = [
            keeping
            for keeping in self._read
            if keeping.is_read_beside(self._tier) or not keeping.released.is_set()
        ]
        ready = [verdict for verdict in self._waiting if not self._is_held_back(verdict)]
        self._waiting = [verdict for verdict in self._waiting if verdict not in ready]
        self._delivering += len(ready)
        return ready

    def delivered(self) -> None:
        self._delivering -= 1

    def _is_held_back(self, verdict: StepVerdict) -> bool:
        if verdict.complete:
            return any(keeping.order <= verdict.order for keeping in self._read)
        return any(keeping.order == verdict.order for keeping in self._read)
