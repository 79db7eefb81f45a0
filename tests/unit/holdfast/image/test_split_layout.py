"""Layouts of split tensors: every byte has one sender that holds it; and a byte that changes on its way is detected."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.crc import crc32
from holdfast.errors import DamageError, ProtocolError
from holdfast.image import regions
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, verify_chunk
from holdfast.image.entries import REPLICATED, SPLIT, Entry
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.regions import Pattern, Region, unite
from holdfast.image.slices import area_bytes, area_bytes_by_rank

CHUNK_BYTES = 4096
Bytes = npt.NDArray[np.uint8]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw ranks and entries: split among some of the ranks, replicated, or of one rank; some ranks are spared."""
    ranks = draw(st.integers(1, 6))
    patterns: list[Pattern] = []
    entries: list[Entry] = []
    offset = draw(st.integers(0, 5000))
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
        pattern = draw(patterns_of(shape, draw(st.sampled_from([1, 2, 4])), ranks))
        if pattern not in patterns:
            patterns.append(pattern)
        owner = draw(st.sampled_from([SPLIT - patterns.index(pattern)] * 3 + [REPLICATED, 0]))
        entries.append(Entry(f"archive/data/{number}", offset, pattern.nbytes, owner, ()))
        offset += pattern.nbytes + draw(st.sampled_from([0, 64, 5000]))
    spared = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    image_bytes = offset + 22
    return Layout(image_bytes, CHUNK_BYTES, ranks, tuple(entries), (), tuple(sorted(spared)), tuple(patterns))


@st.composite
def patterns_of(draw: st.DrawFn, shape: tuple[int, ...], item_bytes: int, ranks: int) -> Pattern:
    """Draw a grid of boxes, each held by a rank; other ranks hold one of them, too, or nothing."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    boxes = [
        Region(tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box))
        for box in itertools.product(*spans)
    ]
    if len(boxes) > ranks:
        boxes = [Region((0,) * len(shape), shape)]
    order = draw(st.permutations(range(ranks)))
    held: list[Region | None] = [None] * ranks
    for place, rank in enumerate(order):
        held[rank] = boxes[place] if place < len(boxes) else draw(st.sampled_from([None, *boxes]))
    return unite(shape, item_bytes, held)


class Ranks(NamedTuple):
    """An image, and the parts of it in each rank's memory."""

    layout: Layout
    image: Bytes

    def local(self, entry: int, rank: int) -> Bytes:
        """Return the rank's bytes of an entry, back to back."""
        place = self.layout.entries[entry]
        whole = self.image[place.offset : place.end]
        pattern = self.layout.pattern_of(place)
        if pattern is None:
            return whole
        start, size = pattern.regions[pattern.region_of[rank]]
        box = tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))
        return np.ascontiguousarray(whole.reshape(*pattern.shape, pattern.item_bytes)[box]).ravel()

    def frame(self, chunk: int, rank: int) -> bytes:
        """Return the frame that the rank sends for a chunk."""
        sent = []
        for part in self.layout.parts(chunk, rank):
            if part.entry is None:
                sent += [self.image[extent.offset : extent.end] for extent in part.extents]
            else:
                sent.append(self.local(part.entry, rank)[part.inside : part.inside + part.nbytes])
        return b"".join(piece.tobytes() for piece in sent)


def ranks_of(layout: Layout) -> Ranks:
    image = np.random.default_rng(7).integers(0, 256, layout.image_bytes, dtype=np.uint8)
    return Ranks(layout, image)


