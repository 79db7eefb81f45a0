"""Regions: the parts of a tensor that is split among ranks, and where their bytes lie in the whole tensor.

    a tensor of 6 × 4, and its region with start (2, 1), size (3, 2)
    bytes of the whole   ····│····│·xx·│·xx·│·xx·│····
    of the region        xxxxxx, as its rank holds them

A *region* is a start and a size per dimension. Its *holders* are the ranks that hold it. A *pattern* is all regions of
one tensor: together they cover the whole tensor, and no two of them overlap. Many tensors of a model share one pattern.
The holder of a region has its bytes in one run of memory, in the order of the whole tensor; so each rank copies without
gathering, and only the receiver scatters.

Pure: no torch. No object per run of a region is kept: a tensor that is cut in its last dimension has millions of runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from holdfast.errors import ProtocolError
from holdfast.image.entries import Extent

# A region that several ranks hold is divided among them in parts of at least this many bytes.
DEAL_BYTES_MIN = 64 * 1024
_DIMENSIONS_MAX = 64  # torch's own limit
_SIZE_MAX = 2**62


class Region(NamedTuple):
    """A box in a tensor: in dimension `d`, `size[d]` places from `start[d]` on."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 0 if a rank holds nothing."""
        return math.prod(self.size)

    def __str__(self) -> str:
        spans = zip(self.start, self.size, strict=True)
        return "[" + ", ".join(f"{start}:{start + size}" for start, size in spans) + "]"


class Block(NamedTuple):
    """Runs of `run_bytes` bytes each; each begins `stride` bytes after the previous one."""

    offset: int
    run_bytes: int
    stride: int
    runs: int


