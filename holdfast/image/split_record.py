"""How a tensor was split among the ranks, in a few numbers for the manifest.

    regions [0:4, :] [4:8, :] … [28:30, :] of ranks 0, 1, … 7  ─►  cuts [[4, 7, 2, 1], [16, 1]], ranks [0, 1, 8]

A file has whole tensors, so no reader needs this record. It is for people, and never grows with the number of ranks:
sizes and ranks are written as runs, and left out if there are too many runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field

from holdfast.image.regions import Pattern

RUNS_MAX = 256  # of sizes, or of ranks, in one record
SPLITS_MAX = 1024  # of a manifest
_DIMENSIONS_MAX = 64  # torch's own limit
_Count = Annotated[int, Field(ge=1, lt=2**62)]
_Cuts = Annotated[tuple[_Count, ...], Field(max_length=2 * RUNS_MAX), FailFast()]
_Number = Annotated[int, Field(gt=-(2**62), lt=2**62)]


class SplitRecord(BaseModel):
    """How the tensors of one shape were split."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    parts: _Count  # number of different parts; ranks that held nothing do not count
    # sizes into which each dimension was cut, as pairs of size and count. Empty: the parts were no grid, or the sizes
    # take too many runs.
    cuts: Annotated[tuple[_Cuts, ...], Field(max_length=_DIMENSIONS_MAX), FailFast()] = ()
    copies: _Count
    copies_max: _Count
    # holders of the parts, in the order of the parts' places: the lowest rank of each part, then the next one of each,
    # and so on, as triples of first rank, distance and count. Empty: parts were held by different numbers of ranks, or
    # the ranks take too many runs.
    ranks: Annotated[tuple[_Number, ...], Field(max_length=3 * RUNS_MAX), FailFast()] = ()

    @classmethod
    def of(cls, pattern: Pattern) -> Self:
        in_order = sorted(zip(pattern.regions, pattern.holders, strict=True))
        copies = [len(holders) for _, holders in in_order]
        cuts = [_size_runs(sizes) for sizes in pattern.cuts or ()]
        equal = min(copies) == max(copies)
        ranks = _rank_runs([holders[n] for n in range(copies[0]) for _, holders in in_order] if equal else [])
        return cls(
            parts=len(in_order),
            cuts=tuple(cuts) if sum(map(len, cuts)) <= 2 * RUNS_MAX else (),
            copies=min(copies),
            copies_max=max(copies),
            ranks=ranks if len(ranks) <= 3 * RUNS_MAX else (),
        )

    def describe(self) -> str:
        """Describe the split for people, such as `split in 4 along dim 0, replicated x 2`."""
        if self.copies == self.copies_max:
            copies = f"replicated x {self.copies}" if self.copies > 1 else ""
        else:
            copies = f"replicated x {self.copies} to {self.copies_max}"
        counts = [sum(one[1::2]) for one in self.cuts]
        cut = [dimension for dimension, count in enumerate(counts) if count > 1]
        if self.parts == 1:
            parts = "" if copies else "on one rank"
        elif not cut:
            parts = f"split in {self.parts} parts"
        elif len(cut) == 1:
            parts = f"split in {counts[cut[0]]} along dim {cut[0]}"
        else:
            parts = f"{' x '.join(map(str, counts))} blocks"
        return ", ".join(filter(None, (parts, copies)))


def _size_runs(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(number for size, same in itertools.groupby(sizes) for number in (size, sum(1 for _ in same)))


def _rank_runs(ranks: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        found += ranks[at], step, end - at
        at = end
    return tuple(found)
