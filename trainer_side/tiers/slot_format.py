"""The bytes of the slot file that memory, PM, NVMe and file tiers use (docs/format.md, section 7).

    0        superblock          identity of the file, and the places of all else; written once
    4096     commit sector A  ┐  which slots hold a sealed slice; written in turn, each with its own CRC
    8192     commit sector B  ┘
    12288    layout              Layout.to_bytes(): tensor → entry → offset, bytes; no tensor bytes
    …        slot 0              the rank's area (`frames_of`), then its seal
    …        slot 1 …            all slots have the same size

Every number is little-endian, and every place is an offset in the file, never a pointer of a process. A reader takes
the valid sector with the highest sequence. A torn sector has no valid CRC; the other sector then has the state before.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.crc import crc32
from holdfast.errors import DamageError, ProtocolError
from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes, frames_of

PAGE_BYTES = 4096
SECTOR_OFFSETS = (PAGE_BYTES, 2 * PAGE_BYTES)
SLOTS_MAX = 64
VERSION = 1

_SUPER_MAGIC = b"holdfSLT"
_SECTOR_MAGIC = b"holdfCMT"
# magic, version, rank, ranks, slots, writers, run digest, layout digest, area, slot, slots offset, layout offset,
# layout bytes, layout CRC, bytes of the run's name; the name follows
_SUPER = struct.Struct("<8sIIIII32s32sQQQQQIH")
_SECTOR = struct.Struct("<8sQI")  # magic, sequence, slots
_ENTRY = struct.Struct("<IIQQI")  # flags, seal bytes, attempt, step, seal CRC
_CRC = struct.Struct("<I")  # of all bytes before it, at the end of the page
_NAME_BYTES_MAX = 1024
_SEALED, _COMPLETE = 1, 2
_LAYOUT_OFFSET = 3 * PAGE_BYTES
_HUGE_BYTES = 2 << 20  # alignment of large slots, so that DAX and tmpfs map them by huge pages
_SEAL_FIXED_BYTES, _SEAL_FRAME_BYTES = 16 << 10, 12  # a record for people; `4294967295,`
_FILE_BYTES_MAX = 1 << 62


def whole_pages(nbytes: int) -> int:
    return _aligned(nbytes, PAGE_BYTES)


@dataclass(frozen=True)
class Superblock:
    """The identity of a slot file, and the places in it."""

    run: str  # its name, for people
    # The other fields are in the order of `_SUPER`.
    rank: int  # whose slices the file holds
    ranks: int
    slots: int
    writers: int  # threads that suit the device, as measured when the file was made; 0: not measured
    run_digest: bytes  # SHA-256 of the run's URL
    layout_digest: str  # SHA-256
    area_bytes: int  # of a slice; the seal lies behind it
    slot_bytes: int  # seal included
    slots_offset: int  # of the first slot
    layout_offset: int  # of the layout's bytes in the file, as the next two
    layout_bytes: int
    layout_crc32: int

    @classmethod
    def plan(
        cls, layout: Layout, rank: int, *, run: str, run_digest: bytes, slots: int, writers: int = 0
    ) -> Superblock:
        """Plan a new file for `slots` slices of `rank`."""
        packed = layout.to_bytes()
        area = area_bytes(layout, rank)
        seal_room = whole_pages(_SEAL_FIXED_BYTES + _SEAL_FRAME_BYTES * len(frames_of(layout, rank)))
        alignment = _HUGE_BYTES if area >= 8 * _HUGE_BYTES else PAGE_BYTES
        return cls(
            run=run.encode()[:_NAME_BYTES_MAX].decode(errors="ignore"),
            run_digest=run_digest,
            rank=rank,
            ranks=layout.ranks,
            slots=slots,
            slot_bytes=_aligned(area + seal_room, alignment),
            slots_offset=_aligned(_LAYOUT_OFFSET + len(packed), alignment),
            area_bytes=area,
            layout_digest=layout.digest,
            layout_offset=_LAYOUT_OFFSET,
            layout_bytes=len(packed),
            layout_crc32=crc32(packed),
            writers=writers,
        )

    @property
    def file_bytes(self) -> int:
        return self.slots_offset + self.slots * self.slot_bytes

    @property
    def seal_room_bytes(self) -> int:
        return self.slot_bytes - self.area_bytes

    def slot_offset(self, slot: int) -> int:
        return self.slots_offset + slot * self.slot_bytes

    def seal_offset(self, slot: int) -> int:
        return self.slot_offset(slot) + self.area_bytes

    def to_bytes(self) -> bytes:
        name = self.run.encode()
        packed = _SUPER.pack(
            *(_SUPER_MAGIC, VERSION, self.rank, self.ranks, self.slots, self.writers),
            *(self.run_digest, bytes.fromhex(self.layout_digest), self.area_bytes, self.slot_bytes),
            *(self.slots_offset, self.layout_offset, self.layout_bytes, self.layout_crc32, len(name)),
        )
        return _page(packed + name)

    @classmethod
    def from_bytes(cls, page: bytes, *, source: str) -> Superblock:
        """Read a result of `to_bytes`. DamageError: not a slot file, truncated, altered, or contradictory."""
        if len(page) != PAGE_BYTES or page[: len(_SUPER_MAGIC)] != _SUPER_MAGIC:
            raise DamageError(f"{source}: does not begin with the superblock of a slot file")
        _, version, *fields = _SUPER.unpack_from(page)
        if version != VERSION:
            raise ProtocolError(f"{source}: slot file version {version}, this holdfast reads {VERSION}")
        if not _is_whole(page):
            raise DamageError(f"{source}: the superblock is altered (its CRC-32 does not match)")
        rank, ranks, slots, writers, run_digest, layout_digest, *rest, name_bytes = fields
        run = page[_SUPER.size : _SUPER.size + name_bytes].decode(errors="replace")
        found = cls(run, rank, ranks, slots, writers, run_digest, layout_digest.hex(), *rest)
        found._check(source)
        return found

    def _check(self, source: str) -> None:
        aligned = not any(one % PAGE_BYTES for one in (self.slots_offset, self.slot_bytes, self.area_bytes))
        inside = (
            0 < self.slots <= SLOTS_MAX
            and self.rank < self.ranks
            and self.area_bytes < self.slot_bytes
            and self.layout_offset >= _LAYOUT_OFFSET
            and self.layout_offset + self.layout_bytes <= self.slots_offset
            and self.file_bytes < _FILE_BYTES_MAX
        )
        if not (aligned and inside):
            raise DamageError(f"{source}: the superblock contradicts itself: {self}")


class Commitment(NamedTuple):
    """A sealed slot in a commit sector. `complete`: every rank is known to have sealed the step."""

    attempt: int
    step: int
    complete: bool
    seal_bytes: int
    seal_crc32: int


@dataclass(frozen=True)
class CommitSector:
    """The sealed slots. `sequence`: the sector with the higher one is valid. `slots`: None for a slot not sealed."""

    sequence: int
    slots: tuple[Commitment | None, ...]

    def to_bytes(self) -> bytes:
        packed = _SECTOR.pack(_SECTOR_MAGIC, self.sequence, len(self.slots))
        for slot in self.slots:
            if slot is None:
                packed += _ENTRY.pack(0, 0, 0, 0, 0)
            else:
                flags = _SEALED | (_COMPLETE if slot.complete else 0)
                packed += _ENTRY.pack(flags, slot.seal_bytes, slot.attempt, slot.step, slot.seal_crc32)
        return _page(packed)

    @classmethod
    def from_bytes(cls, page: bytes, slots: int) -> CommitSector | None:
        """Read a result of `to_bytes`; None if the page is torn, altered, or was never written."""
        if len(page) != PAGE_BYTES or page[: len(_SECTOR_MAGIC)] != _SECTOR_MAGIC or not _is_whole(page):
            return None
        _, sequence, count = _SECTOR.unpack_from(page)
        if count != slots:
            return None
        entries = [_ENTRY.unpack_from(page, _SECTOR.size + slot * _ENTRY.size) for slot in range(slots)]
        found = [
            Commitment(attempt, step, bool(flags & _COMPLETE), seal_bytes, seal_crc32)
            if flags & _SEALED
            else None
            for flags, seal_bytes, attempt, step, seal_crc32 in entries
        ]
        return cls(sequence, tuple(found))


def _page(packed: bytes) -> bytes:
    body = packed.ljust(PAGE_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(crc32(body))


def _is_whole(page: bytes) -> bool:
    return bool(_CRC.unpack_from(page, PAGE_BYTES - _CRC.size)[0] == crc32(page[: PAGE_BYTES - _CRC.size]))


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
