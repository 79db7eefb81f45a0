"""The parts of a layout that the flusher looks up for every chunk, built once per layout.

The CRC fields of the zip file state the CRC of bytes that may lie in other chunks. The index tells, both ways, which
chunk waits for which entry: `needs[chunk]` and `waiting[entry]`. The end of a chunk may cut a field of four bytes, so
fields are kept in parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from holdfast.image.layout import Layout
from holdfast.image.manifest import TensorRecord
from holdfast.image.split_record import SPLITS_MAX

if TYPE_CHECKING:
    import numpy.typing as npt

_FIELD_BYTES = 4
_NAMES_SHOWN = 5


class FieldPart(NamedTuple):
    """The `nbytes` of one CRC field that lie in one chunk, from byte `first` of its four."""

    offset: int
    first: int
    nbytes: int
    entry: int


class ChunkFields:
    """The CRC fields in one chunk: offsets of the `whole` ones, ascending, and the `cut` ones. `entries`: The entry
    whose CRC each field states, whole fields first. `segments`: Indices of the segments with fields, ascending.
    """

    def __init__(self, parts: Sequence[FieldPart], segments: Sequence[int]) -> None:
        whole = sorted((part.offset, part.entry) for part in parts if part.nbytes == _FIELD_BYTES)
        self.whole: npt.NDArray[np.int64] = np.array([offset for offset, _ in whole], np.int64)
        self.cut = tuple(part for part in parts if part.nbytes < _FIELD_BYTES)
        self.entries = (*(entry for _, entry in whole), *(part.entry for part in self.cut))
        self.segments = tuple(segments)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def extents(self) -> Iterator[tuple[int, int]]:
        """Yield `(offset, bytes)` of each field in the chunk."""
        yield from ((offset, _FIELD_BYTES) for offset in self.whole.tolist())
        yield from ((part.offset, part.nbytes) for part in self.cut)


class LayoutIndex:
    """Lookups over one layout. Immutable; any thread. `needs`: Per chunk, the entries whose CRC it states. `waiting`:
    Per entry, the chunks with its CRC fields. `places`: Per entry, `(chunk, segment in it)` of its bytes, in order.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        fields: list[list[FieldPart]] = [[] for _ in range(layout.chunks)]
        for number, entry in enumerate(layout.entries):
            for crc_field in entry.crc_fields:
                for chunk, part in _split_field(crc_field, number, layout.chunk_bytes):
                    fields[chunk].append(part)
        self.needs = tuple(frozenset(part.entry for part in parts) for parts in fields)
        self.waiting: tuple[list[int], ...] = tuple([] for _ in layout.entries)
        for chunk, entries in enumerate(self.needs):
            for number in entries:
                self.waiting[number].append(chunk)
        self.places: tuple[list[tuple[int, int]], ...] = tuple([] for _ in layout.entries)
        found: list[ChunkFields] = []
        for chunk, parts in enumerate(fields):
            begins = sorted(part.offset for part in parts)
            ends = sorted(part.offset + part.nbytes for part in parts)
            base = chunk * layout.chunk_bytes
            touched: list[int] = []
            for index, segment in enumerate(layout.segments(chunk)):
                if segment.entry is not None:
                    self.places[segment.entry].append((chunk, index))
                elif bisect_left(begins, segment.end - base) > bisect_left(ends, segment.offset - base + 1):
                    touched.append(index)
            found.append(ChunkFields(parts, touched))
        self.fields = tuple(found)
        self._paths: dict[int, list[str]] = {}
        for tensor in layout.tensors:
            self._paths.setdefault(tensor.entry, []).append(tensor.path)

    @cached_property
    def tensor_records(self) -> tuple[TensorRecord, ...]:
        """The tensors as listed in each manifest of this layout."""
        layout = self.layout
        numbers = [layout.pattern_number(entry) for entry in layout.entries]
        splits = [number if number is not None and number < SPLITS_MAX else None for number in numbers]
        return tuple(
            TensorRecord(
                path=tensor.path,
                dtype=tensor.dtype,
                shape=tensor.shape,
                entry=tensor.entry,
                split=splits[tensor.entry],
            )
            for tensor in layout.tensors
        )

    def describe_contents(self, chunk: int, rank: int) -> str:
        """Name the tensors, or entries, that `rank` sends into `chunk`, for messages."""
        layout = self.layout
        names: list[str] = []
        for part in layout.parts(chunk, rank):
            if part.entry is not None:
                names += self._paths.get(part.entry, [layout.entries[part.entry].name])
        if not names:
            return "zip structure only"
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more


def _split_field(crc_field: int, entry: int, chunk_bytes: int) -> Iterable[tuple[int, FieldPart]]:
    offset, end = crc_field, crc_field + _FIELD_BYTES
    while offset < end:
        chunk = offset // chunk_bytes
        stop = min(end, (chunk + 1) * chunk_bytes)
        yield chunk, FieldPart(offset - chunk * chunk_bytes, offset - crc_field, stop - offset, entry)
        offset = stop
