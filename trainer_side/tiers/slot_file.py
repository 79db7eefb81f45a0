"""The slot file of one rank and one layout: which slots are sealed, and how that changes without a half-true state.

    write ─► seal written ─► flush ─► the other sector, sequence + 1 ─► flush        a slice exists
    begin ─► the other sector without it, sequence + 1 ─► flush ─► write             a slot is written to again

One of the two sectors is always whole and durable; only the other one is written. After a failed flush nobody knows
whether the sector that it wrote counts. So the file takes its slots for named by that sector, and writes it once more.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, MutableMapping

from holdfast.crc import crc32
from holdfast.errors import DamageError, StoreError
from holdfast.faultpoint import Point, reach
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceSeal
from trainer_side.tiers.media import Medium
from trainer_side.tiers.slot_format import (
    PAGE_BYTES,
    SECTOR_OFFSETS,
    Commitment,
    CommitSector,
    Superblock,
    newest,
    whole_pages,
)

Table = tuple[Commitment | None, ...]  # per slot
Read = Callable[[int, int], bytes]  # (offset, bytes) → the bytes there; fewer at the end of the file


def first_pages(superblock: Superblock, layout: Layout) -> bytes:
    """The beginning of a new file, up to its slots. No slot holds anything."""
    empty = CommitSector(1, (None,) * superblock.slots).to_bytes()
    return superblock.to_bytes() + empty + bytes(PAGE_BYTES) + layout.to_bytes()


def read_sectors(read: Read, superblock: Superblock) -> list[CommitSector | None]:
    """Both commit sectors; None for one that is not whole."""
    return [CommitSector.from_bytes(read(offset, PAGE_BYTES), superblock.slots) for offset in SECTOR_OFFSETS]


def read_layout(
    read: Read, superblock: Superblock, known: MutableMapping[str, Layout], *, source: str
) -> Layout:
    """The layout in the file. If `known` has its digest, the bytes are checked but not parsed again.

    Raises:
        DamageError: The bytes are not those that were written.
        ProtocolError: The layout is not readable.
    """
    packed = read(superblock.layout_offset, superblock.layout_bytes)
    if len(packed) != superblock.layout_bytes or crc32(packed) != superblock.layout_crc32:
        raise DamageError(f"{source}: the layout in the file is altered or cut short")
    if superblock.layout_digest in known:
        return known[superblock.layout_digest]
    layout = Layout.from_bytes(packed)
    if layout.digest != superblock.layout_digest or layout.ranks != superblock.ranks:
        raise DamageError(f"{source}: the layout in the file is not the one that its superblock names")
    known[layout.digest] = layout
    return layout


def read_seal(
    read: Read, superblock: Superblock, layout: Layout, slot: int, commitment: Commitment, *, source: str
) -> SliceSeal:
    """The seal of a slot that the record names.

    Raises:
        DamageError: The seal is not the one that was committed, or it is of another rank, step or layout.
    """
    source = f"{source} slot {slot}"
    if commitment.seal_bytes > superblock.seal_room_bytes:
        raise DamageError(
            f"{source}: the record names a seal of {commitment.seal_bytes} bytes, the slot has room for "
            f"{superblock.seal_room_bytes}"
        )
    data = read(superblock.seal_offset(slot), commitment.seal_bytes)
    if len(data) != commitment.seal_bytes or crc32(data) != commitment.seal_crc32:
        raise DamageError(f"{source}: the seal is not the one that was committed; the slice is not used")
    seal = SliceSeal.from_bytes(data, source=source)
    if seal.order != (commitment.attempt, commitment.step) or seal.rank != superblock.rank:
        raise DamageError(
            f"{source}: the seal is of rank {seal.rank}, attempt and step {tuple(seal.order)}; expected rank "
            f"{superblock.rank}, {(commitment.attempt, commitment.step)}"
        )
    seal.check_layout(layout, source=source)
    return seal


class SlotFile:
    """A slot file that this process may write. `write` belongs to any thread; one at a time calls the others.

    Args:
        medium: The file.
        superblock: The superblock of the file; checked already.
        source: The path of the file, for messages.

    Raises:
        DamageError: No commit sector is whole.
        StoreError: The device refused.
    """

    def __init__(self, medium: Medium, superblock: Superblock, *, source: str) -> None:
        self.medium, self.superblock, self.source = medium, superblock, source
        sectors = read_sectors(medium.read, superblock)
        current = newest(sectors)
        if current is None:
            raise DamageError(
                f"{source}: neither commit sector is whole, so nobody knows what its slots hold"
            )
        sector = sectors[current]
        assert sector is not None
        self._current, self._sequence = current, sector.sequence
        self._committed: Table = sector.slots
        self._doubtful: list[Table] = []
        self._failed_flushes = 0
        # The last write of an earlier process may never have been flushed. The other sector is written next, so this
        # one must be durable by then: it is written once more as it is.
        self._write_page(SECTOR_OFFSETS[current], sector.to_bytes())
        self.flush()

    @property
    def committed(self) -> Table:
        """The slices that the durable record names, per slot."""
        return self._committed

    @property
    def failed_flushes(self) -> int:
        """How often a flush has failed. Bytes that any thread wrote before the last failure may be lost."""
        return self._failed_flushes

    def names(self, slot: int) -> bool:
        """Whether a reader may find this slot sealed after a loss of power now."""
        return any(table[slot] is not None for table in (self._committed, *self._doubtful))

    def write(self, slot: int, offset: int, view: memoryview) -> None:
        """Write into the area of a slot.

        Raises:
            StoreError: The device refused.
        """
        self.medium.write(self.superblock.slot_offset(slot) + offset, view)

    def write_seal(self, slot: int, seal: SliceSeal) -> Commitment:
        """Put a seal behind its slice; the seal means nothing until it is committed.

        Raises:
            StoreError: The slot has no room for the seal, or the device refused.
        """
        data = seal.to_bytes()
        if len(data) > self.superblock.seal_room_bytes:
            # The record is for people: a slice without a record can be restored, a record without a slice cannot.
            data = seal.model_copy(update={"record": {}}).to_bytes()
        if len(data) > self.superblock.seal_room_bytes:
            raise StoreError(
                f"{self.source}: the seal has {len(data)} bytes, the slot has room for "
                f"{self.superblock.seal_room_bytes}"
            )
        self._write_page(self.superblock.seal_offset(slot), data)
        return Commitment(seal.attempt, seal.step, False, len(data), crc32(data))

    def flush(self) -> None:
        """Make every byte that was written durable.

        Raises:
            StoreError: The device refused.
        """
        try:
            self.medium.flush()
        except BaseException:
            self._failed_flushes += 1
            raise

    def commit(self, table: Table) -> None:
        """From now on these slots hold sealed slices, and no others. Slices and seals must be durable already.

        Raises:
            StoreError: The device refused; nobody knows then whether the record counts.
        """
        target = 1 - self._current
        self._sequence += 1
        self._doubtful.append(table)
        self._write_page(SECTOR_OFFSETS[target], CommitSector(self._sequence, self._doubtful[-1]).to_bytes())
        reach(Point.SLOT_RECORDED)
        self.flush()
        self._current, self._committed = target, self._doubtful[-1]
        self._doubtful = []

    def close(self) -> None:
        self.medium.close()

    def _write_page(self, offset: int, data: bytes) -> None:
        # Whole pages of aligned memory, for media that go past the page cache.
        with mmap.mmap(-1, max(PAGE_BYTES, whole_pages(len(data)))) as pages:
            pages[: len(data)] = data
            with memoryview(pages) as view:
                self.medium.write(offset, view)
