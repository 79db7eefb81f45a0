"""The contents of each chunk of an image, and the requests that read them.

    file     │ header │ storage 0 …………………………………… │ descriptor │ header │ storage 1 │ … │ directory │
    chunks   │          0          │          1          │            2            │ …
    runs     │          0          │          1          │            2            │ …   one request each

A run is one request, of a size that the store names, whatever lies in it. It begins where a page begins, so that it
can go past the page cache: no tensor lies like this in a file. So a run is read into a window of page-aligned memory,
and its parts are copied from there. In a slice of a local tier the image's extents lie back to back; a run of it holds
what it holds of each of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from holdfast.image.regions import Extent
from trainer_side.restore.image_map import Mapped


class EntryPart(NamedTuple):
    """A part of one entry: `nbytes` from `offset` of the image on, which is `inside` bytes into the entry."""

    offset: int
    nbytes: int
    entry: int
    inside: int


class ReadRun(NamedTuple):
    """One request: `nbytes` from `offset` of the source on, and the parts of entries that lie in it, in order.

    `begins` has for each part where it begins in what was read.
    """

    offset: int
    nbytes: int
    parts: tuple[EntryPart, ...]
    begins: tuple[int, ...]


class ChunkWindows:
    """The chunks of one image. Immutable; any thread.

    Args:
        image: Where everything lies.
        entries: Indices of the entries that matter; all else counts as literals.
    """

    def __init__(self, image: Mapped, entries: Collection[int]) -> None:
        self._image = image
        self._order = sorted(
            (index for index in entries if image.entries[index].nbytes),
            key=lambda index: image.entries[index].offset,
        )
        self._ends = [image.entries[index].offset + image.entries[index].nbytes for index in self._order]

    def parts(self, extents: Sequence[Extent]) -> list[EntryPart]:
        """The parts of entries in these extents of the image, in order."""
        return [part for extent in extents for part in self._between(extent.offset, extent.end)]

    def runs(
        self,
        lying: Sequence[Extent],
        offset: int,
        run_bytes: int,
        *,
        wanted: Sequence[Extent] | None = None,
    ) -> Iterator[ReadRun]:
        """The requests of at most `run_bytes` that read extents of the image: in order, without gaps.

        Args:
            lying: The extents, ascending; they lie back to back in the source.
            offset: Where in the source.
            run_bytes: Most bytes of one request.
            wanted: Of these extents only the parts of entries are given; of all by default.
        """
        end = offset + sum(extent.nbytes for extent in lying)
        pieces = [
            (before + part.offset - extent.offset, part)
            for before, extent in _positions(lying)
            for wish in ((extent,) if wanted is None else _overlaps(extent, wanted))
            for part in self._between(wish.offset, wish.end)
        ]
        first = 0
        for begin in range(offset, end, run_bytes):
            stop = min(end, begin + run_bytes)
            low, high = begin - offset, stop - offset
            parts, begins = [], []
            while first < len(pieces) and pieces[first][0] < high:
                position, part = pieces[first]
                skipped = max(0, low - position)
                nbytes = min(position + part.nbytes, high) - position - skipped
                parts.append(EntryPart(part.offset + skipped, nbytes, part.entry, part.inside + skipped))
                begins.append(position + skipped - low)
                if position + part.nbytes > high:
                    break
                first += 1
            yield ReadRun(begin, stop - begin, tuple(parts), tuple(begins))

    def _between(self, begin: int, end: int) -> list[EntryPart]:
        found = []
        for position in range(bisect.bisect_right(self._ends, begin), len(self._order)):
            index = self._order[position]
            entry = self._image.entries[index]
            if entry.offset >= end:
                break
            offset = max(begin, entry.offset)
            stop = min(end, entry.offset + entry.nbytes)
            found.append(EntryPart(offset, stop - offset, index, offset - entry.offset))
        return found


def _positions(extents: Sequence[Extent]) -> Iterator[tuple[int, Extent]]:
    """How many bytes lie before each extent."""
    position = 0
    for extent in extents:
        yield position, extent
        position += extent.nbytes


def _overlaps(extent: Extent, wanted: Sequence[Extent]) -> Iterator[Extent]:
    for wish in wanted:
        begin, end = max(extent.offset, wish.offset), min(extent.end, wish.end)
        if begin < end:
            yield Extent(begin, end - begin)
