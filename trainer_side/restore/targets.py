"""The memory that bytes of an image are read into: windows that are used again, and what takes the bytes from there."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from holdfast.crc import crc32
from holdfast.image.entries import Extent
from holdfast.ring.pages import direct_window
from trainer_side.restore.device_sections import SectionPart
from trainer_side.restore.region_targets import ScatterTarget
from trainer_side.restore.structure import ImageMap


class Sum(NamedTuple):
    """A CRC-32, and how many bytes it covers."""

    crc32: int
    nbytes: int

    @classmethod
    def of(cls, view: memoryview) -> Sum:
        return cls(crc32(view), view.nbytes)


class EntryTarget(NamedTuple):
    """The host memory to which all bytes of one entry go."""

    address: int
    memory: memoryview

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> EntryTarget:
        """The memory of a CPU storage; the view keeps the storage alive."""
        return cls(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)

    def put(self, inside: int, address: int, view: memoryview) -> None:
        """Take bytes of the entry, which begin `inside` bytes into it. Any thread."""
        # memmove gives the GIL back, so other readers go on.
        ctypes.memmove(self.address + inside, address, view.nbytes)

    def parts(self, _inside: int, _begin: int, _nbytes: int) -> Sequence[SectionPart]:
        """Nothing: the entry is in host memory."""
        return ()


EntryTaker = EntryTarget | ScatterTarget
"""Takes bytes of one entry as they are read: all of them, or the parts that a rank holds."""


class ReadWindow(NamedTuple):
    """Page-aligned memory of one reader."""

    address: int
    memory: memoryview

    @classmethod
    def of_size(cls, nbytes: int) -> ReadWindow:
        """Fresh memory, which is there only when it is touched."""
        memory = direct_window(nbytes)
        return cls(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), memory)


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

    `entries`: Indices of the entries that matter; all else counts as literals.
    """

    def __init__(self, image: ImageMap, entries: Collection[int]) -> None:
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
            offset: Where they begin in the source.
            run_bytes: Most bytes of one request.
            wanted: Only parts of entries within these extents are returned; by default all.
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
