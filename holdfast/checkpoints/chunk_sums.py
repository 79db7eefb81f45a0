"""Sums of one chunk of a file that is read back, run by run: CRC-32 and the count of numbers that are not finite.

A run is the bytes in one entry, or between two entries. Many small runs are handled by loops in C; large ones block by
block, so that their bytes enter the cache once.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast import crc
from holdfast.checkpoints.nonfinite import (
    LARGE_BYTES,
    FloatFormat,
    count_nonfinite_of_each,
    crc32_and_nonfinite,
)
from holdfast.image.manifest import EntryRecord, Manifest
from holdfast.store.base import Store


class ChunkSums(NamedTuple):
    """Sums of one chunk, run by run: a run of bytes belongs to one entry, or to no entry."""

    entries: list[int | None]  # entry of each run
    crc32s: list[int]  # its CRC-32
    sizes: list[int]  # its bytes
    crc32: int
    # entry → how many of its numbers here are not finite, if any are; None: a read has split a number
    nonfinite: dict[int, int] | None


class EntryBounds:
    """Finds the entries to which bytes belong. Empty entries are left out."""

    def __init__(self, entries: Sequence[EntryRecord]) -> None:
        self._filled = [
            (index, entry.offset, entry.offset + entry.nbytes)
            for index, entry in enumerate(entries)
            if entry.nbytes
        ]
        self._starts = [start for _, start, _ in self._filled]

    def runs(self, offset: int, end: int) -> list[tuple[int | None, int, int]]:
        """Return the owners of the bytes from `offset` to `end`, without gaps: an entry or None; first byte, end."""
        found: list[tuple[int | None, int, int]] = []
        first = max(0, bisect.bisect_right(self._starts, offset) - 1)
        for index, start, stop in self._filled[first : bisect.bisect_left(self._starts, end)]:
            if stop <= offset:
                continue
            if start > offset:
                found.append((None, offset, start))
                offset = start
            found.append((index, offset, min(stop, end)))
            offset = min(stop, end)
        if offset < end:
            found.append((None, offset, end))
        return found


def sums_of_chunk(
    store: Store,
    manifest: Manifest,
    chunk: int,
    contents: tuple[EntryBounds, Mapping[int, FloatFormat]],
    buffer: memoryview,
) -> ChunkSums:
    """Read one chunk into `buffer` and sum it up. Any thread. `contents`: bounds of the entries, and their formats."""
    bounds, formats = contents
    offset = chunk * manifest.chunk_bytes
    end = offset + bytes_of_chunk(manifest, chunk)
    entries: list[int | None] = []
    crc32s: list[int] = []
    sizes: list[int] = []
    nonfinite: dict[int, int] | None = {}
    while offset < end:
        part = buffer[: min(len(buffer), end - offset)]
        store.read_into(manifest.file, offset, part)
        runs = bounds.runs(offset, offset + len(part))
        pieces = [part[first - offset : stop - offset] for _, first, stop in runs]
        entries += [entry for entry, _, _ in runs]
        sizes += map(len, pieces)
        if nonfinite is None:
            crc32s += crc.crc32_of_each(pieces)
        elif len(part) // len(runs) >= LARGE_BYTES:
            nonfinite = _hash_and_count(nonfinite, manifest, runs, formats, pieces, crc32s)
        else:
            crc32s += crc.crc32_of_each(pieces)
            nonfinite = _count_nonfinite(nonfinite, manifest, runs, formats, part)
        offset += len(part)
    return ChunkSums(entries, crc32s, sizes, crc.combine_all(zip(crc32s, sizes, strict=True)), nonfinite)


def _hash_and_count(
    counted: dict[int, int],
    manifest: Manifest,
    runs: Sequence[tuple[int | None, int, int]],
    formats: Mapping[int, FloatFormat],
    pieces: Sequence[memoryview],
    crc32s: list[int],
) -> dict[int, int] | None:
    """Like `_count_nonfinite`, but also append each CRC-32 to `crc32s`: both while a large run is in the cache."""
    is_cut = False
    for (entry, first, _), piece in zip(runs, pieces, strict=True):
        float_format = None if entry is None else formats.get(entry)
        if entry is None or float_format is None:
            crc32s.append(crc.crc32(piece))
            continue
        is_cut = is_cut or bool((first - manifest.entries[entry].offset) % float_format.nbytes)
        crc32, count = crc32_and_nonfinite(piece, float_format)
        crc32s.append(crc32)
        if count:
            counted[entry] = counted.get(entry, 0) + count
    return None if is_cut else counted


def _count_nonfinite(
    counted: dict[int, int],
    manifest: Manifest,
    runs: Sequence[tuple[int | None, int, int]],
    formats: Mapping[int, FloatFormat],
    part: memoryview,
) -> dict[int, int] | None:
    """Add the numbers of each run that are not finite; None: a number was split, and nothing is known."""
    offset = runs[0][1]
    by_format: dict[FloatFormat, list[tuple[int, int, int]]] = {}
    for entry, first, stop in runs:
        if entry is not None and (float_format := formats.get(entry)) is not None:
            # Files of holdfast split no number: storages and reads begin at multiples of its size.
            if (first - manifest.entries[entry].offset) % float_format.nbytes:
                return None
            by_format.setdefault(float_format, []).append((entry, first - offset, stop - offset))
    for float_format, runs_of_format in by_format.items():
        counts = count_nonfinite_of_each(
            part, [(first, stop) for _, first, stop in runs_of_format], float_format
        )
        for (entry, _, _), count in zip(runs_of_format, counts, strict=True):
            if count:
                counted[entry] = counted.get(entry, 0) + count
    return counted


def bytes_of_chunk(manifest: Manifest, chunk: int) -> int:
    return min(manifest.chunk_bytes, manifest.image_bytes - chunk * manifest.chunk_bytes)
