"""The CRCs of shares, and of the image that they make."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.image.index import LayoutIndex
from holdfast.image.share_sums import ShareSums, combine_sums, entry_crcs_of, entry_pieces, part_crcs
from holdfast.image.shares import Shares
from tests.support.images import Image, made_up

IMAGE = made_up(3, entries=30, chunk_bytes=4096, ranks=2, entry_bytes_max=9000)


def sums_of(image: Image, shares: Shares, share: int) -> ShareSums:
    index, chunks = LayoutIndex(image.layout), shares.chunks_of(share)
    data = image.final
    segment_crcs = {
        chunk: [zlib.crc32(data[one.offset : one.end]) for one in image.layout.segments(chunk)]
        for chunk in chunks
    }
    chunk_crcs = []
    for chunk in chunks:
        extent = image.layout.chunk_extent(chunk)
        chunk_crcs.append(zlib.crc32(data[extent.offset : extent.end]))
    return ShareSums(tuple(chunk_crcs), entry_crcs_of(index, chunks, segment_crcs))


@given(st.integers(1, 9), st.integers(1, 3))
def test_the_sums_of_all_shares_are_those_of_the_image(writers: int, part_chunks: int) -> None:
    layout, data = IMAGE.layout, IMAGE.final
    shares = Shares.of(layout, writers, part_chunks)
    found = combine_sums(layout, shares, [sums_of(IMAGE, shares, share) for share in range(shares.count)])
    assert found.image_crc32 == zlib.crc32(data)
    assert found.entry_crc32s == tuple(zlib.crc32(data[one.offset : one.end]) for one in layout.entries)
    parts = part_crcs(layout, shares, found.chunk_crc32s)
    part_bytes = part_chunks * layout.chunk_bytes
    assert parts == {
        part: zlib.crc32(data[part * part_bytes : (part + 1) * part_bytes]) for part in range(shares.parts)
    }


def test_a_share_with_too_few_sums_is_named() -> None:
    shares = Shares.of(IMAGE.layout, 2, 1)
    first, second = (sums_of(IMAGE, shares, share) for share in range(2))
    short = second._replace(chunk_crcs=second.chunk_crcs[1:])
    with pytest.raises(ProtocolError, match="share 2 of 2 has CRCs of"):
        combine_sums(IMAGE.layout, shares, [first, short])
    with pytest.raises(ProtocolError, match="CRCs of 1 shares, expected 2"):
        combine_sums(IMAGE.layout, shares, [first])


def test_pieces_cover_each_entry_once() -> None:
    shares = Shares.of(IMAGE.layout, 3, 1)
    pieces = [
        piece
        for share in range(shares.count)
        for piece in entry_pieces(IMAGE.layout, shares.chunks_of(share))
    ]
    sizes = [0] * len(IMAGE.layout.entries)
    for piece in pieces:
        sizes[piece.entry] += piece.nbytes
    assert sizes == [entry.nbytes for entry in IMAGE.layout.entries]
    assert entry_pieces(IMAGE.layout, range(0)) == []
