"""CRC-32 (the zip polynomial) over pieces, combined without reading the bytes twice.

`isal` computes it with the carry-less multiply of the CPU, at memory speed, and gives the GIL back while it does.
"""

from __future__ import annotations

from collections.abc import Iterable

from isal import isal_zlib

Buffer = bytes | bytearray | memoryview


def crc32(data: Buffer, start: int = 0) -> int:
    """CRC-32 of `data`, continuing from `start` (the CRC of the bytes before it)."""
    return isal_zlib.crc32(data, start)


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of A+B from the CRC of A, the CRC of B, and the number of bytes of B."""
    return isal_zlib.crc32_combine(first, second, second_bytes)


def combine_all(pieces: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of a sequence from the `(crc, nbytes)` of its pieces, in order; 0 without a piece."""
    total, combined = 0, isal_zlib.crc32_combine
    for crc, nbytes in pieces:
        total = combined(total, crc, nbytes)
    return total


def crc32_of_each(pieces: Iterable[Buffer]) -> tuple[int, ...]:
    """CRC-32 of each of these, by a loop that runs in C: many of them are small."""
    return tuple(map(isal_zlib.crc32, pieces))
