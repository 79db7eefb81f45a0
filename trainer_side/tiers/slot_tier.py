"""A tier whose slices lie in slot files: memory, PM, NVMe and plain files differ only in the medium beneath.

prepare ─► lock of the rank ─► its slot file ─► OpenSlots ─► begin, seal, complete, void
kept, read_into ─► any slot file of the run, of any rank; no lock
the first complete step ─► files of earlier layouts are removed
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.errors import ConfigError, DamageError, StoreError, StoreMissing
from holdfast.image.layout import Layout
from holdfast.image.proof_record import Digest
from holdfast.ring.directory import open_private_file
from holdfast.ring.doubts import DoubtedSteps, doubt_about
from holdfast.store.posix_errors import translate_errors
from holdfast.store.posix_io import OpenFile, read_fully
from trainer_side.tiers.medium import Medium
from trainer_side.tiers.slot_file import scan
from trainer_side.tiers.slot_files import SlotFiles
from trainer_side.tiers.slot_format import Superblock
from trainer_side.tiers.slot_proof import proof_path, read_proof, slice_identity
from trainer_side.tiers.slot_writer import OpenSlots, SlotWriter
from trainer_side.tiers.tier import Nearness, SealedSlice, Tier
from trainer_side.tiers.tier_directory import RankLock, TierDirectory, refuse_disk

_DYING_SECONDS_MAX = 5.0
_STOP_SECONDS_MAX = 1.0  # for the thread that makes pages, which checks every 4 MiB whether to stop
_PROOF_BYTES_MAX = 1 << 20
_log = logging.getLogger("holdfast.trainer")


class SlotTier(Tier):
    """A tier of slot files. `name` is the tier as in the setting. `medium` opens a slot file.

    `slots` is the number of slots of a file, `writers` that of threads that write at once. None: measured on the
    device.
    """

    keeps_proofs = True

    def __init__(
        self,
        name: str,
        nearness: Nearness,
        place: TierDirectory,
        medium: Callable[[Path], Medium],
        *,
        slots: int | None,
        writers: int | None,
    ) -> None:
        self.name, self.nearness, self._place, self._writers = name, nearness, place, writers
        later = nearness is Nearness.MEMORY
        self._files = SlotFiles(name, place, medium, slots=slots, writers=writers, later=later)
        self._preparing = threading.Lock()
        self._lock: RankLock | None = None
        self._open: OpenSlots | None = None
        self._superblocks: dict[str, Superblock] = {}
        self._damage: list[str] = []
        self._leftovers = False  # files of other layouts may exist

    @property
    def write_mode(self) -> str:
        if self._open is None:
            return "not prepared"
        return f"{self._open.file.medium.write_mode}, {self.writers} writer{'s' if self.writers > 1 else ''}"

    @property
    def writers(self) -> int:
        measured = 1 if self._open is None else self._open.file.superblock.writers
        return self._writers if self._writers is not None else measured

    @property
    def slots(self) -> int:
        """Number of slots for this rank; 0 before `prepare`."""
        return 0 if self._open is None else self._open.file.superblock.slots

    def prepare(self, layout: Layout, rank: int) -> None:
        if self.nearness is Nearness.MEMORY:
            refuse_disk(self.name, self._place.base)  # training may use a device by now
        with self._preparing:
            now = self._open
            if now is not None and now.rank != rank:
                raise ConfigError(f"tier {self.name}: is prepared for rank {now.rank}, got rank {rank}")
            if now is not None and now.layout.digest == layout.digest:
                return
            self._place.make()
            if self._lock is None:
                self._lock = RankLock(self._place, rank, seconds_max=_DYING_SECONDS_MAX)
            try:
                self._open = self._files.open(layout, rank)
            except BaseException:
                if now is None:
                    self._lock.release()
                    self._lock = None
                raise
            self._leftovers = True
            if now is not None:
                now.retire()
            _log.info(
                "tier %s: %s, %d slots in %s", self.name, self.write_mode, self.slots, self._open.file.source
            )

    @property
    def is_making_slots(self) -> bool:
        opened = self._open
        return opened is not None and opened.pages is not None and opened.pages.is_making_slots

    def await_slot(self, slot: int) -> bool:
        opened = self._open
        return opened is not None and (opened.pages is None or opened.pages.wait(slot))

    def stop_making_slots(self) -> None:
        opened = self._open
        if opened is not None and opened.pages is not None:
            opened.pages.stop()

    def memories(self) -> Sequence[memoryview]:
        return () if self._open is None else self._open.memories()

    def begin(self, attempt: int, step: int) -> SlotWriter | None:
        return None if self._open is None else self._open.begin(attempt, step)

    def complete(self, attempt: int, step: int) -> None:
        opened = self._open
        try:
            if opened is not None and opened.complete((attempt, step)) and self._leftovers:
                self._files.remove_older(opened, (attempt, step))
                self._leftovers = False
        except StoreError as error:  # the slice is sealed, and the next seal reports a failing device
            _log.warning("tier %s: could not record that step %d is complete: %s", self.name, step, error)

    def void(self, attempt: int, step: int) -> None:
        if self._open is not None:
            self._open.void((attempt, step))

    def record_doubt(self, steps: DoubtedSteps) -> None:
        if (opened := self._open) is not None:
            self._place.write_doubt(opened.rank, steps)

    def keep_proof(self, attempt: int, step: int, digest: Digest) -> None:
        if (opened := self._open) is not None:  # otherwise another process may be writing here
            opened.keep_proof((attempt, step), digest, self._place.replace_file)

    def proof(self, kept: SealedSlice) -> Digest | None:
        seal, path = kept.seal, proof_path(Path(kept.place), kept.slot)
        names = slice_identity(seal.run, seal.rank, seal.layout_digest, kept.seal_crc32)
        try:
            with translate_errors("read", path), open(open_private_file(path, os.O_RDONLY), "rb") as file:  # noqa: PTH123
                return read_proof(file.read(_PROOF_BYTES_MAX), seal.order, names, source=str(path))
        except StoreMissing:
            return None

    def kept_slices(self) -> list[SealedSlice]:
        self._damage = []
        if not self._place.check():
            return []
        found: list[SealedSlice] = []
        doubts = self._place.doubts()
        files, self._damage = scan(self._place, self._files.layouts)
        for file in files:
            for one in file.kept:
                found.append(replace(one, doubt=doubt_about(doubts, one.seal.order)))
                self._superblocks[one.place] = file.superblock
        return sorted(found, key=lambda one: (one.seal.order, -one.seal.rank), reverse=True)

    def damage(self) -> Sequence[str]:
        return self._damage

    def read_into(self, kept: SealedSlice, offset: int, view: memoryview) -> None:
        self._fill(functools.partial(read_fully, Path(kept.place)), kept, offset, view)

    def open_reader(self, kept: SealedSlice) -> Callable[[int, memoryview], None]:
        if self.nearness is not Nearness.MEMORY:
            return functools.partial(self.read_into, kept)
        path = Path(kept.place)
        with translate_errors("read", path):
            return functools.partial(self._fill, OpenFile(path).read, kept)

    def _fill(
        self, read: Callable[[int, memoryview], int], kept: SealedSlice, offset: int, view: memoryview
    ) -> None:
        superblock = self._superblocks.get(kept.place)
        if superblock is None:
            raise StoreError(f"{kept.place}: this tier has listed no slice there")
        what = f"{kept.place} slot {kept.slot}"
        if offset < 0 or offset + view.nbytes > superblock.area_bytes:
            raise DamageError(
                f"{what}: asked for bytes {offset} to {offset + view.nbytes}, the slice has {superblock.area_bytes}"
            )
        with translate_errors("read", Path(kept.place)):
            done = read(superblock.slot_offset(kept.slot) + offset, view.cast("B"))
        if done != view.nbytes:
            raise DamageError(f"{what}: cut short: {done} of {view.nbytes} bytes from {offset} on")

    def close(self) -> None:
        with self._preparing:
            opened, self._open = self._open, None
            if opened is not None:
                opened.retire()
                if opened.pages is not None:
                    opened.pages.join(_STOP_SECONDS_MAX)
            if self._lock is not None:
                self._lock.release()
                self._lock = None
