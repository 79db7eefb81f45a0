"""The slices of one rank in the store: those that are there, and one on its way.

first write ─► room is made ─► an upload ─► parts, as frames come ─► publish ─► layout ─► seal
└► after any failure: everything that was sent is removed
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoints.slice_sets import (
    SliceName,
    SliceSet,
    find_sets,
    layout_name,
    read_layout,
    read_seal,
    slice_write_id,
)
from holdfast.crc import crc32
from holdfast.errors import DamageError, HoldfastError, StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceFrame, SliceSeal, area_bytes, frames_of
from holdfast.store.base import Store, Upload

_log = logging.getLogger("holdfast.trainer")
_PART_BYTES = 8 << 20  # one request, and small enough to be held where frames share it


@dataclass(slots=True)
class _Joined:
    """A part that several frames share, until all of them have come."""

    memory: memoryview
    lacks: set[int] = field(default_factory=set)


class PartCutter:
    """Cuts frames into parts and sends each as soon as it is whole, in the thread that made it so.

    Frames that come nearly in order take memory for a part or two for each thread; in random order it may be up to the
    whole slice. `send` writes part `index` with these bytes and this CRC-32; its errors come out of `put`.
    """

    def __init__(
        self, frames: Sequence[SliceFrame], part_bytes: int, send: Callable[[int, memoryview, int], None]
    ) -> None:
        self._frames, self._part_bytes, self._send = frames, part_bytes, send
        self._total_bytes = frames[-1].offset + frames[-1].padded_bytes if frames else 0
        self._shared: dict[int, set[int]] = {}  # part → the frames that share it
        for number, frame in enumerate(frames):
            for part in self._parts(frame):
                self._shared.setdefault(part, set()).add(number)
        self._joined: dict[int, _Joined] = {}
        self._lock = threading.Lock()

    def put(self, number: int, buffer: memoryview) -> None:
        """Take one frame; its bytes are free again when this returns."""
        frame = self._frames[number]
        for part in self._parts(frame):
            begin, end = part * self._part_bytes, min((part + 1) * self._part_bytes, self._total_bytes)
            first, last = max(begin, frame.offset), min(end, frame.offset + frame.padded_bytes)
            piece = buffer[first - frame.offset : last - frame.offset]
            if len(self._shared[part]) == 1:
                self._send(part, piece, crc32(piece))
                continue
            joined = self._join(part, end - begin)
            joined.memory[first - begin : last - begin] = piece
            with self._lock:
                joined.lacks.discard(number)
                is_whole = not joined.lacks and self._joined.pop(part, None) is not None
            if is_whole:
                self._send(part, joined.memory, crc32(joined.memory))

    def _join(self, part: int, nbytes: int) -> _Joined:
        with self._lock:
            if part not in self._joined:
                # Page-aligned, as direct writes need it, and given back as soon as the part is sent.
                self._joined[part] = _Joined(memoryview(mmap.mmap(-1, nbytes)), set(self._shared[part]))
            return self._joined[part]

    def _parts(self, frame: SliceFrame) -> range:
        end = frame.offset + frame.padded_bytes
        return range(frame.offset // self._part_bytes, (end - 1) // self._part_bytes + 1)


class SliceShelf:
    """The slices of one rank in the store, and the ones among them that may go: the slots of the store as a tier.

    take ─► being written; older slices go for it ─► make_room ─► sealed ─► complete, or void
                                                       └► let_go: the older slices stay

    Names are never written twice, so a slot is only a count here: `slots` slices, with those that are being written.
    Any thread.
    """

    def __init__(self, store: Store, slots: int) -> None:
        self._store, self._slots = store, slots
        self._lock = threading.Lock()
        self._sealed: dict[CheckpointId, set[SliceName]] = {}  # in the store
        self._digests: dict[CheckpointId, str] = {}  # of their layouts
        self._writing: dict[CheckpointId, list[CheckpointId]] = {}  # and the slices that go for it
        self._void: set[CheckpointId] = set()
        self._layouts_stored: set[str] = set()
        self._completes: set[CheckpointId] = set()  # steps that were found complete, and the newest one
        self._found: set[CheckpointId] | None = None  # steps of earlier jobs
        self._forgotten: set[CheckpointId] = set()  # those that were listed as complete and are not whole

    def note_found(self, rank: int, ranks: int) -> None:
        """Look for slices of earlier jobs: those of rank `r` now belong to rank `r` modulo `ranks`."""
        orders: set[CheckpointId] = set()
        for found in find_sets(self._store.list()):
            mine = {name for name in found.names() if name.rank % ranks == rank}
            digest = self._digests.get(found.order) or self._digest_of(found, mine)
            with self._lock:
                orders.add(found.order)
                if found.complete and found.order not in self._forgotten:
                    self._completes.add(found.order)
                if mine and found.order not in self._writing:
                    self._sealed.setdefault(found.order, set()).update(mine)
                    self._digests[found.order] = digest
        self._found = orders if self._found is None else self._found

    def take(self, key: CheckpointId) -> bool:
        """Take a slot for this step, without a request. False: all are taken, or a newer step is complete."""
        with self._lock:
            if key in self._writing or (self._complete and key <= self._complete):
                return False
            going = [key] if key in self._sealed else []  # sealed, and saved once more
            taken = (self._sealed.keys() - self._going()) | self._writing.keys()
            going += self._spare(key)[: max(0, len(taken - {key}) + 1 - self._slots)]
            if len(taken - {key} - set(going)) + 1 > self._slots:
                return False
            self._writing[key] = going
            self._void.discard(key)
            return True

    def is_late(self, key: CheckpointId) -> bool:
        """Whether this step is no longer of use: it is void, or a newer step is complete."""
        with self._lock:
            return key in self._void or (self._complete is not None and key < self._complete)

    def sealed(self, name: SliceName, digest: str) -> None:
        with self._lock:
            self._digests[name.order] = digest
            self._sealed.setdefault(name.order, set()).add(name)
            self._writing.pop(name.order, None)

    def let_go(self, key: CheckpointId) -> None:
        """This step will not be sealed: its slot is free."""
        with self._lock:
            self._writing.pop(key, None)
            self._void.discard(key)

    def complete(self, key: CheckpointId) -> None:
        """Every rank has sealed this step: remove this rank's slices of other layouts. A failure is logged."""
        with self._lock:
            newest = max(key, self._complete or key)
            found = {order for order in self._completes if order in (self._found or ())}
            self._completes = found | {newest, key}
            present = self._digests.get(newest)
            old = [
                order
                for order in sorted(self._sealed)
                if order < newest and present and self._digests.get(order) != present
            ]
        self.try_remove(old)

    def void(self, key: CheckpointId) -> None:
        """Not every rank will seal this step: this rank's slice goes, now or when it would be sealed."""
        with self._lock:
            if key in self._completes:
                # A step that was found complete is not whole after all: it goes first, once its place is needed.
                if key in (self._found or ()):
                    self._completes.discard(key)
                    self._forgotten.add(key)
                return
            if key in self._writing:
                self._void.add(key)
            gone = [key] if key in self._sealed else []
        self.try_remove(gone)

    def make_room(self, key: CheckpointId) -> None:
        """Remove the slices that go for this step, before its first byte is sent."""
        with self._lock:
            going = list(self._writing.get(key, ()))
        for old in going:
            self._remove(old)

    def try_remove(self, keys: list[CheckpointId]) -> None:
        """Remove these slices; a failure is only logged, and retried when a slot is needed."""
        for key in keys:
            try:
                self._remove(key)
            except StoreError as error:
                _log.warning("%s: this rank's old slice stays in the store for now: %s", key, error)

    @property
    def _complete(self) -> CheckpointId | None:
        """The newest step that every rank has sealed. The caller holds the lock."""
        return max(self._completes, default=None)

    def _remove(self, key: CheckpointId) -> None:
        # The seal first: a slice without a seal is nothing, a seal without its slice would be a lie.
        with self._lock:
            names = sorted(self._sealed.get(key, ()))
        for name in names:
            self._store.delete(name.seal)
            reach(Point.SEAL_DELETED)
            self._store.delete(name.slice)
        with self._lock:
            self._sealed.pop(key, None)
            self._digests.pop(key, None)

    def _going(self) -> set[CheckpointId]:
        """The steps whose slices are removed for those that are being written. The caller holds the lock."""
        return {old for going in self._writing.values() for old in going}

    def _spare(self, key: CheckpointId) -> list[CheckpointId]:
        """The steps that may be removed, the first to go first. The caller holds the lock."""
        newest = self._complete
        going = self._going()
        others = [old for old in sorted(self._sealed) if old not in (newest, key) and old not in going]
        forgotten = [old for old in others if old in self._forgotten]
        others = [old for old in others if old not in forgotten]
        older = [old for old in others if newest is not None and old < newest]
        # A step that an earlier job did not complete will never be complete. If no step is known to be complete, the
        # oldest is the likeliest to be: so it goes last.
        dead = [old for old in others if old not in older and old.attempt < key.attempt]
        return forgotten + older + (dead if newest is not None else dead[::-1])

    def _digest_of(self, found: SliceSet, names: set[SliceName]) -> str:
        """The layout digest of a slice set; empty if none of this rank's seals can be read."""
        for name in sorted(name for name in names if name.rank in found.seals):
            try:
                return read_seal(self._store, name).layout_digest
            except (StoreMissing, DamageError):
                continue
        return ""

    def put_layout(self, attempt: int, layout: Layout) -> None:
        """Make sure that the layout is in the store before the first seal that names it."""
        name = layout_name(attempt, layout.digest)
        if name in self._layouts_stored:
            return
        try:
            read_layout(self._store, attempt, layout.digest)
        except (StoreMissing, DamageError):
            self._store.write(name, layout.to_bytes())
            read_layout(self._store, attempt, layout.digest)
        self._layouts_stored.add(name)


