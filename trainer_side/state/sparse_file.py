"""The image while it is only literals and holes: a file for `torch.save` to write and `torch.load` to read.

    torch.save ──write()──► literal bytes ┐
               ──seek()───► a hole        ├── SparseFile ──► records(): where the zip keeps each entry's bytes and CRC
                                          └──────────────► torch.load(map_location="meta"): can it be read back?

Holes take no memory, so a file of terabytes fits. `ZipParts` turns the zip's records into entries of the layout:

data.pkl            entry, rank 0's        a storage                entry, by its ownership
serialization id    entry, rank 0's        byteorder, version, …    literals: their CRCs never change
"""

from __future__ import annotations

import bisect
import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast.crc import crc32
from holdfast.image.entries import Entry, TensorInfo
from trainer_side.state.survey import Survey
from trainer_side.state.tree import Ownership

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Signature … name length, extra length; signature … name, extra, comment lengths … local header offset.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DIRECTORY_RECORD = struct.Struct("<4s6H3I5H2I")
_HAS_DESCRIPTOR = 1 << 3
_DESCRIPTOR_CRC_OFFSET = 4  # after 'PK\x07\x08'; the same in a zip64 descriptor
_DIRECTORY_CRC_OFFSET = 16


class Literals:
    """Runs of known bytes of the image, in order, not overlapping; the gaps between them are holes."""

    def __init__(self, runs: list[tuple[int, bytes]]) -> None:
        self.runs = runs
        self._starts = [offset for offset, _ in runs]

    def append(self, offset: int, data: bytes) -> None:
        """Add a run after all others."""
        self.runs.append((offset, data))
        self._starts.append(offset)

    def write(self, offset: int, out: memoryview) -> None:
        """Copy the literals of the image from `offset` on into `out`; leave holes as they are."""
        end = offset + len(out)
        index = max(0, bisect.bisect_right(self._starts, offset) - 1)
        while index < len(self.runs) and self._starts[index] < end:
            start, data = self.runs[index]
            first, last = max(start, offset), min(start + len(data), end)
            if first < last:
                out[first - offset : last - offset] = data[first - start : last - start]
            index += 1

    def with_holes(self, extents: list[tuple[int, int]], crcs: dict[int, int]) -> Literals:
        """Return a copy with holes at `extents` (`(offset, end)`, ascending), and these values in these CRC fields."""
        pieces = self._merged()
        for crc_field, crc in crcs.items():
            start, data = pieces[bisect.bisect_right(pieces, crc_field, key=lambda piece: piece[0]) - 1]
            assert start <= crc_field <= start + len(data) - 4, "a CRC field is in a literal"
            data[crc_field - start : crc_field - start + 4] = crc.to_bytes(4, "little")
        kept: list[tuple[int, bytes]] = []
        hole = 0
        for start, data in pieces:
            position, end = start, start + len(data)
            while hole < len(extents) and extents[hole][0] < end:
                hole_start, hole_end = extents[hole]
                if position < hole_start:
                    kept.append((position, bytes(data[position - start : hole_start - start])))
                position = max(position, hole_end)
                hole += 1
            if position < end:
                kept.append((position, bytes(data[position - start :])))
        return Literals(kept)

    def _merged(self) -> list[tuple[int, bytearray]]:
        pieces: list[tuple[int, bytearray]] = []
        for start, data in self.runs:
            if pieces and pieces[-1][0] + len(pieces[-1][1]) == start:
                pieces[-1][1].extend(data)
            else:
                pieces.append((start, bytearray(data)))
        return pieces


class ZipRecord(NamedTuple):
    """One entry of the zip: where its bytes lie, and the image offsets of the fields that state their CRC-32."""

    name: str
    offset: int
    nbytes: int
    crc_fields: tuple[int, ...]


