"""Regions against numpy: the bytes of a box in a whole tensor, and the regions that make up a whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.image import regions
from holdfast.image.entries import Extent
from holdfast.image.regions import Comb, Pattern, Region, merge_adjacent, unite

ITEM_BYTES = 2


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    """A shape, and a box in it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    spans = [draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)) for size in shape]
    start = tuple(min(span) for span in spans)
    return shape, Region(start, tuple(max(span) - min(span) for span in spans))


def bytes_of(shape: tuple[int, ...], region: Region) -> list[int]:
    """Offsets of the region's bytes in the whole tensor, in the order in which a contiguous copy has them."""
    whole = np.arange(math.prod(shape) * ITEM_BYTES).reshape(*shape, ITEM_BYTES)
    box = tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))
    offsets: list[int] = whole[box].ravel().tolist()
    return offsets


@given(boxes(), st.data())
def test_a_comb_is_what_numpy_cuts_out(box: tuple[tuple[int, ...], Region], data: st.DataObject) -> None:
    shape, region = box
    comb, expected = Comb(shape, ITEM_BYTES, region), bytes_of(shape, region)
    assert comb.nbytes == len(expected)
    assert comb.span == Extent(expected[0], expected[-1] + 1 - expected[0])
    for offset in range(-1, math.prod(shape) * ITEM_BYTES + 2):
        assert comb.bytes_before(offset) == sum(one < offset for one in expected)
    first = data.draw(st.integers(0, comb.nbytes))
    end = data.draw(st.integers(first, comb.nbytes))
    extents = comb.extents(first, end)
    assert [at for extent in extents for at in range(extent.offset, extent.end)] == expected[first:end]
    runs = [*merge_adjacent(extents)]
    assert [at for extent in runs for at in range(extent.offset, extent.end)] == expected[first:end]
    assert all(one.end < other.offset for one, other in itertools.pairwise(runs))


def test_a_pattern_from_what_ranks_say_they_hold() -> None:
    upper, lower = Region((0, 0), (3, 4)), Region((3, 0), (2, 4))
    pattern = unite((5, 4), 4, [upper, lower, None, upper, Region((0, 0), (0, 4))])
    assert pattern.regions == (upper, lower)
    assert pattern.holders == ((0, 3), (1,))
    assert pattern.region_of == {0: 0, 3: 0, 1: 1}
    assert Pattern.from_json(pattern.to_json()) == pattern


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            [Region((0, 0), (3, 4)), Region((2, 0), (3, 4))],
            r"\[0:3, 0:4\] of rank 0 and \[2:5, 0:4\] of rank 1 over",
        ),
        ([Region((0, 0), (3, 4)), Region((4, 0), (1, 4))], "hold 16 of the 20 elements"),
        ([Region((0, 0), (3, 4))], "hold 12 of the 20 elements"),
        ([Region((0, 0), (5, 2)), Region((0, 1), (5, 3))], "overlap"),
        ([Region((0, 0), (6, 4))], r"\[0:6, 0:4\] is not in"),
        ([Region((0,), (5,))], "is not in"),
        ([], "hold 0 of the 20"),
    ],
)
def test_regions_that_do_not_make_up_the_whole_are_refused(held: list[Region], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        unite((5, 4), 4, held)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        [[4], 4, [[[0], [4], [-1]]]],
        [[4], 4, [[[0], [4], []]]],
        [[4], 4, [[[0], [2], [0]], [[2], [2], [0]]]],  # one rank, two regions
        [[4], 0, [[[0], [4], [0]]]],
        [[4], 4, [[[0], [4], [1, 0]]]],
        [[2**61, 2**61], 4, [[[0, 0], [2**61, 2**61], [0]]]],
        [[4], 4.0, [[[0], [4], [0]]]],
        [[4], 4, [[[0], ["4"], [0]]]],
        [[0], 4, []],
    ],
)
def test_a_pattern_from_outside_that_is_none(document: Any) -> None:
    with pytest.raises(ProtocolError):
        Pattern.from_json(document)


@pytest.mark.parametrize("spared", [(), (1,), (0, 1, 2), (0, 1, 2, 3)])
def test_holders_of_one_region_share_it_out(monkeypatch: pytest.MonkeyPatch, spared: tuple[int, ...]) -> None:
    monkeypatch.setattr(regions, "DEAL_BYTES_MIN", 8)
    whole = Region((0,), (100,))
    pattern = unite((100,), 1, [whole] * 4)
    for turn in range(5):
        shares = pattern.shares(0, turn, spared)
        assert shares[0].first == 0
        assert all(one.end == other.first for one, other in itertools.pairwise(shares))
        assert shares[-1].end == 100
        wanted = set(range(4)) - set(spared) or set(range(4))
        assert {share.rank for share in shares} == wanted
        assert max(share.end - share.first for share in shares) <= 100 // len(shares) + 1


def test_a_small_region_is_sent_by_one_holder_and_each_tensor_has_its_turn() -> None:
    pattern = unite((100,), 1, [Region((0,), (100,))] * 3)
    assert [[share.rank for share in pattern.shares(0, turn)] for turn in range(4)] == [[0], [1], [2], [0]]