class StoreSliceWriter:
    """One slice on its way into the store. `write` belongs to any thread, the rest to one.

    `shelf` has a slot for it. See `SliceWriter` for the rest.
    """

    memory = None
    copy = None

    def __init__(self, store: Store, shelf: SliceShelf, *, run: str, name: SliceName, layout: Layout) -> None:
        self._store, self._shelf, self._run = store, shelf, run
        self._name, self._layout = name, layout
        self._frames: tuple[SliceFrame, ...] = frames_of(layout, name.rank)
        self._crcs: dict[int, int] = {}
        self._opening = threading.Lock()
        self._upload: Upload | None = None
        self._cutter: PartCutter | None = None
        self._over = False

    def write(self, frame: int, buffer: memoryview, crc32: int) -> None:
        """Write one frame to its place, once. Frames that share a part of the upload are joined and sent together."""
        expected = self._frames[frame].padded_bytes
        if buffer.nbytes != expected:
            raise StoreError(
                f"{self._name.slice}: frame {frame} came with {buffer.nbytes} bytes, expected {expected}"
            )
        if frame in self._crcs:
            raise StoreError(
                f"{self._name.slice}: frame {frame} was written before; a slice is written once, start over"
            )
        self._open().put(frame, buffer)
        self._crcs[frame] = crc32

    def seal(self, record: Mapping[str, Any]) -> bool:
        """Publish the slice, then its seal. False: the step is of no more use, and nothing of the slice is left."""
        shelf, store, name = self._shelf, self._store, self._name
        if shelf.is_late(name.order):
            self.abandon()
            return False
        missing = [frame for frame in range(len(self._frames)) if frame not in self._crcs]
        if missing:
            raise StoreError(
                f"{name.slice}: {len(missing)} of {len(self._frames)} frames are missing, the first is {missing[0]}"
            )
        try:
            if self._upload is not None:
                self._upload.publish()
            else:
                shelf.make_room(name.order)  # this rank has nothing of this image but a seal
            reach(Point.SLICE_STORED)
            shelf.put_layout(name.attempt, self._layout)
            store.write(name.seal, self._seal(record).to_bytes())
        except BaseException:
            self._take_back()
            raise
        reach(Point.SLICE_SEALED)
        self._over = True
        shelf.sealed(name, self._layout.digest)
        if shelf.is_late(name.order):
            shelf.try_remove([name.order])
            return False
        return True

    def abandon(self) -> None:
        """Remove everything that was sent. After `seal` it does nothing."""
        if self._over:
            return
        self._over = True
        try:
            if self._upload is not None:
                self._upload.abort()
        except HoldfastError as error:
            _log.warning(
                "%s: the bytes that were sent stay in the store until the next sweep: %s",
                self._name.slice,
                error,
            )
        finally:
            self._shelf.let_go(self._name.order)

    def _seal(self, record: Mapping[str, Any]) -> SliceSeal:
        return SliceSeal(
            run=self._run,
            attempt=self._name.attempt,
            step=self._name.step,
            rank=self._name.rank,
            ranks=self._name.ranks,
            layout_digest=self._layout.digest,
            frame_crc32s=tuple(self._crcs[frame] for frame in range(len(self._frames))),
            sealed_at_unix=time.time(),
            record=dict(record),
        )

    def _open(self) -> PartCutter:
        # The upload begins with the first frame: training waits while `begin` of the tier is called.
        with self._opening:
            if self._over:
                raise StoreError(f"{self._name.slice}: the slice is over already; start over")
            if self._cutter is None:
                self._shelf.make_room(self._name.order)
                nbytes = area_bytes(self._layout, self._name.rank)
                upload = self._upload = self._store.begin(
                    self._name.slice,
                    nbytes=nbytes,
                    chunk_bytes=min(_PART_BYTES, nbytes),
                    write_id=slice_write_id(self._name, uuid.uuid4().hex),
                )
                self._cutter = PartCutter(
                    self._frames,
                    upload.part_bytes,
                    lambda part, view, crc: upload.write_part(part, [view], crc),
                )
            return self._cutter

    def _take_back(self) -> None:
        # The slice may be there, and even its seal, if the answer was lost: neither may stay.
        upload, name, store = self._upload, self._name, self._store
        self._over = True
        try:
            store.delete(name.seal)
            if upload is not None:
                upload.abort()
            store.delete(name.slice)
        except HoldfastError as error:
            _log.warning("%s: stays in the store until the next attempt: %s", name.slice, error)
        finally:
            self._shelf.let_go(name.order)
