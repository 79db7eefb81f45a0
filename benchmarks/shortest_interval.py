"""The shortest interval at which a peer's checkpoints cost a training no more than a given share of its time.

An interval that was not measured is not computed from one that was: `torch.save` costs the same at any interval, and an
asynchronous peer costs nothing once the interval is longer than its write. `next_interval` says which to measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ShortestInterval", "next_interval", "shortest_interval"]


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
            return f"not reached at {self.beyond}"
        return f"at most {self.within}"


def shortest_interval(overheads: Mapping[int, float], overhead_max: float) -> ShortestInterval:
    """The answer from the overhead at each measured interval: 0.05 is 5 %."""
    within: int | None = None
    for every in sorted(overheads, reverse=True):
        if overheads[every] > overhead_max:
            return ShortestInterval(every, within)
        within = every
    return ShortestInterval(0, within)


def next_interval(
    overheads: Mapping[int, float], overhead_max: float, candidates: Sequence[int]
) -> int | None:
    """The candidate whose measurement halves what is left between `beyond` and `within`.

    Returns:
        None once no candidate lies between the two.
    """
    found = shortest_interval(overheads, overhead_max)
    left = [
        every
        for every in sorted(candidates)
        if every > found.beyond and (found.within is None or every < found.within)
    ]
    return left[(len(left) - 1) // 2] if left else None