class SparseFile(io.RawIOBase):
    """A file that keeps written bytes and only counts skipped ones; holes read as zeros. Written front to back only, as
    a zip writer with data descriptors does. Not thread-safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self.literals = Literals([])
        self.nbytes = 0
        self._position = 0
        self._overlay = Literals([])

    @classmethod
    def of(cls, literals: Literals, nbytes: int, overlay: tuple[int, bytes]) -> SparseFile:
        """Return a readable file of `nbytes` bytes with these literals. `overlay`: Offset and bytes that cover them."""
        file = cls()
        file.literals, file.nbytes, file._overlay = literals, nbytes, Literals([overlay])
        return file

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; a move past the end makes a hole."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        self._position = base + offset
        self.nbytes = max(self.nbytes, self._position)
        return self._position

    def write(self, data: Buffer, /) -> int:
        copied = bytes(data)  # the writer reuses its memory
        if self._position != self.nbytes:
            raise io.UnsupportedOperation("a sparse file is written front to back")
        self.literals.append(self._position, copied)
        self._position += len(copied)
        self.nbytes = self._position
        return len(copied)

    def readinto(self, buffer: Buffer, /) -> int:
        """Read; holes are zeros."""
        out = memoryview(buffer).cast("B")[: max(0, self.nbytes - self._position)]
        out[:] = bytes(len(out))
        self.literals.write(self._position, out)
        self._overlay.write(self._position, out)
        self._position += len(out)
        return len(out)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self._position = offset
        return self.read(nbytes) or b""

    def records(self) -> list[ZipRecord]:
        """Return the entries of the zip, by offset. An empty record has no CRC field: the CRC of no bytes is 0."""
        with zipfile.ZipFile(self) as archive:  # handles zip64
            infos, position = archive.infolist(), archive.start_dir
        directory = memoryview(self.read_at(position, self.nbytes - position))
        found: list[ZipRecord] = []
        cursor = 0
        for info in infos:
            record = _DIRECTORY_RECORD.unpack_from(directory, cursor)
            header = _LOCAL_HEADER.unpack(self.read_at(info.header_offset, _LOCAL_HEADER.size))
            assert (record[0], header[0]) == (b"PK\x01\x02", b"PK\x03\x04"), (
                f"zip structure of {info.filename}"
            )
            offset = info.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
            fields: tuple[int, ...] = ()
            if info.file_size:
                assert info.flag_bits & _HAS_DESCRIPTOR, f"{info.filename} has a data descriptor"
                descriptor = offset + info.file_size
                fields = (descriptor + _DESCRIPTOR_CRC_OFFSET, position + cursor + _DIRECTORY_CRC_OFFSET)
            found.append(ZipRecord(info.filename, offset, info.file_size, fields))
            cursor += _DIRECTORY_RECORD.size + sum(record[10:13])
        return sorted(found, key=lambda record: record.offset)


_PICKLE = "archive/data.pkl"
_SERIALIZATION_ID = "archive/.data/serialization_id"
_STORAGE_PREFIX = "archive/data/"


@dataclass(frozen=True)
class ZipParts:
    """The records of the zip as entries of the layout."""

    entries: tuple[Entry, ...]
    gated: tuple[bool, ...]  # per entry, whether it is copied behind the gate
    pickle_entry: int
    serialization_id_entry: int
    serialization_id: bytes  # torch's id of the file, from when the plan was made
    storage_entries: tuple[int, ...]  # storage number to entry index
    constant_crcs: Mapping[int, int]  # CRC fields of records that never change

    @classmethod
    def of(cls, image: SparseFile, found: Survey, owned: Mapping[int, Ownership]) -> ZipParts:
        """Read the zip that torch wrote. `owned`: Ownership of each storage, by its address."""
        ownership = {number: owned[key] for key, number in found.numbers.items()}
        entries: list[Entry] = []
        gated: list[bool] = []
        by_name: dict[str, int] = {}
        constant_crcs: dict[int, int] = {}
        for record in image.records():
            role = Ownership(0, gated=False)
            if record.name.startswith(_STORAGE_PREFIX):
                number = int(record.name.removeprefix(_STORAGE_PREFIX))
                assert record.nbytes == found.parts[number].nbytes, (
                    "torch.save numbers storages as the survey does"
                )
                role = ownership[number]
            elif record.name not in (_PICKLE, _SERIALIZATION_ID):
                crc = crc32(image.read_at(record.offset, record.nbytes))
                constant_crcs.update(dict.fromkeys(record.crc_fields, crc))
                continue
            by_name[record.name] = len(entries)
            entries.append(Entry(record.name, record.offset, record.nbytes, role.owner, record.crc_fields))
            gated.append(role.gated)
        identity = by_name[_SERIALIZATION_ID]
        return cls(
            entries=tuple(entries),
            gated=tuple(gated),
            pickle_entry=by_name[_PICKLE],
            serialization_id_entry=identity,
            serialization_id=image.read_at(entries[identity].offset, entries[identity].nbytes),
            storage_entries=tuple(by_name[f"{_STORAGE_PREFIX}{n}"] for n in range(len(found.parts))),
            constant_crcs=constant_crcs,
        )

    def tensors(self, found: Survey) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(slot.path, slot.dtype, slot.shape, self.storage_entries[slot.storage])
            for slot in found.specs
        )
