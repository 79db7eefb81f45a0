"""CRC-32 (the zip polynomial) over pieces, combined without reading the bytes twice.

`isal` uses the CPU's carry-less multiply, runs at memory speed, and releases the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable

from isal import isal_zlib

Buffer = bytes | bytearray | memoryview


# crc32(data, start=0): CRC-32 of `data`, continuing from `start`, the CRC of the bytes before it.
crc32 = isal_zlib.crc32

# combine(first, second, second_bytes): CRC-32 of A+B from the CRC of A, the CRC of B, and the number of bytes of B.
combine = isal_zlib.crc32_combine


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of a sequence from the `(crc, nbytes)` of its pieces, in order; 0 without pieces."""
    total = 0
    for crc, nbytes in pieces:
        total = combine(total, crc, nbytes)
    return total


def crc32_of_each(pieces: Iterable[Buffer]) -> tuple[int, ...]:
    """Return the CRC-32 of each piece, in a loop that runs in C: many pieces are small."""
    return tuple(map(crc32, pieces))
