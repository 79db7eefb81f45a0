"""Offsets of a region's bytes in the whole tensor, against numpy's own slicing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.image.regions import Comb, Region


class Case(NamedTuple):
    shape: tuple[int, ...]
    item_bytes: int
    region: Region

    @property
    def places(self) -> np.ndarray:
        """The place in the whole tensor of each byte of the region, in order."""
        nbytes = int(np.prod(self.shape)) * self.item_bytes
        whole = np.arange(nbytes).reshape(*self.shape, self.item_bytes)
        box = tuple(
            slice(start, start + size)
            for start, size in zip(self.region.start, self.region.size, strict=True)
        )
        found: np.ndarray = whole[box].reshape(-1)
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    start = [draw(st.integers(0, size - 1)) for size in shape]
    size = [draw(st.integers(1, whole - begin)) for begin, whole in zip(start, shape, strict=True)]
    return Case(tuple(shape), draw(st.sampled_from([1, 2, 4, 8])), Region(tuple(start), tuple(size)))


@given(cases(), st.data())
def test_blocks_are_the_bytes_of_the_region(case: Case, data: st.DataObject) -> None:
    comb = Comb(case.shape, case.item_bytes, case.region)
    first = data.draw(st.integers(0, comb.nbytes))
    end = data.draw(st.integers(first, comb.nbytes))
    found = [
        place
        for block in comb.blocks(first, end)
        for run in range(block.runs)
        for place in range(
            block.offset + run * block.stride, block.offset + run * block.stride + block.run_bytes
        )
    ]
    assert found == case.places[first:end].tolist()
    assert found == [
        place for extent in comb.extents(first, end) for place in range(extent.offset, extent.end)
    ]


@given(cases())
def test_before_counts_the_bytes_of_the_region(case: Case) -> None:
    comb = Comb(case.shape, case.item_bytes, case.region)
    nbytes = int(np.prod(case.shape)) * case.item_bytes
    for offset in range(-1, nbytes + 2):
        assert comb.bytes_before(offset) == int((case.places < offset).sum())


def test_a_column_is_one_block_whatever_its_length() -> None:
    comb = Comb((1_000_000, 64), 4, Region((0, 16), (1_000_000, 16)))
    assert len(list(comb.blocks(0, comb.nbytes))) == 1
    assert len(list(comb.blocks(3, comb.nbytes - 5))) == 3
