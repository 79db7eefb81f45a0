"""The slot file of one rank and one layout: which slots are sealed, and how the record of that changes atomically.

    write ─► seal written ─► flush ─► the other sector, sequence + 1 ─► flush        a slice exists
    begin ─► the other sector without it, sequence + 1 ─► flush ─► write             a slot is written to again

One of the two sectors is always whole and durable; only the other one is written. After a failed flush it is unknown
whether the new sector is durable. The file then treats the slots that this sector names as in use, and writes the
sector again.

`examine` and `scan` read the files of any rank. They take no lock and write nothing, because a file may have a living
writer. Bytes of a slot that is being overwritten have wrong CRCs; the reader of the slices compares them.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.crc import crc32
from holdfast.errors import ConfigError, DamageError, HoldfastError, StoreError
from holdfast.faultpoint import Point, reach
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceSeal
from holdfast.ring.directory import open_private_file
from holdfast.store.posix_errors import translate_errors
from trainer_side.tiers.medium import Medium
from trainer_side.tiers.slot_format import (
    PAGE_BYTES,
    SECTOR_OFFSETS,
    Commitment,
    CommitSector,
    Superblock,
    whole_pages,
)
from trainer_side.tiers.tier import SealedSlice
from trainer_side.tiers.tier_directory import TierDirectory

_log = logging.getLogger("holdfast.trainer")

Table = tuple[Commitment | None, ...]  # per slot
Read = Callable[[int, int], bytes]  # (offset, bytes) → the bytes there; fewer at the end of the file


def first_pages(superblock: Superblock, layout: Layout) -> bytes:
    """Return the beginning of a new file, up to its slots, which are all empty."""
    empty = CommitSector(1, (None,) * superblock.slots).to_bytes()
    return superblock.to_bytes() + empty + bytes(PAGE_BYTES) + layout.to_bytes()


def newest_sector(read: Read, superblock: Superblock, *, source: str) -> tuple[int, CommitSector]:
    """Return the valid commit sector, and its number. DamageError: neither is whole."""
    pages = [read(offset, PAGE_BYTES) for offset in SECTOR_OFFSETS]
    sectors = [CommitSector.from_bytes(page, superblock.slots) for page in pages]
    whole = [(number, sector) for number, sector in enumerate(sectors) if sector is not None]
    if not whole:
        raise DamageError(f"{source}: neither commit sector is whole, so its slices are unknown")
    return max(whole, key=lambda pair: (pair[1].sequence, pair[0]))


def read_layout(read: Read, superblock: Superblock, known: dict[str, Layout], *, source: str) -> Layout:
    """Return the layout in the file. If `known` has its digest, the bytes are checked but not parsed again."""
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
    """Return the seal of a slot that the record names. DamageError: it is damaged, or not the committed one."""
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


class SlotFileContents(NamedTuple):
    """A whole slot file. `committed`: the slices that the record names, per slot."""

    superblock: Superblock
    layout: Layout
    committed: tuple[Commitment | None, ...]
    damaged_seals: dict[int, str]  # slots that the record names but whose seal is damaged, with the reason
    kept: tuple[SealedSlice, ...]


def examine(path: Path, place: TierDirectory, rank: int, layouts: dict[str, Layout]) -> SlotFileContents:
    """Read everything in a slot file of `place` except the slices. `rank` is the one in the name of the file.

    `layouts` holds known layouts, by digest; the layout of the file is added.

    ConfigError: the file is not ours, or of another run or rank. DamageError, ProtocolError: this version cannot read
    the file. StoreError: the device refused.
    """
    source = str(path)
    with translate_errors("open", path):
        file = open_private_file(path, os.O_RDONLY)
    with os.fdopen(file, "rb", buffering=0), translate_errors("read", path):
        read = partial(_pread, file)
        superblock = Superblock.from_bytes(read(0, PAGE_BYTES), source=source)
        if superblock.run_digest != place.run_digest:
            raise ConfigError(
                f"{path}: belongs to another run ({superblock.run}), expected {place.run}. The file is left as it "
                "is: move it away, or choose another directory"
            )
        if superblock.rank != rank:
            raise ConfigError(
                f"{path}: holds slices of rank {superblock.rank}, its name says rank {rank}. The file is left as "
                "it is: give it its own name back, or move it away"
            )
        file_bytes = os.fstat(file).st_size
        if file_bytes < superblock.file_bytes:
            raise DamageError(f"{source}: cut short: {file_bytes} bytes, expected {superblock.file_bytes}")
        layout = read_layout(read, superblock, layouts, source=source)
        _, sector = newest_sector(read, superblock, source=source)
        missing: dict[int, str] = {}
        kept = []
        for slot, commitment in enumerate(sector.slots):
            if commitment is None:
                continue
            try:
                seal = read_seal(read, superblock, layout, slot, commitment, source=source)
            except DamageError as error:
                _log.warning("%s", error)
                missing[slot] = str(error)
            else:
                seal_crc32, complete = commitment.seal_crc32, commitment.complete
                kept.append(SealedSlice(seal, layout, source, slot, complete=complete, seal_crc32=seal_crc32))
        return SlotFileContents(superblock, layout, sector.slots, missing, tuple(kept))


def scan(place: TierDirectory, layouts: dict[str, Layout]) -> tuple[list[SlotFileContents], list[str]]:
    """Return all readable slot files of a run, and the damage: unreadable files, and slices of complete steps.

    The log names an unreadable file, and the file stays as it is.
    """
    files: list[SlotFileContents] = []
    damage: list[str] = []
    for path, rank in place.slot_paths():
        try:
            examined = examine(path, place, rank, layouts)
        except HoldfastError as error:
            if path.exists():  # else its writer has just removed it
                _log.warning("local tier: skipping a file: %s", error)
                if not isinstance(error, ConfigError):  # another run's, or another rank's
                    damage.append(str(error))
        else:
            files.append(examined)
            for slot, reason in examined.damaged_seals.items():
                committed = examined.committed[slot]
                if committed is not None and committed.complete:
                    damage.append(f"step {committed.step} (attempt {committed.attempt}): {reason}")
    return files, damage


def _pread(file: int, offset: int, nbytes: int) -> bytes:
    done = b""
    while len(done) < nbytes:
        piece = os.pread(file, nbytes - len(done), offset + len(done))
        if not piece:
            break
        done += piece
    return done


class SlotFile:
    """A slot file that this process may write. Any thread may call `write`; one at a time the other methods.

    Each method that writes raises StoreError if the device refuses.

    `superblock` is already checked. `source` is the path, for messages. DamageError: no commit sector is whole.
    """

    def __init__(self, medium: Medium, superblock: Superblock, *, source: str) -> None:
        self.medium, self.superblock, self.source = medium, superblock, source
        current, sector = newest_sector(medium.read, superblock, source=source)
        self._current, self._sequence = current, sector.sequence
        self.committed: Table = sector.slots  # the slices that the durable record names
        self._uncertain_tables: list[Table] = []
        self.failed_flushes = 0  # bytes that any thread wrote before the last failure may be lost
        # An earlier process may never have flushed this sector. The next commit writes the other one, so this one must
        # be durable by then: it is written again unchanged.
        self._write_page(SECTOR_OFFSETS[current], sector.to_bytes())
        self.flush()

    def may_be_sealed(self, slot: int) -> bool:
        """Whether a reader may find this slot sealed after a power loss now."""
        return any(table[slot] is not None for table in (self.committed, *self._uncertain_tables))

    def write(self, slot: int, offset: int, view: memoryview) -> None:
        self.medium.write(self.superblock.slot_offset(slot) + offset, view)

    def write_seal(self, slot: int, seal: SliceSeal) -> Commitment:
        """Write a seal behind its slice; the seal counts only once it is committed."""
        data = seal.to_bytes()
        if len(data) > self.superblock.seal_room_bytes:
            # The record is for people: a slice can be restored without it.
            data = seal.model_copy(update={"record": {}}).to_bytes()
        if len(data) > self.superblock.seal_room_bytes:
            raise StoreError(
                f"{self.source}: the seal has {len(data)} bytes, the slot has room for "
                f"{self.superblock.seal_room_bytes}"
            )
        self._write_page(self.superblock.seal_offset(slot), data)
        return Commitment(seal.attempt, seal.step, False, len(data), crc32(data))

    def flush(self) -> None:
        try:
            self.medium.flush()
        except BaseException:
            self.failed_flushes += 1
            raise

    def commit(self, table: Table) -> None:
        """Record that these slots hold sealed slices, and no others. Slices and seals must be durable already.

        If the device refuses, it is unknown whether the new record is durable.
        """
        target = 1 - self._current
        self._sequence += 1
        self._uncertain_tables.append(table)
        self._write_page(SECTOR_OFFSETS[target], CommitSector(self._sequence, table).to_bytes())
        reach(Point.SLOT_RECORDED)
        self.flush()
        self._current, self.committed = target, table
        self._uncertain_tables = []

    def close(self) -> None:
        self.medium.close()

    def _write_page(self, offset: int, data: bytes) -> None:
        # Whole pages of aligned memory, for media that go past the page cache.
        with mmap.mmap(-1, max(PAGE_BYTES, whole_pages(len(data)))) as pages:
            pages[: len(data)] = data
            with memoryview(pages) as view:
                self.medium.write(offset, view)
