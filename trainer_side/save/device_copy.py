"""Copies from a device into staging areas: queued on the training's own stream, or on a stream beside it.

    mirror   save(): live tensors ─► mirror, on the current stream │ own stream: mirror ─► area, section by section
    capture  save(): live tensors ─► area, on the current stream   │ without a mirror: tensors that anything may change
    copy     behind the gate: live tensors ─► area, on the own stream

With a full mirror, no live tensor is read after `save()`: the device runs later work (an update, a graph replay, the
loading of a state) after the copy within its own memory. The gate stays open, and a copy cannot be torn
(docs/design/007-device-mirror.md). If a full mirror does not fit, a partial one may hold the tensors that anything may
change, so that none of them crosses on the training's stream. Capture and copy are strategy C of LightCheck (ICCD
2023). Strategy D, straight into a tier, uses a slot as the area.

All three pack small tensors by one launch and send parcels (parcel.py). Without memory for a parcel, tensors cross one
by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import torch

from trainer_side.save.copy_plan import Batch, CopyPiece, SliceSources, batches_of
from trainer_side.save.device_stream import DeviceMemory, DeviceStream, free_storage, refill_all
from trainer_side.save.parcel import (
    BatchTransfer,
    LiveBatches,
    LiveTensors,
    Packing,
    Parcel,
    packed_bytes,
    runs_of,
)
from trainer_side.state.accelerator import StreamEvent

_log = logging.getLogger("holdfast.trainer")
_SPARE_SHARE = 10  # a tenth of the device's memory is left free


class MirrorRoom:
    """Decides whether mirrors of `limit_bytes` at most (None: of the spare memory) fit on a device. Training thread."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._training_bytes = 0  # most that torch has held for training
        self._peak_bytes = self._returned_bytes = self._retries = 0  # at the last save
        self._lent_bytes = 0  # since the last save
        self._is_crowded = False  # torch had to free cached memory during the last copy
        self._spare_bytes = self._free_bytes = 0  # at this save
        self._saves = 0
        self._is_short = False
        self._last_logged: bool | None = None

    def has_room(self, nbytes: int, memory: DeviceMemory | None) -> bool:
        """Whether a mirror of `nbytes` may be made at this save."""
        if memory is not None:
            self._measure(memory)
        if self._limit_bytes is not None:
            room = self._limit_bytes if memory is None else min(self._limit_bytes, self._free_bytes)
            return self._log_change(nbytes <= room, nbytes, room)
        if self._saves < 2:
            return False
        return self._log_change(nbytes <= self._spare_bytes, nbytes, self._spare_bytes)

    def has_room_in_part(self, nbytes: int) -> bool:
        """Whether a partial mirror may be made, after `has_room` has refused a full one."""
        return (self._limit_bytes is None or nbytes <= self._limit_bytes) and self.try_reserve(nbytes)

    def try_reserve(self, nbytes: int) -> bool:
        """Reserve `nbytes` of the spare memory, if they fit, regardless of the limit for mirrors. Returns whether."""
        fits = nbytes <= self._spare_bytes
        if fits:
            self.record_lent(nbytes)
            self._spare_bytes -= nbytes
        return fits

    def record_lent(self, nbytes: int) -> None:
        self._lent_bytes += nbytes

    def on_copy_end(self, memory: DeviceMemory | None) -> None:
        """Note that the copy has ended and freed its memory. Copy thread, before the next save."""
        self._is_crowded = memory is not None and memory.retries > self._retries

    def record_out_of_memory(self) -> None:
        """Note that the device had no memory for the mirror."""
        self._is_short = self._limit_bytes is None
        self._spare_bytes = 0
        self._log_change(False, 0, 0)

    def _measure(self, memory: DeviceMemory) -> None:
        self._saves += 1
        # If torch has returned nothing to the device, it still holds the lent memory, which is not training's.
        kept_bytes = self._lent_bytes if memory.returned == self._returned_bytes else 0
        if memory.peak != self._peak_bytes:
            self._training_bytes = max(self._training_bytes, memory.peak - kept_bytes)
        self._is_short = self._is_short or self._is_crowded
        self._peak_bytes, self._returned_bytes = memory.peak, memory.returned
        self._retries, self._lent_bytes, self._is_crowded = memory.retries, 0, False
        self._free_bytes = memory.free + kept_bytes
        spare = memory.total // _SPARE_SHARE
        room = max(0, memory.free + memory.reserved - self._training_bytes - spare)
        self._spare_bytes = 0 if self._is_short or self._saves == 1 else min(room, self._free_bytes)

    def _log_change(self, fits: bool, nbytes: int, room: int) -> bool:
        """Log whether mirrors fit, whenever that changes."""
        if fits is not self._last_logged:
            self._last_logged = fits
            if fits:
                what = f"checkpoints are copied on the device first, {nbytes} bytes: updates wait for nothing"
            else:
                what = (
                    f"no room on the device for a copy of {nbytes} bytes, only {room} are spare: updates wait for the "
                    "copy to the host"
                )
            _log.info("%s", what)
        return fits


