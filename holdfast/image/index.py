"""The parts of a layout that the flusher looks up for every chunk, built once per layout.

The CRC fields of the zip file state the CRC of bytes that may lie in other chunks. The index says, both ways, which
chunk waits for which entry: `needs[chunk]` and `waiting[entry]`. A field of four bytes may be cut by the end of a
chunk, so it is kept in parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.image.layout import Layout

_FIELD_BYTES = 4
_NAMES_SHOWN = 5


class FieldPart(NamedTuple):
    """The part of one CRC field that lies in one chunk.

    Attributes:
        offset: Where it begins in the chunk.
        first: Which of the field's four bytes is its first. `nbytes`: how many there are.
        entry: The entry whose CRC it states.
    """

    offset: int
    first: int
    nbytes: int
    entry: int


class LayoutIndex:
    """Lookups over one layout. Immutable after construction; may be read from any thread.

    Attributes:
        layout: The layout.
        fields: Per chunk, the parts of CRC fields in it.
        needs: Per chunk, the entries whose CRC must be known before it can be written.
        waiting: Per entry, the chunks that hold its CRC fields.
        places: Per entry, `(chunk, index of the segment in the chunk)` of all its bytes, in order.
        patched: Per chunk, the indices of the segments that its CRC fields lie in.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        fields: list[list[FieldPart]] = [[] for _ in range(layout.chunks)]
        for number, entry in enumerate(layout.entries):
            for crc_field in entry.crc_fields:
                for chunk, part in _cut(crc_field, number, layout.chunk_bytes):
                    fields[chunk].append(part)
        self.fields = tuple(tuple(parts) for parts in fields)
        self.needs = tuple(frozenset(part.entry for part in parts) for parts in fields)
        self.waiting: tuple[list[int], ...] = tuple([] for _ in layout.entries)
        for chunk, entries in enumerate(self.needs):
            for number in entries:
                self.waiting[number].append(chunk)
        self.places: tuple[list[tuple[int, int]], ...] = tuple([] for _ in layout.entries)
        patched: list[tuple[int, ...]] = []
        for chunk in range(layout.chunks):
            base = chunk * layout.chunk_bytes
            cut: list[int] = []
            for index, segment in enumerate(layout.segments(chunk)):
                if segment.entry is not None:
                    self.places[segment.entry].append((chunk, index))
                elif _touches(fields[chunk], segment.offset - base, segment.offset - base + segment.nbytes):
                    cut.append(index)
            patched.append(tuple(cut))
        self.patched = tuple(patched)
        self._paths: dict[int, list[str]] = {}
        for tensor in layout.tensors:
            self._paths.setdefault(tensor.entry, []).append(tensor.path)

    def contents(self, chunk: int, rank: int) -> str:
        """Names of what `rank` sends into `chunk`, for messages: tensor paths, or entries."""
        layout = self.layout
        names: list[str] = []
        for part in layout.parts(chunk, rank):
            if part.entry is not None:
                names += self._paths.get(part.entry, [layout.entries[part.entry].name])
        if not names:
            return "zip structure only"
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more


def _cut(crc_field: int, entry: int, chunk_bytes: int) -> Iterable[tuple[int, FieldPart]]:
    offset, end = crc_field, crc_field + _FIELD_BYTES
    while offset < end:
        chunk = offset // chunk_bytes
        stop = min(end, (chunk + 1) * chunk_bytes)
        yield chunk, FieldPart(offset - chunk * chunk_bytes, offset - crc_field, stop - offset, entry)
        offset = stop


def _touches(parts: Iterable[FieldPart], begin: int, end: int) -> bool:
    return any(part.offset < end and part.offset + part.nbytes > begin for part in parts)
