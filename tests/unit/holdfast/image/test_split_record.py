"""The manifest's record of a split: short, correct, and never longer for more ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.image.regions import Pattern, Region, unite
from holdfast.image.split_record import RUNS_MAX, SplitRecord


def rows(total: int, ranks: int) -> list[Region]:
    """Split rows like FSDP: the last regions may be short, or empty."""
    each = -(-total // ranks)
    places = [min(total, each * rank) for rank in range(ranks + 1)]
    return [Region((first, 0), (end - first, 6)) for first, end in itertools.pairwise(places)]


def blocks(counts: Sequence[int], size: int = 2) -> list[Region]:
    """Return a grid of equal blocks, row by row."""
    places = itertools.product(*map(range, counts))
    return [Region(tuple(size * one for one in place), (size,) * len(place)) for place in places]


def of(shape: tuple[int, ...], held: list[Region]) -> SplitRecord:
    return SplitRecord.of(unite(shape, 4, held))


WHOLE = Region((0, 0), (8, 6))
PINWHEEL = [
    Region(*box)
    for box in (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
]


@pytest.mark.parametrize(
    ("shape", "held", "told"),
    [
        ((8, 6), rows(8, 4), "split in 4 along dim 0"),
        ((9, 6), rows(9, 4), "split in 3 along dim 0"),
        ((8, 6), rows(8, 2) * 2, "split in 2 along dim 0, replicated x 2"),
        ((4, 4), blocks((2, 2)), "2 x 2 blocks"),
        ((2, 4, 6), blocks((1, 2, 3)), "1 x 2 x 3 blocks"),
        ((2, 8), blocks((1, 4)), "split in 4 along dim 1"),
        ((8, 6), [WHOLE, WHOLE], "replicated x 2"),
        ((8, 6), [WHOLE], "on one rank"),
        ((8, 6), [*rows(8, 2), rows(8, 2)[0]], "split in 2 along dim 0, replicated x 1 to 2"),
        ((3, 3), PINWHEEL, "split in 5 parts"),
        ((), [Region((), ())] * 3, "replicated x 3"),
    ],
)
def test_a_split_is_told_in_a_few_words(shape: tuple[int, ...], held: list[Region], told: str) -> None:
    assert of(shape, held).describe() == told


def expanded(record: SplitRecord) -> tuple[list[Region], list[list[int]]]:
    """Return the regions and their holders, from the record's numbers alone."""
    sizes = [
        [size for size, count in zip(one[::2], one[1::2], strict=True) for _ in range(count)]
        for one in record.cuts
    ]
    spans = [list(itertools.pairwise(itertools.accumulate(one, initial=0))) for one in sizes]
    regions = [
        Region(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)
    ]
    runs = zip(*(iter(record.ranks),) * 3, strict=True)
    ranks = [first + step * number for first, step, count in runs for number in range(count)]
    return regions, [sorted(ranks[number :: record.parts]) for number in range(record.parts)]


@given(st.data())
def test_a_grid_comes_back_of_its_numbers(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=3))
    spans = [list(itertools.pairwise(itertools.accumulate(one, initial=0))) for one in sizes]
    cells = [
        Region(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)
    ]
    copies = data.draw(st.integers(1, 3))
    held = data.draw(st.permutations(cells * copies))
    pattern = unite(tuple(map(sum, sizes)), 2, held)
    record = SplitRecord.of(pattern)
    assert record.parts == len(cells) == math.prod(sum(one[1::2]) for one in record.cuts)
    regions, holders = expanded(record)
    assert dict(zip(regions, map(tuple, holders), strict=True)) == dict(
        zip(pattern.regions, pattern.holders, strict=True)
    )


@pytest.mark.parametrize("ranks", [16, 4096])
def test_more_ranks_take_no_more_room(ranks: int) -> None:
    parts = 8  # degree of tensor parallelism
    mesh = of((2 * ranks // parts, 2 * parts), blocks((ranks // parts, parts)))
    assert mesh.ranks == (0, 1, ranks)
    assert len(mesh.model_dump_json()) < 120
    # Both dimensions of the mesh split the same dimension, the inner one first: neighbours belong to distant ranks.
    strided = [Region(((rank % parts) * (ranks // parts) + rank // parts,), (1,)) for rank in range(ranks)]
    assert len(of((ranks,), strided).ranks) == 3 * parts


def test_a_split_without_a_short_form_is_left_out() -> None:
    count = 3 * RUNS_MAX + 1  # a prime
    uneven = [Region((n * n,), (2 * n + 1,)) for n in range(count)]
    shuffled = [uneven[n**5 % count] for n in range(count)]
    assert len({region.start for region in shuffled}) == count
    record = of((count * count,), shuffled)
    assert (record.cuts, record.ranks) == ((), ())
    assert record.describe() == f"split in {count} parts"


def test_an_accepted_whole_covers_each_element_once() -> None:
    spans = [
        [(start, end - start) for start in range(size) for end in range(start + 1, size + 1)]
        for size in (2, 3)
    ]
    boxes = [
        Region((top, left), (height, width)) for (top, height), (left, width) in itertools.product(*spans)
    ]
    whole_numbers = 0
    for several in itertools.chain.from_iterable(
        itertools.combinations(boxes, count) for count in range(1, 5)
    ):
        painted = [
            (top + row, left + column)
            for (top, left), (height, width) in several
            for row, column in itertools.product(range(height), range(width))
        ]
        exact = sorted(painted) == [*itertools.product(range(2), range(3))]
        try:
            Pattern((2, 3), 1, several, tuple((rank,) for rank in range(len(several))))
        except ProtocolError:
            assert not exact, several
        else:
            assert exact, several
            whole_numbers += 1
    assert whole_numbers > 10