@given(layouts(), st.sampled_from([8, 64 * 1024]))
def test_every_byte_is_sent_once_by_a_rank_that_holds_it(layout: Layout, deal_bytes_min: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "DEAL_BYTES_MIN", deal_bytes_min)
        ranks, times = ranks_of(layout), np.zeros(layout.image_bytes, int)
        received = np.zeros(layout.image_bytes, np.uint8)
        for rank in range(layout.ranks):
            for chunk, extents in layout.sent_frames(rank):
                frame = ranks.frame(chunk, rank)
                for extent in extents:
                    times[extent.offset : extent.end] += 1
                    received[extent.offset : extent.end] = np.frombuffer(frame[: extent.nbytes], np.uint8)
                    frame = frame[extent.nbytes :]
                assert not frame
        assert (times == 1).all()
        assert (received == ranks.image).all()
        for chunk in range(layout.chunks):
            assert layout.senders(chunk) == tuple(
                rank for rank in range(layout.ranks) if layout.pieces(chunk, rank)
            )
        for rank in layout.spared:
            alone = [entry for entry in layout.entries if held_alone(layout, entry, rank)]
            assert layout.slice_bytes(rank) <= sum(entry.nbytes for entry in alone)


def held_alone(layout: Layout, entry: Entry, rank: int) -> bool:
    """Whether only this rank, or only ranks that are spared, have some bytes of the entry."""
    pattern = layout.pattern_of(entry)
    if pattern is None:
        return entry.owner == rank
    region = pattern.region_of.get(rank)
    return region is not None and set(pattern.holders[region]) <= set(layout.spared)


@given(layouts())
def test_a_layout_with_patterns_comes_back_from_its_bytes(layout: Layout) -> None:
    assert Layout.from_bytes(layout.to_bytes()) == layout


@given(layouts(), st.data())
def test_the_flusher_names_the_rank_whose_byte_has_changed(layout: Layout, data: st.DataObject) -> None:
    ranks, index = ranks_of(layout), LayoutIndex(layout)
    chunk = data.draw(st.integers(0, layout.chunks - 1))
    extent = layout.chunk_extent(chunk)
    memory = bytearray(ranks.image[extent.offset : extent.end].tobytes())
    sources = tuple(Source(rank, crc32(ranks.frame(chunk, rank))) for rank in layout.senders(chunk))
    key = CheckpointId(1, 2)
    crcs = verify_chunk(memoryview(memory), index, chunk, sources, key=key)
    assert list(crcs) == [
        crc32(ranks.image[one.offset : one.end].tobytes()) for one in layout.segments(chunk)
    ]
    at = data.draw(st.integers(0, len(memory) - 1))
    memory[at] ^= 1
    (culprit,) = [
        rank
        for rank in layout.senders(chunk)
        if any(piece.offset <= extent.offset + at < piece.end for piece in layout.pieces(chunk, rank))
    ]
    with pytest.raises(DamageError, match=f"from rank {culprit}:"):
        verify_chunk(memoryview(memory), index, chunk, sources, key=key)


def test_an_entry_of_another_size_than_its_pattern_is_refused() -> None:
    pattern = unite((4,), 1, [Region((0,), (4,))])
    entry = Entry("archive/data/0", 0, 5, SPLIT, ())
    with pytest.raises(ProtocolError, match="of 5 bytes has a pattern for 4"):
        Layout(100, CHUNK_BYTES, 1, (entry,), patterns=(pattern,))


def test_a_pattern_that_is_not_there_and_a_holder_that_is_no_rank_are_refused() -> None:
    pattern = unite((4,), 1, [None, Region((0,), (4,))])
    with pytest.raises(ProtocolError, match="owner -3, of 2 ranks and 1 patterns"):
        Layout(100, CHUNK_BYTES, 2, (Entry("a", 0, 4, SPLIT - 1, ()),), patterns=(pattern,))
    with pytest.raises(ProtocolError, match="rank 1 holds a region, of 1 ranks"):
        Layout(100, CHUNK_BYTES, 1, (Entry("a", 0, 4, SPLIT, ()),), patterns=(pattern,))


@given(layout=layouts())
def test_frames_by_chunk_agree_with_frames_by_rank(layout: Layout) -> None:
    assert area_bytes_by_rank(layout) == [area_bytes(layout, rank) for rank in range(layout.ranks)]
    assert layout.frames == tuple(len(list(layout.sent_frames(rank))) for rank in range(layout.ranks))