# Fewer sections cost less; with more, the sender begins earlier.
_SECTION_BYTES = 32 << 20
_SECTIONS_MAX = 64
_by_offset = attrgetter("offset")


class Mirror:
    """Copy of one save on the device. Each section's memory is freed when it has reached the host."""

    def __init__(self, now: Sequence[Batch], gated: Sequence[Batch], slice_: SliceSources) -> None:
        self.inputs = now, gated
        self.is_full = True  # has all tensors on the device, not only those that anything may change
        self.batches = _cut_into_sections([*now, *gated], slice_)
        runs = [runs_of(batch.pieces, slice_) for batch in self.batches]
        self._runs, self._parcels = runs, [*map(Parcel, runs)]
        self._sizes = [*map(packed_bytes, runs)]
        self.nbytes = sum(self._sizes)
        self._memory: list[torch.Tensor] = []
        self._packing: Packing | None = None

    def queue_copy(self, stream: DeviceStream, slice_: SliceSources) -> None:
        """Queue the copy, on the current stream. OutOfMemoryError: there is no memory for it after all."""
        if len(self._memory) == len(self._sizes):
            stream.refill(self._memory)
        else:
            self._memory = []
            for nbytes in self._sizes:
                self._memory.append(stream.allocate(nbytes))
        if self._packing is not None:
            self._packing.queue(stream)
            return
        with torch.inference_mode(mode=False):  # inference tensors could not be written to later
            live = LiveTensors(stream, slice_.sources, self.batches)
            packing = Packing()
            for runs, memory in zip(self._runs, self._memory, strict=True):
                packing.add(runs, memory, live, slice_.sources)
        self._packing = packing if live.is_reusable else None
        packing.queue(stream)

    def sections(self) -> Iterator[BatchTransfer]:
        yield from map(BatchTransfer, self.batches, self._parcels, self._memory)

    def free_memory(self) -> None:
        """Free the memory that is not free yet."""
        for memory in self._memory:
            free_storage(memory)


