"""The slot files of one rank: found again, made beside a damaged one, and removed when a newer step is complete.

    open           opens the file of this layout; or measures the device, reserves room, makes a file and names it. A
                   large file in memory is named first, and gets the pages of all but its next slot later
    remove_older   removes files of earlier layouts and of ranks that are gone, once every rank has a newer step

A damaged file is never changed: the log names it, and a new file is made beside it. A file of another run is refused.
Only the holder of the rank's lock may call `open` and `remove_older`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, DamageError, HoldfastError, ProtocolError, StoreError
from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes
from holdfast.process import available_memory_bytes
from holdfast.ring.directory import open_private_file
from holdfast.store.file_system import IN_MEMORY, file_system_of
from holdfast.store.posix_errors import free_bytes, translate_errors
from holdfast.store.posix_io import reserve, sync_directory, write_all
from trainer_side.tiers.file_slots import SLOTS_MIN
from trainer_side.tiers.first_touch import can_populate, fill_file, has_hole, missing_bytes
from trainer_side.tiers.medium import MappedFile, Medium
from trainer_side.tiers.slot_file import SlotFile, SlotFileContents, examine, first_pages
from trainer_side.tiers.slot_format import Superblock
from trainer_side.tiers.slot_pages import SlotPages
from trainer_side.tiers.slot_proof import proofs_of
from trainer_side.tiers.slot_writer import OpenSlots
from trainer_side.tiers.tier import Order
from trainer_side.tiers.tier_directory import RankLock, TierDirectory

_log = logging.getLogger("holdfast.trainer")
_BESIDE_MAX = 100  # damaged files of one name; then the operator must act
_WRITERS_TRIED = (1, 2, 4)
_IN_FLIGHT_TRIED = (1, 2, 3)  # each needs one slot more
SCRATCH_BYTES = 64 << 20
_BLOCK_BYTES = 8 << 20  # of one write; like a frame, which is half a chunk or more
_MEASURE_SECONDS_MAX = 1.0
_NEARLY = 1.05
_AT_ONCE_BYTES_MAX = 256 << 20  # making the pages of a smaller file is faster than starting a thread


class SlotFiles:
    """Opens, makes and removes slot files. `slots` and `writers` are measured when a file is made, if they are None.

    With `later`, pages of a file on a tmpfs may be made beside training.
    """

    def __init__(
        self,
        name: str,
        place: TierDirectory,
        medium: Callable[[Path], Medium],
        *,
        slots: int | None,
        writers: int | None,
        later: bool = False,
    ) -> None:
        self._name, self._place, self._medium = name, place, medium
        self._slots, self._writers, self._later = slots, writers, later
        self.layouts: dict[str, Layout] = {}  # known ones, by digest

    def open(self, layout: Layout, rank: int) -> OpenSlots:
        """Open the slot file for this layout, or make it. See `Tier.prepare` for errors."""
        for slots in [self._slots] if self._slots else [count + SLOTS_MIN - 1 for count in _IN_FLIGHT_TRIED]:
            if (opened := self._open_existing(layout, rank, slots)) is not None:
                return opened
        self._place.remove_unfinished(rank)
        profile = self._measure_profile(layout, rank)
        slots = self._slots if self._slots is not None else profile.in_flight + SLOTS_MIN - 1
        path = next(path for path in self._paths(layout, rank, slots) if not os.path.lexists(path))
        self._make(path, layout, rank, slots, profile.writers)
        try:
            opened = self._open_existing(layout, rank, slots)
        except ConfigError:
            path.unlink(missing_ok=True)  # there is no room for its pages
            raise
        assert opened is not None, "it was just made"
        return opened

    def remove_older(self, opened: OpenSlots, order: Order) -> None:
        """Every rank has sealed `order`: remove files that hold only older steps and have no living writer."""
        removed = []
        for path, rank in self._place.slot_paths():
            if str(path) == opened.file.source:
                continue
            try:
                lock = None if rank == opened.rank else RankLock(self._place, rank)
            except HoldfastError:
                continue  # its writer lives
            try:
                found = examine(path, self._place, rank, self.layouts)
                if all((named.attempt, named.step) < order for named in found.committed if named is not None):
                    for one in (*proofs_of(path), path):
                        one.unlink()
                    removed.append(path)
            except (HoldfastError, OSError) as error:
                _log.warning("tier %s: %s is left where it is: %s", self._name, path, error)
            finally:
                if lock is not None:
                    lock.release()
        if removed:
            _log.info(
                "tier %s: removed slot files of earlier layouts: %s", self._name, ", ".join(map(str, removed))
            )
            with translate_errors("remove", self._place.directory):
                sync_directory(self._place.directory)

    # -- an existing file ----------------------------------------------------------------------------------------

    def _open_existing(self, layout: Layout, rank: int, slots: int) -> OpenSlots | None:
        for path in self._paths(layout, rank, slots):
            if not os.path.lexists(path):
                return None
            try:
                found = examine(path, self._place, rank, self.layouts)
                if found.superblock.layout_digest != layout.digest or found.superblock.slots != slots:
                    raise DamageError(f"{path}: holds another layout than its name says")
                return self._attach(path, found, layout)
            except (DamageError, ProtocolError) as error:
                _log.warning(
                    "tier %s: %s. The file is left as it is, and another one is used beside it; remove the damaged one "
                    "when you no longer need it",
                    self._name,
                    error,
                )
        raise ConfigError(
            f"tier {self._name}: {_BESIDE_MAX} files in {self._place.directory} cannot be used; see the log, and "
            "remove them"
        )

    def _paths(self, layout: Layout, rank: int, slots: int) -> list[Path]:
        numbers = range(1, _BESIDE_MAX + 1)
        return [self._place.slot_path(rank, layout.digest, slots, number) for number in numbers]

    def _attach(self, path: Path, found: SlotFileContents, layout: Layout) -> OpenSlots:
        missing = self._missing(path, found)
        medium = self._medium(path)
        try:
            later = self._make_next(medium, found, missing)
            file = SlotFile(medium, found.superblock, source=str(path))
        except BaseException:
            medium.close()
            raise

        make = partial(self._make_pages, medium, found.superblock)
        what = f"rank {found.superblock.rank}: not all slots are made"
        opened = OpenSlots(
            file,
            layout,
            found.superblock.rank,
            run=self._place.run,
            unsealable=tuple(found.damaged_seals),
            missing=later,
            pages=SlotPages(make, later, what=what) if later else None,
        )
        opened.make_pages()
        return opened

    # -- pages of a file in memory -------------------------------------------------------------------------------

    def _missing(self, path: Path, found: SlotFileContents) -> list[int]:
        """Return the slots that lack pages. ConfigError: no room for them beside the promises to other ranks."""
        own = missing_bytes(path)
        if not own:
            return []
        superblock = found.superblock
        free, others = self._free_bytes(), self._promised_bytes(path, superblock)
        if free is not None and free < own + others:
            cause = f"{own} bytes are missing, and {others} are promised to other ranks"
            raise self._no_room(superblock, cause)
        file = open_private_file(path, os.O_RDWR)
        try:
            if not self._can_make_lazily():
                with translate_errors("make", path):
                    reserve(file, path, superblock.file_bytes)
                return []
            return [slot for slot in range(superblock.slots) if has_hole(file, *_span(superblock, slot))]
        except StoreError as error:
            raise self._no_room(superblock, str(error)) from error
        finally:
            os.close(file)

    def _promised_bytes(self, path: Path, superblock: Superblock) -> int:
        """Count the bytes that slot files of other ranks with this layout still miss."""
        promised = 0
        for other, rank in self._place.slot_paths():
            name = self._place.slot_path(rank, superblock.layout_digest, superblock.slots).stem
            if other != path and rank != superblock.rank and other.stem.startswith(name):
                with contextlib.suppress(FileNotFoundError):
                    promised += missing_bytes(other)
        return promised

    def _make_next(self, medium: Medium, found: SlotFileContents, missing: Sequence[int]) -> list[int]:
        """Make the pages of slots that hold a slice, and of the first free one; return the other missing slots."""
        free = [slot for slot, named in enumerate(found.committed) if named is None]
        later = [slot for slot in missing if slot in free[1:]]
        for slot in missing:
            if slot not in later:
                self._make_pages(medium, found.superblock, slot, None)
        return later

    def _make_pages(
        self, medium: Medium, superblock: Superblock, slot: int, stopped: Callable[[], bool] | None
    ) -> None:
        assert isinstance(medium, MappedFile)
        begin, end = _span(superblock, slot)
        free = self._free_bytes()
        if free is not None and free < min(end - begin, missing_bytes(medium.path)):
            raise self._no_room(superblock, f"too full for slot {slot}")
        try:
            medium.make(begin, end - begin, stopped)
        except OSError as error:
            raise self._no_room(superblock, f"slot {slot}: {error.strerror}") from error

    def _can_make_lazily(self) -> bool:
        return self._later and can_populate() and file_system_of(self._place.directory) == "tmpfs"

    # -- a new file ----------------------------------------------------------------------------------------------

    def _make(self, path: Path, layout: Layout, rank: int, slots: int, writers: int) -> None:
        """Make an empty slot file, whole and durable before it gets its name; a large one in memory without pages."""
        superblock = Superblock.plan(
            layout, rank, run=self._place.run, run_digest=self._place.run_digest, slots=slots, writers=writers
        )
        free = self._free_bytes()
        if free is not None and free < superblock.file_bytes:
            raise self._no_room(superblock, "too full")
        temporary = path.with_name(path.name + ".new")
        with translate_errors("make", path):
            file = open_private_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                try:
                    if self._can_make_lazily() and superblock.file_bytes > _AT_ONCE_BYTES_MAX:
                        os.ftruncate(file, superblock.file_bytes)  # its pages are made once it has its name
                    else:
                        fill_file(file, temporary, superblock.file_bytes)
                        reserve(file, temporary, superblock.file_bytes)
                except (OSError, StoreError) as error:
                    raise self._no_room(superblock, str(error)) from error
                write_all(file, memoryview(first_pages(superblock, layout)), 0)
                os.fsync(file)
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
            sync_directory(path.parent)

    def _no_room(self, superblock: Superblock, cause: str) -> ConfigError:
        own = [path for path, rank in self._place.slot_paths() if rank == superblock.rank]
        earlier = sum(path.lstat().st_size for path in own)
        held = (
            f"; {earlier} bytes in it hold this rank's slices of an earlier layout, which stay until a step of the new "
            "one is complete"
            if earlier
            else ""
        )
        return ConfigError(
            f"tier {self._name}: no room in {self._place.directory} ({cause}): rank {superblock.rank} needs "
            f"{superblock.file_bytes} bytes for {superblock.slots} slots of {superblock.slot_bytes}, "
            f"{self._free_bytes()} are free{held}; make room, choose another directory, or train on "
            "more ranks: each then keeps less"
        )

    def _free_bytes(self) -> int | None:
        directory = self._place.directory
        free = free_bytes(directory)
        if free is None or file_system_of(directory) not in IN_MEMORY:
            return free
        # Beyond this process's memory limits, the kernel would kill a rank instead of refusing the pages.
        return min(free, available_memory_bytes())

    def _measure_profile(self, layout: Layout, rank: int) -> TierProfile:
        """Choose slots and writers for the device, unless they are set; the least for a small slice or full device."""
        least = TierProfile((self._slots or SLOTS_MIN) - 1, self._writers or 1)
        if (self._slots and self._writers) or area_bytes(layout, rank) < SCRATCH_BYTES:
            return least
        in_flight = _IN_FLIGHT_TRIED if self._slots is None else (least.in_flight,)
        writers = _WRITERS_TRIED if self._writers is None else (least.writers,)
        profiles = [TierProfile(count, threads) for count in in_flight for threads in writers]
        scratch = self._place.directory / f"rank-{rank:05}.slots.new"
        free = free_bytes(scratch)
        if free is None or free < 2 * SCRATCH_BYTES:
            return least
        try:
            with translate_errors("measure", scratch):
                file = open_private_file(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                try:
                    reserve(file, scratch, SCRATCH_BYTES)
                    medium = self._medium(scratch)
                finally:
                    os.close(file)
                    scratch.unlink()
                with contextlib.closing(medium):
                    return measure(medium, profiles)
        except HoldfastError as error:
            _log.warning("tier %s: the device could not be measured: %s", self._name, error)
            return least


def _span(superblock: Superblock, slot: int) -> tuple[int, int]:
    """Return where the pages of a slot begin and end; the first slot includes those before it."""
    begin = superblock.slot_offset(slot) if slot else 0
    return begin, superblock.slot_offset(slot + 1)


# -- how many in flight, and how many writers, suit a device --------------------------------------------------------


class TierProfile(NamedTuple):
    """`in_flight`: slices written at once. `writers`: threads for each."""

    in_flight: int
    writers: int


def choose_profile(seconds: Mapping[TierProfile, float]) -> TierProfile:
    """Return the best profile, by the seconds until all its slices were written."""
    per_slice = {profile: elapsed / profile.in_flight for profile, elapsed in seconds.items()}
    good_enough = min(per_slice.values()) * _NEARLY
    return min(profile for profile, elapsed in per_slice.items() if elapsed <= good_enough)


def measure(
    medium: Medium,
    candidates: Sequence[TierProfile],
    *,
    clock: Callable[[], float] = time.monotonic,
    seconds_max: float = _MEASURE_SECONDS_MAX,
) -> TierProfile:
    """Write with each candidate in turn, and choose the best. The first one is always tried, others while time remains.

    For N in flight with p writers each, N slices are written at once, each flushed at its end, in T_w seconds. The best
    has the least T_w / N; of nearly equal ones, the one with the fewest in flight, then the fewest writers (PCcheck,
    ASPLOS 2025, section 3.4).

    All `SCRATCH_BYTES` of the medium are overwritten. After `seconds_max` no further candidate is tried.
    """
    seconds: dict[TierProfile, float] = {}
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        block[:] = os.urandom(1 << 20) * (_BLOCK_BYTES >> 20)  # a device may be faster with zeros
        with memoryview(block) as view:
            _write(medium, view, TierProfile(1, 1))  # the first touch of the file takes longer
            begun = clock()
            for profile in candidates:
                started = clock()
                if seconds and started - begun > seconds_max:
                    break
                _write(medium, view, profile)
                seconds[profile] = (clock() - started) / _blocks_per_slice(profile)
    return choose_profile(seconds)


def _blocks_per_slice(profile: TierProfile) -> int:
    return SCRATCH_BYTES // _BLOCK_BYTES // profile.in_flight


def _write(medium: Medium, view: memoryview, profile: TierProfile) -> None:
    """Write all slices of a profile at once; together about `SCRATCH_BYTES`."""
    blocks = _blocks_per_slice(profile)

    def one_slice(number: int) -> None:
        slice_blocks = range(number * blocks, (number + 1) * blocks)
        with ThreadPoolExecutor(profile.writers) as writers:
            list(writers.map(lambda block: medium.write(block * _BLOCK_BYTES, view), slice_blocks))
        medium.flush()

    with ThreadPoolExecutor(profile.in_flight) as slices:
        list(slices.map(one_slice, range(profile.in_flight)))
