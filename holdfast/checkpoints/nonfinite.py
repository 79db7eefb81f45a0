"""Counts numbers that are not finite (NaN, infinite) in the bytes of floating tensors, in bounded memory.

Every floating format has its exponent in the same bits of each value; a value with all of them set is not finite. The
bytes are therefore examined as integers, and numpy need not know the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.crc import crc32
from holdfast.image.manifest import NONFINITE_NAMED_MAX, Manifest, NonfiniteRecord

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK_VALUES = 1 << 16  # their intermediate results stay in the cache of one core
LARGE_BYTES = 1 << 15  # runs of this many bytes are counted one by one
_DENSE = 4  # runs are counted together if they cover at least one byte in four


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point dtype. `mask`: bits all set exactly in values that are not finite; the sign is above them."""

    nbytes: int
    mask: int


_FORMATS = {
    "bfloat16": FloatFormat(2, 0x7F80),
    "float16": FloatFormat(2, 0x7C00),
    "float32": FloatFormat(4, 0x7F800000),
    "float64": FloatFormat(8, 0x7FF0000000000000),
    "complex64": FloatFormat(4, 0x7F800000),  # two values
    "complex128": FloatFormat(8, 0x7FF0000000000000),
    "float8_e5m2": FloatFormat(1, 0x7C),
    "float8_e4m3fn": FloatFormat(1, 0x7F),
}


def float_formats(manifest: Manifest) -> dict[int, FloatFormat]:
    """Return the format of each entry that has only floating numbers, by index; not of storages seen in two formats."""
    found: dict[int, FloatFormat | None] = {}
    for tensor in manifest.tensors:
        float_format = _FORMATS.get(tensor.dtype)
        found[tensor.entry] = float_format if found.get(tensor.entry, float_format) == float_format else None
    return {entry: float_format for entry, float_format in found.items() if float_format is not None}


def count_nonfinite(data: memoryview, float_format: FloatFormat) -> int:
    """Return how many values in `data` are not finite; bytes after the last whole value do not count."""
    values = np.frombuffer(data, dtype=f"<u{float_format.nbytes}", count=len(data) // float_format.nbytes)
    return sum(
        _count_in_block(values[begin : begin + _BLOCK_VALUES], float_format)
        for begin in range(0, len(values), _BLOCK_VALUES)
    )


def crc32_and_nonfinite(data: memoryview, float_format: FloatFormat) -> tuple[int, int]:
    """Return the CRC-32 of `data` and its `count_nonfinite`; each block enters the cache once."""
    crc, count = 0, 0
    for begin in range(0, len(data), block_bytes := _BLOCK_VALUES * float_format.nbytes):
        block = data[begin : begin + block_bytes]
        crc = crc32(block, crc)
        count += count_nonfinite(block, float_format)
    return crc, count


def _count_in_block(block: npt.NDArray[Any], float_format: FloatFormat) -> int:
    # The exponent is below the sign, so values that are not finite are the greatest of their sign. Nearly always all
    # are finite, and a maximum writes no memory.
    sign = 1 << (8 * float_format.nbytes - 1)
    if not block.size or (
        block.max() < sign | float_format.mask
        and block.view(f"<i{float_format.nbytes}").max() < float_format.mask
    ):
        return 0
    mask = block.dtype.type(float_format.mask)
    return int(np.count_nonzero(np.bitwise_and(block, mask) == mask))


def count_nonfinite_of_each(
    data: memoryview, runs: Sequence[tuple[int, int]], float_format: FloatFormat
) -> list[int]:
    """Return the count of each run of bytes of `data`: begin and end, ascending. Small runs are counted together."""
    first, last = runs[0][0], runs[-1][1]
    begins, ends = np.array(runs, np.int64).T
    is_dense = (ends - begins).sum() * _DENSE >= last - first
    if (
        (last - first) // len(runs) >= LARGE_BYTES
        or not is_dense
        or ((begins - first) % float_format.nbytes).any()
    ):
        return [count_nonfinite(data[begin:end], float_format) for begin, end in runs]
    counts = np.zeros(len(runs), np.int64)
    values = np.frombuffer(data, f"<u{float_format.nbytes}", (last - first) // float_format.nbytes, first)
    mask = values.dtype.type(float_format.mask)
    for begin in range(0, len(values), _BLOCK_VALUES):
        block = values[begin : begin + _BLOCK_VALUES]
        found = first + (begin + np.flatnonzero((block & mask) == mask)) * float_format.nbytes
        if found.size:
            of_run = np.searchsorted(begins, found, side="right") - 1
            counts += np.bincount(of_run[found + float_format.nbytes <= ends[of_run]], minlength=len(runs))
    return counts.tolist()


def nonfinite_record(manifest: Manifest, counts: dict[int, int]) -> NonfiniteRecord:
    """Return the result for the manifest. `counts`: by index of the entry; entries with zero may be left out."""
    touched = [tensor for tensor in manifest.tensors if counts.get(tensor.entry)]
    return NonfiniteRecord(
        values=sum(counts.values()),
        tensors=len(touched),
        named={tensor.path: counts[tensor.entry] for tensor in touched[:NONFINITE_NAMED_MAX]},
    )
