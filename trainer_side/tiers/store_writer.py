"""One rank's slice on its way into the store.

first write ─► room is made ─► an upload ─► parts, as frames come ─► publish ─► layout ─► seal
└► after any failure: everything that was sent is taken back
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

from holdfast.checkpoints.slice_sets import SliceName, layout_name, read_layout, slice_write_id
from holdfast.crc import crc32
from holdfast.errors import DamageError, HoldfastError, StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceFrame, SliceSeal, area_bytes, frames_of
from holdfast.store.base import Store, Upload
from trainer_side.tiers.store_shelf import SliceShelf


@dataclass(slots=True)
class _Joined:
    """A part that several frames share, until all of them have come."""

    memory: memoryview
    lacks: set[int] = field(default_factory=set)


class PartCutter:
    """Cuts frames into parts and sends each as soon as it is whole, in the thread that made it so.

    Frames that come nearly in order take memory for a part or two for each thread; in a wild order it may be up to the
    whole slice.

    Args:
        frames: The frames of the slice.
        part_bytes: Size of every part but the last.
        send: Writes part `index` with these bytes and this CRC-32. Any thread; its errors come out of `put`.
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
        """Take one frame; its bytes are free again when this returns. Errors of `send` come out of it."""
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
        return range(
            frame.offset // self._part_bytes,
            (frame.offset + frame.padded_bytes - 1) // self._part_bytes + 1,
        )


_log = logging.getLogger("holdfast.trainer")
_PART_BYTES = 8 << 20  # one request, and small enough to be held where frames share it


class Layouts:
    """Puts each layout of this run's slices into the store, once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: set[str] = set()

    def put(self, attempt: int, layout: Layout) -> None:
        """See that the layout is in the store, before the first seal that names it."""
        name = layout_name(attempt, layout.digest)
        if name in self._known:
            return
        try:
            read_layout(self._store, attempt, layout.digest)
        except (StoreMissing, DamageError):
            self._store.write(name, layout.to_bytes())
            read_layout(self._store, attempt, layout.digest)
        self._known.add(name)


class StoreSliceWriter:
    """One slice on its way into the store. `write` belongs to any thread, the rest to one.

    Args:
        store: The run. `run`: its name.
        shelf: Has a slot for the slice.
        layouts: Puts the layout into the store.
        name: Rank, step and attempt of the slice.
        layout: Layout of the image.
    """

    memory = None
    copy = None

    def __init__(
        self, store: Store, shelf: SliceShelf, layouts: Layouts, *, run: str, name: SliceName, layout: Layout
    ) -> None:
        self._store, self._shelf, self._layouts, self._run = store, shelf, layouts, run
        self._name, self._layout = name, layout
        self._frames: tuple[SliceFrame, ...] = frames_of(layout, name.rank)
        self._crcs: dict[int, int] = {}
        self._opening = threading.Lock()
        self._upload: Upload | None = None
        self._cutter: PartCutter | None = None
        self._over = False

    def write(self, frame: int, buffer: memoryview, crc32: int) -> None:
        """Put one frame in its place, once. Frames that share a part of the upload are joined and sent together.

        Raises:
            StoreError: The store refused for longer than its own bounds; or this frame was written before.
        """
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
        """Publish the slice, then its seal. False: the step is of no more use, and nothing of the slice is left.

        Raises:
            StoreError: A frame is missing, or the store refused; the slice does not exist then.
        """
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
            self._layouts.put(name.attempt, self._layout)
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
        """Take back everything that was sent. After `seal` it does nothing."""
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
