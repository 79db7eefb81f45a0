"""CRC-32 over pieces against zlib over the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from holdfast.crc import combine, combine_all, crc32


def test_crc32_is_the_polynomial_of_zip() -> None:
    assert crc32(b"123456789") == 0xCBF43926


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_continuing_and_combining_agree_with_zlib(first: bytes, second: bytes) -> None:
    whole = zlib.crc32(first + second)
    assert crc32(second, crc32(first)) == whole
    assert combine(crc32(first), crc32(second), len(second)) == whole


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_any_cut_gives_the_crc_of_the_whole(pieces: list[bytes]) -> None:
    assert combine_all((crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(b"".join(pieces))


def test_the_crc_of_no_bytes_is_zero() -> None:
    assert combine_all([]) == 0
    assert crc32(b"") == 0


def test_lengths_beyond_32_bits_combine() -> None:
    # Two runs of 3 GiB of zeros make one of 6 GiB, whichever way they are put together.
    half = 3 << 30
    mebibyte = crc32(bytes(1 << 20))
    run = combine_all((mebibyte, 1 << 20) for _ in range(half >> 20))
    assert combine(run, run, half) == combine_all((mebibyte, 1 << 20) for _ in range(2 * half >> 20))


def test_memoryviews_and_bytearrays_are_taken() -> None:
    data = bytearray(b"kelp")
    assert crc32(memoryview(data)) == crc32(data) == zlib.crc32(b"kelp")