def _cut_into_sections(of: Sequence[Batch], slice_: SliceSources) -> list[Batch]:
    """Cut all pieces, in the order of the area, into sections."""
    pieces = sorted((piece for batch in of for piece in batch.pieces), key=_by_offset)
    least = max(_SECTION_BYTES, -(-sum(batch.nbytes for batch in of) // _SECTIONS_MAX))
    groups: list[list[CopyPiece]] = [[]]
    nbytes = 0
    for piece in pieces:
        if nbytes >= least:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    return list(batches_of(groups, slice_.sources))


_AHEAD = 4  # parcels queued at once, so that the device is never idle between two
_KEPT_MAX = 8  # of each cache; areas differ in the tensors that they leave out


class DeviceCopy:
    """Copies from one device into staging areas. `mirror` and `capture` belong to the training thread and allocate all
    device memory, the other methods to the copy thread and free it. They never overlap: a save waits for the previous
    copy.
    """

    def __init__(self, stream: DeviceStream, room: MirrorRoom) -> None:
        self._stream, self._room = stream, room
        self._mirrors: deque[Mirror] = deque(maxlen=_KEPT_MAX)
        self._captured: deque[LiveBatches] = deque(maxlen=_KEPT_MAX)
        self._gated_batches: LiveBatches | None = None

    # -- in save() -----------------------------------------------------------------------------------------------

    def mirror(self, now: Sequence[Batch], gated: Sequence[Batch], slice_: SliceSources) -> Mirror | None:
        """Queue a mirror of all batches, or at least of `now`, on the current stream; None if there is no room."""
        mirror = self._mirror(now, gated, slice_)
        is_full = self._room.has_room(mirror.nbytes, self._stream.memory())
        if not is_full:
            if not now:
                return None
            mirror = self._mirror(now, (), slice_)
            if not self._room.has_room_in_part(mirror.nbytes):
                return None
        mirror.is_full = is_full
        try:
            try:
                mirror.queue_copy(self._stream, slice_)
            finally:
                self._stream.wait_for_current_stream()  # even after an error: the memory is used until then
        except torch.OutOfMemoryError as error:
            mirror.free_memory()
            self._room.record_out_of_memory()
            _log.warning("no memory on the device for a copy of %d bytes: %s", mirror.nbytes, error)
            return None
        except BaseException:
            mirror.free_memory()
            raise
        if is_full:
            self._room.record_lent(mirror.nbytes)
        return mirror

    def capture(
        self, now: Sequence[Batch], slice_: SliceSources, area: torch.Tensor, *, gated: Sequence[Batch] = ()
    ) -> Callable[[], None]:
        """Queue copies of `now` into `area` on the current stream; return a function that waits until they have landed.

        `gated`: The batches that `copy` will copy; memory for their parcels is reserved now.
        """
        if gated:
            live = self._live_gated(gated, slice_)
            if live.nbytes and self._room.try_reserve(live.nbytes):
                live.allocate(self._stream.allocate, self._stream.refill)
        live = self._live_now(now, slice_)
        # One slot is enough: the current stream packs a batch after the previous one has crossed.
        live.allocate(self._stream.allocate_on_current_stream, refill_all)
        transfers: list[BatchTransfer] = []
        try:
            with self._drained_on_error(transfers, area):
                for number in range(len(now)):
                    transfer = live.transfer(number)
                    self._begin(transfer, transfers, area)
                    live.queue(number, transfer, area, self._stream, slice_.sources)
                event = self._stream.record_event()
        finally:
            live.free_memory()

        def land() -> None:
            event.synchronize()
            for transfer in transfers:
                if transfer.parcel is not None:
                    transfer.parcel.restore_holes(area)

        return land

    # -- in the copy thread --------------------------------------------------------------------------------------

    def copy_mirror(
        self,
        mirror: Mirror,
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy a mirror to the host and free it, cancelled or not; arguments as for `CopyEngine.copy`."""

        def queue(_number: int, transfer: BatchTransfer) -> None:
            assert transfer.parcel is not None
            assert transfer.memory is not None
            transfer.parcel.send(transfer.memory, area)

        def landed(transfer: BatchTransfer) -> None:
            assert transfer.memory is not None
            free_storage(transfer.memory)
            arrived(transfer.batch)

        try:
            with self._stream.on_own_stream(None):
                self._run_transfers(mirror.sections(), queue, area, cancelled, lambda _: None, landed)
        finally:
            mirror.free_memory()
            self._room.on_copy_end(self._stream.memory())

    def copy(
        self,
        gated: Sequence[Batch],
        slice_: SliceSources,
        area: torch.Tensor,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy live batches; arguments as for `CopyEngine.copy`."""
        live = self._live_gated(gated, slice_)

        def queue(number: int, transfer: BatchTransfer) -> None:
            live.queue(number, transfer, area, self._stream, slice_.sources)

        try:
            with self._stream.on_own_stream(after):
                work = map(live.transfer, range(len(gated)))
                self._run_transfers(
                    work, queue, area, cancelled, read, lambda transfer: arrived(transfer.batch)
                )
        finally:
            self.free_memory()
            self._room.on_copy_end(self._stream.memory())

    def free_memory(self) -> None:
        """Free the device memory of copies. No copy is in flight."""
        if self._gated_batches is not None:
            self._gated_batches.free_memory()

    def _run_transfers(
        self,
        work: Iterable[BatchTransfer],
        queue: Callable[[int, BatchTransfer], None],
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        landed: Callable[[BatchTransfer], None],
    ) -> None:
        pending: deque[BatchTransfer] = deque()

        def land() -> None:
            transfer = pending[0]
            assert transfer.event is not None
            transfer.event.synchronize()
            read(transfer.batch)
            if transfer.parcel is not None:
                transfer.parcel.restore_holes(area)
            pending.popleft()
            landed(transfer)

        with self._drained_on_error(pending, area):
            for number, transfer in enumerate(work):
                if cancelled():
                    break
                if len(pending) == _AHEAD:
                    land()  # frees the slot that this transfer uses
                self._begin(transfer, pending, area)
                queue(number, transfer)
                transfer.event = self._stream.record_event()
            while pending:  # even if cancelled: no live tensor is read after this returns
                land()

    @staticmethod
    def _begin(
        transfer: BatchTransfer, pending: list[BatchTransfer] | deque[BatchTransfer], area: torch.Tensor
    ) -> None:
        if transfer.parcel is not None:
            transfer.parcel.save_holes(area)
        pending.append(transfer)

    @contextlib.contextmanager
    def _drained_on_error(self, pending: Iterable[BatchTransfer], area: torch.Tensor) -> Iterator[None]:
        """After an error, wait for queued writes to the host and restore the holes, so the area can be used again."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a device that has failed writes nothing
                self._stream.record_event().synchronize()
            for transfer in pending:
                if transfer.parcel is not None:
                    transfer.parcel.restore_holes(area)
            raise

    # -- caches --------------------------------------------------------------------------------------------------

    def _mirror(self, now: Sequence[Batch], gated: Sequence[Batch], slice_: SliceSources) -> Mirror:
        for known in self._mirrors:
            if known.inputs[0] is now and known.inputs[1] is gated:
                return known
        made = Mirror(now, gated, slice_)
        self._mirrors.append(made)
        return made

    def _live_gated(self, gated: Sequence[Batch], slice_: SliceSources) -> LiveBatches:
        if self._gated_batches is None or self._gated_batches.batches is not gated:
            self._gated_batches = LiveBatches(gated, slice_, _AHEAD)
        return self._gated_batches

    def _live_now(self, now: Sequence[Batch], slice_: SliceSources) -> LiveBatches:
        for known in self._captured:
            if known.batches is now:
                return known
        made = LiveBatches(now, slice_, 1)
        self._captured.append(made)
        return made
