"""One rank sends each byte of the image, in whole frames; a layout from outside is not trusted."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED, Entry, TensorInfo
from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes, area_bytes_by_rank

CHUNK_BYTES = 4096


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.integers(1, 5))
    entries: list[Entry] = []
    position = draw(st.integers(0, 100))
    for index in range(draw(st.integers(0, 12))):
        nbytes = draw(st.one_of(st.integers(0, 100), st.integers(0, 3 * CHUNK_BYTES)))
        owner = draw(st.integers(REPLICATED, ranks - 1))
        fields = (position + nbytes + 4,) if nbytes else ()
        entries.append(Entry(f"archive/data/{index}", position, nbytes, owner, fields))
        position += nbytes + draw(st.integers(8, 200))
    tensors = tuple(TensorInfo(f"t/{index}ü", "float32", (index, 2), index) for index in range(len(entries)))
    image_bytes = position + draw(st.integers(1, 2 * CHUNK_BYTES))
    spared = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    return Layout(image_bytes, CHUNK_BYTES, ranks, tuple(entries), tensors, tuple(sorted(spared)))


@given(layout=_layouts())
def test_slices_cover_every_byte_exactly_once(layout: Layout) -> None:
    covered = bytearray(layout.image_bytes)
    for rank in range(layout.ranks):
        chunks = []
        total = 0
        for chunk, extents in layout.sent_frames(rank):
            chunks.append(chunk)
            window = layout.chunk_extent(chunk)
            assert rank in layout.senders(chunk)
            assert extents == layout.pieces(chunk, rank)
            end = -1
            for extent in extents:
                assert extent.nbytes > 0
                assert window.offset <= extent.offset
                assert extent.end <= window.end
                assert extent.offset > end, "in order, neighbours merged"
                end = extent.end
                total += extent.nbytes
                for offset in range(extent.offset, extent.end):
                    covered[offset] += 1
        assert chunks == sorted(set(chunks))
        assert total == layout.slice_bytes(rank)
    assert set(covered) == {1}


@given(layout=_layouts())
def test_owned_entries_are_sent_by_their_owner_and_the_rest_by_the_slice(layout: Layout) -> None:
    for chunk in range(layout.chunks):
        assert chunk in layout.slice_chunks(layout.chunk_rank(chunk))
        position = layout.chunk_extent(chunk).offset
        for segment in layout.segments(chunk):
            assert segment.offset == position
            position += segment.nbytes
            owner = REPLICATED if segment.entry is None else layout.entries[segment.entry].owner
            expected = layout.chunk_rank(chunk) if owner == REPLICATED else owner
            assert layout.sender(chunk, segment) == expected
            assert any(
                piece.offset <= segment.offset and segment.offset + segment.nbytes <= piece.end
                for piece in layout.pieces(chunk, expected)
            )
        assert position == layout.chunk_extent(chunk).end


@given(layout=_layouts())
def test_slices_are_whole_chunks_as_even_as_can_be(layout: Layout) -> None:
    sizes = {rank: len(layout.slice_chunks(rank)) for rank in range(layout.ranks)}
    assert sum(sizes.values()) == layout.chunks
    carried = [size for rank, size in sizes.items() if rank not in layout.spared]
    assert max(carried) - min(carried) <= 1


@given(layout=_layouts())
def test_a_spared_rank_sends_what_it_owns_and_nothing_else(layout: Layout) -> None:
    owned = dict.fromkeys(range(layout.ranks), 0)
    for entry in layout.entries:
        if entry.owner != REPLICATED:
            owned[entry.owner] += entry.nbytes
    for rank in layout.spared:
        assert layout.slice_bytes(rank) == owned[rank]


@given(layout=_layouts())
def test_spared_ranks_are_in_the_digest_and_an_empty_list_changes_nothing(layout: Layout) -> None:
    whole = replace(layout, spared=())
    assert (whole.digest == layout.digest) == (not layout.spared)
    assert replace(whole, spared=layout.spared) == layout
    assert whole.image_bytes == layout.image_bytes
    document = json.loads(zlib.decompress(whole.to_bytes()))
    assert document["format"] == 1
    assert "spared" not in document, "as it always was"


@given(layout=_layouts())
def test_bytes_and_back(layout: Layout) -> None:
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert again.digest == layout.digest
    other = Layout(layout.image_bytes + 1, CHUNK_BYTES, layout.ranks, layout.entries, layout.tensors)
    assert other.digest != layout.digest


def _document(**changes: Any) -> bytes:
    document = {
        "format": 1,
        "image_bytes": 10_000,
        "chunk_bytes": 4096,
        "ranks": 2,
        "entries": [["a", 100, 50, -1, [154]], ["b", 200, 50, 1, []]],
        "tensors": [["t", "int8", [50], 0]],
        **changes,
    }
    return zlib.compress(json.dumps(document).encode())


def test_the_document_of_the_refusals_is_fine_itself() -> None:
    assert Layout.from_bytes(_document()).chunks == 3
    assert Layout.from_bytes(_document(format=2, spared=[0])).slice_chunks(1) == range(3)


@pytest.mark.parametrize("spared", [[0, 1], [2], [-1], [1, 0], [0, 0], ["0"], 1, None])
def test_ranks_that_cannot_all_be_spared_are_refused(spared: Any) -> None:
    with pytest.raises(ProtocolError):
        Layout.from_bytes(_document(format=2, spared=spared))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"image_bytes": 0},
        {"image_bytes": -1},
        {"image_bytes": 2**63},
        {"image_bytes": 1.5},
        {"image_bytes": True},
        {"chunk_bytes": 0},
        {"chunk_bytes": 4097},
        {"ranks": 0},
        {"entries": [["a", 100, 50, -1, []], ["b", 149, 1, -1, []]]},
        {"entries": [["a", 9_990, 50, -1, []]]},
        {"entries": [["a", 100, -1, -1, []]]},
        {"entries": [["a", 100, 50, 2, []]]},
        {"entries": [["a", 100, 50, -2, []]]},
        {"entries": [["a", 100, 50, -1, [120]]]},
        {"entries": [["a", 100, 50, -1, [9_997]]]},
        {"entries": [["a", 100, 50, -1, [198]], ["b", 200, 50, 1, []]]},
        {"entries": [["a", "100", 50, -1, []]]},
        {"entries": [["a", 100, 50]]},
        {"entries": 7},
        {"tensors": [["t", "int8", [50], 2]]},
        {"tensors": [["t", "int8", [50], -1]]},
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Layout.from_bytes(_document(**changes))


@given(data=st.binary(max_size=200))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Layout.from_bytes(data)


def test_a_truncated_layout_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"truncated.*start the job again"):
        Layout.from_bytes(_document()[:-5])


@given(layout=_layouts())
def test_the_areas_of_all_ranks_are_those_of_each(layout: Layout) -> None:
    assert area_bytes_by_rank(layout) == [area_bytes(layout, rank) for rank in range(layout.ranks)]


def test_preparing_looks_at_each_chunk_once_whatever_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    look = Layout.senders

    def counted(layout: Layout, chunk: int) -> tuple[int, ...]:
        nonlocal looks
        looks += 1
        return look(layout, chunk)

    monkeypatch.setattr(Layout, "senders", counted)
    entry = Entry("a", 64, 600 * 4096, REPLICATED, ())
    layout = Layout(1000 * 4096, 4096, 512, (entry,), spared=tuple(range(1, 512, 2)))
    assert sum(layout.frames) == 1000
    assert sum(layout.frames) == 1000
    assert looks == 1000
    assert len(area_bytes_by_rank(layout)) == 512
    assert looks == 2000
