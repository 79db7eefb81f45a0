"""The shortest interval at which a peer's checkpoints cost a training no more than a given share of its time.

An interval that was not measured is not computed from one that was: `torch.save` costs the same at any interval, and an
asynchronous peer costs nothing once the interval is longer than its write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ShortestInterval", "shortest_interval"]


@dataclass(frozen=True)
class ShortestInterval:
    """The answer lies between two measured intervals, in iterations.

    Attributes:
        beyond: The longest measured one at which the overhead was too large; 0 where there is no such interval.
        within: The next longer one; None where the overhead was too large at the longest, too.
    """

    beyond: int
    within: int | None

    def text(self) -> str:
        """The answer for a table."""
        if self.within is None:
            return f"more than {self.beyond}"
        return f"at most {self.within}"


def shortest_interval(overheads: Mapping[int, float], overhead_max: float) -> ShortestInterval:
    """The answer from the overhead at each measured interval: 0.05 is 5 %."""
    within: int | None = None
    for every in sorted(overheads, reverse=True):
        if overheads[every] > overhead_max:
            return ShortestInterval(every, within)
        within = every
    return ShortestInterval(0, within)