class Comb:
    """The bytes of one region in the whole contiguous tensor: runs of equal size, ascending. Offsets count from the
    tensor's first byte; the region's own bytes are numbered in the holder's order, run after run.
    """

    __slots__ = ("_outer", "_start", "_strides", "nbytes", "run_bytes")

    def __init__(self, shape: Sequence[int], item_bytes: int, region: Region) -> None:
        strides = [item_bytes] * len(shape)
        for dimension in range(len(shape) - 2, -1, -1):
            strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
        # The innermost dimension that is cut; the dimensions inside it form one run.
        cut = max((d for d, size in enumerate(region.size) if size != shape[d]), default=0)
        self.run_bytes = region.size[cut] * strides[cut] if shape else item_bytes
        self.nbytes = region.numel * item_bytes
        self._start = sum(start * stride for start, stride in zip(region.start, strides, strict=True))
        self._outer = region.size[:cut]
        self._strides = tuple(strides[:cut])

    @property
    def span(self) -> Extent:
        """From the first byte of the region to the last, including the gaps between runs."""
        last = self._place(self.nbytes // self.run_bytes - 1) + self.run_bytes
        return Extent(self._start, last - self._start)

    def bytes_before(self, offset: int) -> int:
        """Return how many bytes of the region lie before this byte of the whole tensor."""
        left = offset - self._start
        if left <= 0:
            return 0
        runs = 0  # that begin before `offset`
        for dimension, (size, stride) in enumerate(zip(self._outer, self._strides, strict=True)):
            index, left = divmod(left, stride)
            below = math.prod(self._outer[dimension + 1 :])
            if index >= size:
                return (runs + size * below) * self.run_bytes
            runs += index * below
        return runs * self.run_bytes + min(left, self.run_bytes)

    def extents(self, first: int, end: int) -> list[Extent]:
        """Return where the region's bytes `first` to `end` lie in the whole tensor, ascending, not joined."""
        if first >= end:
            return []
        run, inside = divmod(first, self.run_bytes)
        if end <= (run + 1) * self.run_bytes:
            return [Extent(self._place(run) + inside, end - first)]
        last, rest = divmod(end, self.run_bytes)
        found = [Extent(place, self.run_bytes) for place in self._places(run, last + (rest > 0))]
        found[0] = Extent(found[0].offset + inside, self.run_bytes - inside)
        if rest:
            found[-1] = Extent(found[-1].offset, rest)
        return found

    def blocks(self, first: int, end: int) -> Iterator[Block]:
        """Yield the bytes of `extents` in blocks of runs at equal distances, which numpy copies in one call."""
        run, inside = divmod(first, self.run_bytes)
        if inside and first < end:
            nbytes = min(self.run_bytes - inside, end - first)
            yield Block(self._place(run) + inside, nbytes, nbytes, 1)
            run, first = run + 1, first + nbytes
        runs, rest = divmod(max(0, end - first), self.run_bytes)
        stop = run + runs
        inner, stride = (self._outer[-1], self._strides[-1]) if self._outer else (1, self.run_bytes)
        while run < stop:
            count = min(inner - run % inner, stop - run)
            yield Block(self._place(run), self.run_bytes, stride, count)
            run += count
        if rest:
            yield Block(self._place(run), rest, rest, 1)

    def _place(self, run: int) -> int:
        place = self._start
        for size, stride in zip(reversed(self._outer), reversed(self._strides), strict=True):
            run, index = divmod(run, size)
            place += index * stride
        return place

    def _places(self, first: int, end: int) -> list[int]:
        numbers = np.arange(first, end, dtype=np.int64)
        places = np.full(len(numbers), self._start, np.int64)
        for size, stride in zip(reversed(self._outer), reversed(self._strides), strict=True):
            numbers, index = np.divmod(numbers, size)
            places += index * stride
        found: list[int] = places.tolist()
        return found


class Share(NamedTuple):
    """The share that `rank` sends of a region: bytes `first` up to `end`."""

    rank: int
    first: int
    end: int


@dataclass(frozen=True)
class Pattern:
    """How the tensors of one shape are split; also input from outside. `regions`: None is empty. `holders`: Of each,
    ascending, at least one. ProtocolError: regions overlap, leave the tensor or a gap, or a rank holds two.
    """

    shape: tuple[int, ...]
    item_bytes: int
    regions: tuple[Region, ...]
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        if not 0 < self.item_bytes <= 1024 or not 0 < numel * self.item_bytes < _SIZE_MAX:
            raise ProtocolError(
                f"a split tensor of shape {list(self.shape)} with {self.item_bytes} bytes each"
            )
        if len(self.shape) > _DIMENSIONS_MAX or len(self.holders) != len(self.regions):
            raise ProtocolError(
                f"a split tensor of {len(self.shape)} dimensions, {len(self.regions)} regions and "
                f"{len(self.holders)} groups of holders"
            )
        for region in self.regions:
            fits = len(region.start) == len(region.size) == len(self.shape) and all(
                start >= 0 and 0 < size <= whole - start
                for start, size, whole in zip(region.start, region.size, self.shape, strict=True)
            )
            if not fits:
                raise ProtocolError(f"region {region} is not in a tensor of shape {list(self.shape)}")
        for holders in self.holders:
            if not holders or list(holders) != sorted(set(holders)) or holders[0] < 0:
                raise ProtocolError(f"holders {list(holders)[:20]}, expected ranks, ascending")
        ranks = sum(map(len, self.holders))
        if len(self.region_of) != ranks:
            raise ProtocolError("a rank holds two regions of one tensor")
        self._check_tiling(numel)

    def _check_tiling(self, numel: int) -> None:
        if self.cuts is not None:
            return
        both = overlap(self.regions)
        if both is not None:
            raise ProtocolError(
                f"{self.describe_region(both[0])} and {self.describe_region(both[1])} overlap, and are not the same "
                "region"
            )
        held = sum(region.numel for region in self.regions)
        if held != numel:
            raise ProtocolError(
                f"the ranks hold {held} of the {numel} elements of a tensor of shape {list(self.shape)}: no rank has "
                "the rest"
            )

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...] | None:
        """Result of `grid_cuts`."""
        return grid_cuts(self.shape, self.regions)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @cached_property
    def region_of(self) -> dict[int, int]:
        """Rank → number of the region that the rank holds; ranks that hold nothing are missing."""
        return {rank: number for number, holders in enumerate(self.holders) for rank in holders}

    @cached_property
    def combs(self) -> tuple[Comb, ...]:
        return tuple(Comb(self.shape, self.item_bytes, region) for region in self.regions)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        spans = [comb.span for comb in self.combs]
        return np.array([span.offset for span in spans]), np.array([span.end for span in spans])

    def regions_within(self, begin: int, end: int) -> list[int]:
        """Return the numbers of the regions that may have bytes from `begin` up to `end` of the whole tensor."""
        begins, ends = self._spans
        found: list[int] = np.nonzero((begins < end) & (ends > begin))[0].tolist()
        return found

    def shares(self, number: int, turn: int, spared: Collection[int] = ()) -> list[Share]:
        """Divide a region about evenly among its holders. `turn`: Rotates which holder sends a small region. Ranks in
        `spared` send nothing that another rank also holds.
        """
        holders = [rank for rank in self.holders[number] if rank not in spared] or [*self.holders[number]]
        nbytes = self.combs[number].nbytes
        parts = min(len(holders), max(1, nbytes // DEAL_BYTES_MIN))
        return [
            Share(holders[(turn + part) % len(holders)], part * nbytes // parts, (part + 1) * nbytes // parts)
            for part in range(parts)
        ]

    def to_json(self) -> list[Any]:
        """Return a JSON document for `from_json`."""
        regions = [
            [list(region.start), list(region.size), list(holders)]
            for region, holders in zip(self.regions, self.holders, strict=True)
        ]
        return [list(self.shape), self.item_bytes, regions]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read a result of `to_json`, from outside. ProtocolError: it is invalid."""
        try:
            shape, item_bytes, regions = document
            return cls(
                _whole_numbers(shape),
                _whole_numbers([item_bytes])[0],
                tuple(Region(_whole_numbers(start), _whole_numbers(size)) for start, size, _ in regions),
                tuple(_whole_numbers(holders) for _, _, holders in regions),
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a pattern that cannot be read: {error}") from error

    def describe_region(self, number: int) -> str:
        """Describe a region and its holders, for messages."""
        holders = self.holders[number]
        who = f"rank {holders[0]}" if len(holders) == 1 else f"ranks {', '.join(map(str, holders[:8]))}"
        return f"{self.regions[number]} of {who}"


def unite(shape: Sequence[int], item_bytes: int, held: Sequence[Region | None]) -> Pattern:
    """Build the pattern of a tensor from the region that each rank holds; None or an empty region: nothing."""
    holders: dict[Region, list[int]] = {}
    for rank, region in enumerate(held):
        if region is not None and region.numel:
            holders.setdefault(region, []).append(rank)
    regions = sorted(holders)
    return Pattern(
        tuple(shape), item_bytes, tuple(regions), tuple(tuple(holders[region]) for region in regions)
    )


def grid_cuts(shape: Sequence[int], regions: Collection[Region]) -> tuple[tuple[int, ...], ...] | None:
    """Return the sizes into which each dimension is cut, if the regions are all cells of a grid; else None. Such
    regions tile the tensor, which saves comparing each pair. No region may be empty.
    """
    starts = [sorted({region.start[dimension] for region in regions}) for dimension in range(len(shape))]
    if not regions or math.prod(map(len, starts)) != len(regions) or any(one[0] for one in starts):
        return None
    sizes = [
        {start: end - start for start, end in itertools.pairwise([*one, whole])}
        for one, whole in zip(starts, shape, strict=True)
    ]
    for region in regions:
        if any(size != of[start] for start, size, of in zip(region.start, region.size, sizes, strict=True)):
            return None
    if len({region.start for region in regions}) < len(regions):
        return None
    return tuple(tuple(of.values()) for of in sizes)


def overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return the numbers of two regions of one tensor that have an element in common; None if there are none."""
    if not regions:
        return None
    starts = np.array([region.start for region in regions], np.int64).reshape(len(regions), -1)
    ends = starts + np.array([region.size for region in regions], np.int64).reshape(starts.shape)
    for number in range(len(regions)):
        others = slice(number + 1, None)
        meets = ((starts[others] < ends[number]) & (starts[number] < ends[others])).all(axis=1)
        if meets.any():
            return number, number + 1 + int(meets.argmax())
    return None


def merge_adjacent(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Yield the same bytes, with adjacent extents joined."""
    if not extents:
        return
    offset, end = extents[0].offset, extents[0].end
    for extent in extents[1:]:
        if extent.offset == end:
            end = extent.end
        else:
            yield Extent(offset, end - offset)
            offset, end = extent.offset, extent.end
    yield Extent(offset, end - offset)


def _whole_numbers(values: Sequence[Any]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < _SIZE_MAX:
            raise ProtocolError(f"a pattern with {value!r:.80}, expected a whole number from 0 to 2^62")
    return tuple(values)
