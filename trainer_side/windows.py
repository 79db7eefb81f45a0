"""What lies in each chunk of a file, and with which requests it is read.

    file     │ header │ storage 0 …………………………………… │ descriptor │ header │ storage 1 │ … │ directory │
    chunks   │          0          │          1          │            2            │ …
    runs     │lit│ direct          │ direct        │ gathered: literals and small parts, one request

A run is one request. A part of an entry that fills half a chunk or more is a run of its own, which may go straight to
its memory; all between such parts is gathered into one: a copy in memory is cheaper than a request to a store.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from typing import NamedTuple

from holdfast.manifest import Manifest

__all__ = ["RUN_BYTES", "Part", "Run", "Windows"]

RUN_BYTES = (
    16 * 1024 * 1024
)  # a gathered run at most, however large the chunks are: a reader's scratch memory


class Part(NamedTuple):
    """A part of one entry: `nbytes` from `offset` of the file on, which is `inside` bytes into the entry."""

    offset: int
    nbytes: int
    entry: int
    inside: int

    @property
    def end(self) -> int:
        """Offset in the file of the first byte after it."""
        return self.offset + self.nbytes


class Run(NamedTuple):
    """One request to the store. `direct`: it is exactly its one part."""

    offset: int
    nbytes: int
    direct: bool
    parts: tuple[Part, ...]


class Windows:
    """The chunks of one file. Immutable; any thread.

    Args:
        manifest: The file's manifest.
        entries: Indices of the entries that matter; all else counts as literals.
    """

    def __init__(self, manifest: Manifest, entries: Collection[int]) -> None:
        self._manifest = manifest
        self._order = sorted(
            (index for index in entries if manifest.entries[index].nbytes),
            key=lambda index: manifest.entries[index].offset,
        )
        self._ends = [
            manifest.entries[index].offset + manifest.entries[index].nbytes for index in self._order
        ]
        self._direct_bytes = max(1, manifest.chunk_bytes // 2)

    def parts(self, chunk: int) -> list[Part]:
        """The parts of entries in a chunk, in order."""
        begin, end = self._bounds(chunk)
        found = []
        for position in range(bisect.bisect_right(self._ends, begin), len(self._order)):
            index = self._order[position]
            entry = self._manifest.entries[index]
            if entry.offset >= end:
                break
            offset = max(begin, entry.offset)
            stop = min(end, entry.offset + entry.nbytes)
            found.append(Part(offset, stop - offset, index, offset - entry.offset))
        return found

    def runs(self, chunk: int) -> list[Run]:
        """The requests that read a chunk: in order, without gaps."""
        position, end = self._bounds(chunk)
        runs: list[Run] = []
        small: list[Part] = []
        for part in self.parts(chunk):
            if part.nbytes >= self._direct_bytes:
                runs += _gathered(position, part.offset, small)
                runs.append(Run(part.offset, part.nbytes, True, (part,)))
                small, position = [], part.end
            else:
                small.append(part)
        return runs + _gathered(position, end, small)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        begin = chunk * self._manifest.chunk_bytes
        return begin, min(begin + self._manifest.chunk_bytes, self._manifest.image_bytes)


def _gathered(begin: int, end: int, parts: Sequence[Part]) -> list[Run]:
    """The runs from `begin` to `end`, none above `RUN_BYTES`; parts are cut where runs end."""
    runs = []
    while begin < end:
        stop = min(end, begin + RUN_BYTES)
        inside = []
        for part in parts:
            offset, part_end = max(begin, part.offset), min(stop, part.end)
            if offset < part_end:
                inside.append(Part(offset, part_end - offset, part.entry, part.inside + offset - part.offset))
        runs.append(Run(begin, stop - begin, False, tuple(inside)))
        begin = stop
    return runs
