"""Several views as one file, without a copy."""

from __future__ import annotations

import io
import os

from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.s3_upload import ViewsBody


@given(
    st.lists(st.binary(max_size=9), max_size=5),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=8),
)
def test_reads_as_a_file_of_the_joined_bytes(pieces: list[bytes], reads: list[tuple[int, int]]) -> None:
    body, whole = ViewsBody([memoryview(piece) for piece in pieces]), b"".join(pieces)
    assert len(body) == len(whole)
    assert body.seek(0, os.SEEK_END) == len(whole)
    body.seek(0)
    assert b"".join(iter(lambda: bytes(body.read(4)), b"")) == whole
    for offset, size in reads:
        start = body.seek(offset)
        assert start == min(offset, len(whole)) == body.tell()
        got = body.read(size)
        assert whole[start:].startswith(bytes(got))
        assert bool(got) == bool(whole[start:])
        assert body.tell() == start + len(got)


def test_a_body_serves_small_reads_with_large_pieces() -> None:
    body = ViewsBody([memoryview(bytes(5 << 19)), memoryview(bytes(7))])
    assert [len(piece) for piece in iter(lambda: body.read(16_384), b"")] == [1 << 20, 1 << 20, 1 << 19, 7]
    body.seek(0)
    assert len(body.read(3 << 19)) == 3 << 19


def test_a_body_gives_the_memory_itself() -> None:
    memory = bytearray(64)
    body = ViewsBody([memoryview(memory)])
    body.seek(32)
    piece = body.read(8)
    memory[33] = 7
    assert piece[1] == 7


def test_a_body_can_be_rewound_for_a_second_attempt() -> None:
    body = ViewsBody([memoryview(b"abc"), memoryview(b"def")])
    assert bytes(body.read()) == b"abc"
    assert bytes(body.read()) == b"def"
    assert not body.read()
    body.seek(-4, io.SEEK_CUR)
    assert bytes(body.read(1)) == b"c"
    assert bytes(body.read(1)) == b"def"
