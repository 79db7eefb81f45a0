"""One slice in flight to a slot, and the slot file with its core that all writers of one layout share.

    begin ─► [record without the slot] ─► write, write, … ─► seal ─► flush ─► record with it
                       └ before the first byte: rule 2 of tier.py

Two locks. `core` guards the decisions and is never held while a device works, so that `begin` costs the training thread
nothing. `record` serialises commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.errors import StoreError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.proof_record import Digest, ProofRecord
from holdfast.image.slices import SliceSeal, frames_of
from trainer_side.tiers.file_slots import FileSlots, SlotEntry
from trainer_side.tiers.slot_file import SlotFile
from trainer_side.tiers.slot_format import Commitment
from trainer_side.tiers.slot_pages import SlotPages
from trainer_side.tiers.slot_proof import proof_path, slice_identity
from trainer_side.tiers.tier import Order


class OpenSlots:
    """A slot file that this object owns, for slices of one layout and rank. Any thread.

    `unsealable` are slots that the record names but whose seal is damaged. Slots in `missing` wait for `pages`.
    """

    def __init__(
        self,
        file: SlotFile,
        layout: Layout,
        rank: int,
        *,
        run: str,
        unsealable: tuple[int, ...] = (),
        missing: Collection[int] = (),
        pages: SlotPages | None = None,
    ) -> None:
        self.file, self.layout, self.rank, self.run = file, layout, rank, run
        self.frames = frames_of(layout, rank)
        self._seals = {slot: named for slot, named in enumerate(file.committed) if named is not None}
        found = {
            slot: SlotEntry((named.attempt, named.step), named.complete)
            for slot, named in self._seals.items()
            if slot not in unsealable
        }
        self._slots = FileSlots(file.superblock.slots, found, missing)
        self.pages = pages
        self._core, self._record = threading.RLock(), threading.Lock()
        self._writers, self._retired = 0, False

    def memories(self) -> list[memoryview]:
        """Return each slot as writable memory, in the order of first use; empty on a device."""
        superblock, medium = self.file.superblock, self.file.medium
        found = [
            medium.memory(superblock.slot_offset(slot), superblock.area_bytes)
            for slot in range(superblock.slots)
        ]
        return [memory for memory in found if memory is not None]

    def begin(self, attempt: int, step: int) -> SlotWriter | None:
        with self._core:
            slot = self._slots.begin((attempt, step))
            if slot is not None:
                self._writers += 1
        if slot is None:
            if self.pages is not None and (problem := self.pages.problem) is not None:
                self.make_pages()
                raise problem
            return None
        try:
            reach(Point.SLOT_RECYCLED)
            writer = SlotWriter(self, slot, (attempt, step))
            if writer.memory is not None:
                self.unseal(slot)  # from here on any code may write to the memory
        except BaseException:
            self.release(slot)
            raise
        return writer

    def make_pages(self) -> None:
        """Start a thread that makes the missing slots; the file stays mapped until the thread has ended."""
        with self._core:
            if self.pages is None or self._retired:
                return
            if self.pages.start(self._on_pages_made, self._on_pages_ended):
                self._writers += 1

    def _on_pages_made(self, slot: int) -> None:
        with self._core:
            self._slots.mark_made(slot)

    def _on_pages_ended(self) -> None:
        with self._core:
            self._writer_done()

    def complete(self, order: Order) -> bool:
        """Note that every rank has sealed this step; return whether that is news about a slice sealed here.

        The record then names the step as complete: the next job, which after a kill gets no verdict, must not take its
        slot. If the device refuses (StoreError), the next commit records it.
        """
        with self._core:
            news = self._slots.complete(order)
        if news:
            with self._record:
                self._commit()
        return news

    def void(self, order: Order) -> None:
        with self._core:
            self._slots.void(order)

    def unseal(self, slot: int) -> None:
        """Make sure that no reader finds the slot sealed from now on, and remove its proof."""
        with self._record:
            if self.file.may_be_sealed(slot):
                self._commit()
                reach(Point.SLOT_UNSEALED)
            with suppress(OSError):  # a leftover proof counts for no other slice
                self._proof_path(slot).unlink(missing_ok=True)

    def keep_proof(self, order: Order, digest: Digest, write: Callable[[Path, bytes], None]) -> None:
        """Keep the proof of this step, if its slice is sealed here. StoreError: the device refused."""
        with self._record:  # so that no new step takes the slot meanwhile
            with self._core:
                table = self._slots.table()
            slot = next((slot for slot, entry in enumerate(table) if entry and entry.order == order), None)
            if slot is None:
                return
            reach(Point.PROOF_DUE)
            names = slice_identity(self.run, self.rank, self.layout.digest, self._seals[slot].seal_crc32)
            write(self._proof_path(slot), ProofRecord(CheckpointId(*order), (digest,), names).to_bytes())

    def _proof_path(self, slot: int) -> Path:
        return proof_path(Path(self.file.source), slot)

    def is_wanted(self, slot: int) -> bool:
        with self._core:
            return self._slots.is_wanted(slot)

    def commit(self, slot: int, commitment: Commitment) -> None:
        """Name the slice in this slot in the record. The slice and its seal must be durable."""
        with self._record:
            self._seals[slot] = commitment
            self._commit(slot, SlotEntry((commitment.attempt, commitment.step)))
            with self._core:
                self._slots.mark_sealed(slot)
                self._writer_done()

    def release(self, slot: int) -> None:
        """Free the slot, whose bytes are discarded."""
        with self._core:
            self._slots.release(slot)
            self._writer_done()

    def retire(self) -> None:
        """Close the file as soon as its last writer has finished."""
        if self.pages is not None:
            self.pages.stop()
        with self._core:
            self._retired = True
            self._writers += 1
            self._writer_done()

    def _writer_done(self) -> None:
        self._writers -= 1
        if self._retired and not self._writers:
            self.file.close()

    def _commit(self, slot: int | None = None, entry: SlotEntry | None = None) -> None:
        with self._core:
            entries = self._slots.table()
        if slot is not None:
            entries[slot] = entry
        table: list[Commitment | None] = [None] * len(entries)
        for number, named in enumerate(entries):
            if named is not None:
                table[number] = self._seals[number]._replace(complete=named.complete)
        self.file.commit(tuple(table))


class SlotWriter:
    """A `SliceWriter` of slot files, made by `OpenSlots.begin`."""

    def __init__(self, slots: OpenSlots, slot: int, order: Order) -> None:
        self._slots, self._slot, self.order = slots, slot, order
        superblock, medium = slots.file.superblock, slots.file.medium
        self.memory = medium.memory(superblock.slot_offset(slot), superblock.area_bytes)
        self.copy = medium.copy
        self._crcs: dict[int, int] = {}
        self._failed_flushes = slots.file.failed_flushes
        self._guard = threading.Lock()
        self._writing, self._is_finished, self._unsealed = 0, False, self.memory is not None
        self._unsealing = threading.Lock()

    def write(self, frame: int, buffer: memoryview, crc32: int) -> None:
        place = self._slots.frames[frame]
        if buffer.nbytes != place.padded_bytes:
            raise StoreError(
                f"{self._description}: frame {frame} has {buffer.nbytes} bytes, expected {place.padded_bytes}"
            )
        with self._guard:
            if self._is_finished:
                raise StoreError(f"{self._description} is over already, frame {frame} comes too late")
            self._writing += 1
        try:
            self._unseal()
            self._slots.file.write(self._slot, place.offset, buffer)
            with self._guard:
                self._crcs[frame] = crc32
            reach(Point.SLOT_WRITTEN)
        finally:
            self._end_write()

    def seal(self, record: Mapping[str, Any]) -> bool:
        with self._guard:
            if self._is_finished or self._writing:
                state = "is over already" if self._is_finished else f"has {self._writing} frames on their way"
                raise StoreError(f"{self._description} {state} and cannot be sealed")
            missing = [frame for frame in range(len(self._slots.frames)) if frame not in self._crcs]
            if missing:
                raise StoreError(
                    f"{self._description}: {len(missing)} of {len(self._slots.frames)} frames are missing, "
                    f"the first is {missing[0]}; write them first"
                )
            self._is_finished = True
        try:
            commitment = self._write_seal(record)
        except BaseException:
            self._slots.release(self._slot)
            raise
        if commitment is None:
            self._slots.release(self._slot)
        return commitment is not None

    def abandon(self) -> None:
        # The caller does not wait for a write in progress; the slot is freed when it ends.
        with self._guard:
            if self._is_finished:
                return
            self._is_finished = True
            idle = not self._writing
        if idle:
            self._slots.release(self._slot)

    @property
    def _description(self) -> str:
        return f"{self._slots.file.source}: the slice of attempt {self.order[0]}, step {self.order[1]}"

    def _write_seal(self, record: Mapping[str, Any]) -> Commitment | None:
        slots, (attempt, step) = self._slots, self.order
        if not slots.is_wanted(self._slot):
            return None
        self._unseal()  # a rank without frames has not called `write`
        seal = SliceSeal(
            run=slots.run,
            attempt=attempt,
            step=step,
            rank=slots.rank,
            ranks=slots.layout.ranks,
            layout_digest=slots.layout.digest,
            frame_crc32s=tuple(self._crcs[frame] for frame in range(len(slots.frames))),
            record=dict(record),
        )
        commitment = slots.file.write_seal(self._slot, seal)
        reach(Point.SLOT_SEALED)
        slots.file.flush()
        reach(Point.SLOT_FLUSHED)
        if slots.file.failed_flushes != self._failed_flushes:
            raise StoreError(
                f"{self._description}: a flush of the file has failed since the slice was begun, and may have lost "
                "bytes of it"
            )
        if not slots.is_wanted(self._slot):
            return None
        slots.commit(self._slot, commitment)
        reach(Point.SLOT_COMMITTED)
        return commitment

    def _unseal(self) -> None:
        with self._unsealing:
            if not self._unsealed:
                self._slots.unseal(self._slot)
                self._unsealed = True

    def _end_write(self) -> None:
        with self._guard:
            self._writing -= 1
            abandoned = self._is_finished and not self._writing
        if abandoned:
            self._slots.release(self._slot)
