"""Finds the shortest interval at which a peer's checkpoints cost a training at most a given share of its time.

Every interval must be measured, as none can be computed from another: `torch.save` costs the same at any interval, and
an asynchronous peer costs nothing once the interval exceeds its write. `next_interval` chooses the next to measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ShortestInterval", "next_interval", "shortest_interval"]


@dataclass(frozen=True)
class ShortestInterval:
    """The shortest interval lies between two measured ones, in iterations.

    Attributes:
        beyond: The longest measured interval with too large an overhead, or 0.
        within: The next longer measured interval; None if the overhead was too large at the longest, too.
    """

    beyond: int
    within: int | None

    def text(self) -> str:
        """Return the text for a table."""
        if self.within is None:
            return f"not reached at {self.beyond}"
        return f"at most {self.within}"


def shortest_interval(overheads: Mapping[int, float], overhead_max: float) -> ShortestInterval:
    """Return the shortest interval from the overhead at each measured one; 0.05 is 5 %."""
    within: int | None = None
    for every in sorted(overheads, reverse=True):
        if overheads[every] > overhead_max:
            return ShortestInterval(every, within)
        within = every
    return ShortestInterval(0, within)


def next_interval(
    overheads: Mapping[int, float], overhead_max: float, candidates: Sequence[int]
) -> int | None:
    """Return the candidate that halves the gap between `beyond` and `within`, None if none lies between them."""
    found = shortest_interval(overheads, overhead_max)
    left = [
        every
        for every in sorted(candidates)
        if every > found.beyond and (found.within is None or every < found.within)
    ]
    return left[(len(left) - 1) // 2] if left else None
