"""How an image is split among several stagers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.image.shares import WHOLE, ShareNumber, Shares


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 64))
def test_shares_are_contiguous_whole_parts_and_cover_each_chunk_once(
    chunks: int, part_chunks: int, writers: int
) -> None:
    shares = Shares(chunks, part_chunks, writers)
    ranges = [shares.chunks_of(share) for share in range(shares.count)]
    assert [chunk for one in ranges for chunk in one] == list(range(chunks))
    assert all(one.start % part_chunks == 0 for one in ranges)
    assert [shares.owner(chunk) for chunk in range(chunks)] == [
        share for share, one in enumerate(ranges) for _ in one
    ]
    sizes = [len(shares.parts_of(share)) for share in range(shares.count)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(shares.chunks_of(shares.count)) == len(shares.parts_of(writers)) == 0


@pytest.mark.parametrize(
    ("chunks", "part_chunks", "writers", "count"), [(7, 1, 1, 1), (7, 4, 3, 2), (4, 4, 3, 1), (9, 2, 5, 5)]
)
def test_an_image_has_no_more_shares_than_parts(
    chunks: int, part_chunks: int, writers: int, count: int
) -> None:
    assert Shares(chunks, part_chunks, writers).count == count


@pytest.mark.parametrize(("chunks", "part_chunks", "writers"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 65)])
def test_impossible_numbers_are_refused(chunks: int, part_chunks: int, writers: int) -> None:
    with pytest.raises(ProtocolError, match=f"shares of {chunks} chunks in parts of {part_chunks}"):
        Shares(chunks, part_chunks, writers)


@pytest.mark.parametrize("number", [WHOLE, ShareNumber(0, 3), ShareNumber(2, 3), ShareNumber(63, 64)])
def test_a_share_is_read_as_it_is_written(number: ShareNumber) -> None:
    assert ShareNumber.from_text(str(number)) == number


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "1/65", "-1/2", "1/2/3", "a/b", "01/2"])
def test_any_other_text_is_no_share(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2/3"):
        ShareNumber.from_text(text)
