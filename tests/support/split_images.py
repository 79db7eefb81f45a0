"""Images whose tensors are split among ranks, and each rank's part of them: cut out by numpy, not by the product.

whole tensor ── boxes, each with its ranks ──► held[entry, rank]: the rank's local tensor
                                         └──► `unite`, as the agreement's leader does ──► the layout's pattern
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.image.entries import SPLIT
from holdfast.image.regions import Pattern, Region, unite
from tests.support.images import Image

__all__ = ["SplitImage", "cut_up", "split"]


@dataclass(frozen=True)
class SplitImage(Image):
    """An image, and by entry and rank the local tensors that its frames are made of."""

    held: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def frame(self, chunk: int, rank: int) -> bytes:
        """The bytes that `rank` sends into `chunk`, from its local tensors where it holds a part."""
        frame = bytearray()
        for part in self.layout.parts(chunk, rank):
            own = None if part.entry is None else self.held.get((part.entry, rank))
            if own is None:
                frame += b"".join(self.sent[extent.offset : extent.end] for extent in part.extents)
            else:
                frame += own[part.inside : part.inside + part.nbytes]
        return bytes(frame)


def split(image: Image, cuts: Mapping[int, tuple[tuple[int, ...], Sequence[Region | None]]]) -> SplitImage:
    """The same file, with some entries split.

    Args:
        image: Its split entries hold one byte to an element.
        cuts: Entry → its shape, and by rank the region that it holds.
    """
    patterns: list[Pattern] = []
    entries, held = list(image.layout.entries), {}
    for number, (shape, regions) in cuts.items():
        entry = entries[number]
        pattern = unite(shape, 1, regions)
        if pattern not in patterns:
            patterns.append(pattern)
        entries[number] = replace(entry, owner=SPLIT - patterns.index(pattern))
        whole = np.frombuffer(image.final[entry.offset : entry.end], np.uint8).reshape(shape)
        for rank, region in enumerate(regions):
            if region is not None and region.numel:
                box = zip(region.start, region.size, strict=True)
                held[number, rank] = whole[tuple(slice(start, start + size) for start, size in box)].tobytes()
    layout = replace(image.layout, entries=tuple(entries), patterns=tuple(patterns))
    return SplitImage(layout, image.final, image.sent, held)


def cut_up(image: Image, chance: random.Random, *, share: float = 1.0) -> SplitImage:
    """The same file, with this share of its tensors split on some mesh; only `chance` decides how, not the bytes."""
    cuts = {}
    for number, entry in enumerate(image.layout.entries):
        if "/data/" in entry.name and entry.nbytes and chance.random() < share:
            shape = _shape_of(entry.nbytes, chance)
            cuts[number] = (shape, _regions_of(shape, image.layout.ranks, chance))
    return split(image, cuts)


def _shape_of(nbytes: int, chance: random.Random) -> tuple[int, ...]:
    """Two or three dimensions where the number has divisors, else one."""
    shape, left = [], nbytes
    for _ in range(chance.choice([1, 1, 2])):
        divisors = [number for number in range(2, min(left // 8, 60)) if left % number == 0]
        if divisors:
            shape.append(chance.choice(divisors))
            left //= shape[-1]
    return (*shape, left)


def _regions_of(shape: tuple[int, ...], ranks: int, chance: random.Random) -> list[Region | None]:
    """Some mesh: rows as FSDP2 cuts them, columns, or boxes cut anywhere; a region has one rank, or replicas."""
    groups = chance.choice([ranks, ranks, chance.randint(1, ranks)])
    order = chance.choice([list(range(ranks)), chance.sample(range(ranks), ranks)])
    # HSDP: ranks beyond the number of groups hold replicas.
    group_of = {rank: place % groups for place, rank in enumerate(order)}
    if chance.random() < 0.6:
        boxes = _shards(shape, groups, chance.randrange(len(shape)))
    else:
        boxes = _boxes(shape, groups, chance)
    return [boxes[group_of[rank]] for rank in range(ranks)]


def _shards(shape: tuple[int, ...], count: int, dimension: int) -> list[Region | None]:
    """As `torch.chunk`: all shards but the last have equal size; the last ones may be short, or empty."""
    each = -(-shape[dimension] // count)
    found: list[Region | None] = []
    for number in range(count):
        start, size = [0] * len(shape), list(shape)
        start[dimension] = min(number * each, shape[dimension])
        size[dimension] = min(each, shape[dimension] - start[dimension])
        found.append(Region(tuple(start), tuple(size)))
    return found


def _boxes(shape: tuple[int, ...], count: int, chance: random.Random) -> list[Region | None]:
    boxes = [Region((0,) * len(shape), shape)]
    while len(boxes) < count:
        largest = max(boxes, key=lambda box: math.prod(box.size))
        wide = [d for d, size in enumerate(largest.size) if size > 1]
        if not wide:
            break
        cut = chance.choice(wide)
        first = chance.randrange(1, largest.size[cut])
        boxes.remove(largest)
        for offset, size in ((0, first), (first, largest.size[cut] - first)):
            start, sizes = list(largest.start), list(largest.size)
            start[cut] += offset
            sizes[cut] = size
            boxes.append(Region(tuple(start), tuple(sizes)))
    return [*boxes, *[None] * (count - len(boxes))]
