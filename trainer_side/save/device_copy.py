"""Copies from a device into staging areas: queued in the training's own order, or on a stream beside the training.

    mirror   save(): live tensors ─► mirror, on the current stream │ own stream: mirror ─► area, section by section
    capture  save(): live tensors ─► area, on the current stream   │ what anything may change, where there is no mirror
    copy     behind the gate: live tensors ─► area, on the own stream

With a mirror of everything, no live tensor is read after `save()`: the device runs later work (an update, the replay of
a graph, another state that is loaded) after the copy within its own memory. The gate stays open, and a copy cannot be
torn (docs/design/007-device-mirror.md). If there is no room for a full mirror, there may be one of the tensors that
anything may change, so that none of them crosses on the training's stream. The two others are strategy C of LightCheck
(ICCD 2023). Strategy D, straight into a tier, is each of them with a slot for an area.

All of them pack small tensors by one launch and send parcels (parcel.py). Where there is no memory for a parcel,
tensors cross one by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import torch

from trainer_side.save.copy_plan import Batch, CopyPiece, SliceSources, batches_of
from trainer_side.save.device_stream import DeviceMemory, DeviceStream, empty, refill_all
from trainer_side.save.parcel import (
    Crossing,
    LiveBatches,
    LiveTensors,
    Packing,
    Parcel,
    packed_bytes,
    runs_of,
)
from trainer_side.state.accelerator import StreamEvent

_log = logging.getLogger("holdfast.trainer")
_SPARE_SHARE = 10  # a tenth of the device's memory is left alone


class MirrorRoom:
    """The room for mirrors on one device. Training thread.

    A mirror may have `limit_bytes`, from the first save on; None: what is measured.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._training_bytes = 0  # that torch held for training at most
        self._peak_bytes = self._returned_bytes = self._retries = 0  # at the save before
        self._lent_bytes = 0  # since then
        self._is_crowded = False  # torch had to give memory back while that copy was under way
        self._spare_bytes = self._free_bytes = 0  # at this save
        self._saves = 0
        self._is_short = False
        self._said: bool | None = None

    def has(self, nbytes: int, memory: DeviceMemory | None) -> bool:
        """Whether a mirror of `nbytes` may be made at this save."""
        if memory is not None:
            self._measure(memory)
        if self._limit_bytes is not None:
            room = self._limit_bytes if memory is None else min(self._limit_bytes, self._free_bytes)
            return self._say(nbytes <= room, nbytes, room)
        if self._saves < 2:
            return False
        return self._say(nbytes <= self._spare_bytes, nbytes, self._spare_bytes)

    def has_in_part(self, nbytes: int) -> bool:
        """Whether a mirror of a part may be made where a full one has no room. Called after `has`."""
        return (self._limit_bytes is None or nbytes <= self._limit_bytes) and self.has_beside(nbytes)

    def has_beside(self, nbytes: int) -> bool:
        """Whether `nbytes` fit into the spare memory, whatever the limit for mirrors is; if so, they count as taken."""
        fits = nbytes <= self._spare_bytes
        if fits:
            self.lent(nbytes)
            self._spare_bytes -= nbytes
        return fits

    def lent(self, nbytes: int) -> None:
        self._lent_bytes += nbytes

    def over(self, memory: DeviceMemory | None) -> None:
        """The copy has ended, and has given back what it took. Copy thread; the next save comes after it."""
        self._is_crowded = memory is not None and memory.retries > self._retries

    def refused(self) -> None:
        """The device had no memory for it after all."""
        self._is_short = self._limit_bytes is None
        self._spare_bytes = 0
        self._say(False, 0, 0)

    def _measure(self, memory: DeviceMemory) -> None:
        self._saves += 1
        # Where torch has given nothing back, it holds what was lent: that is not training's.
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

    def _say(self, fits: bool, nbytes: int, room: int) -> bool:
        """Once, and again when it is otherwise."""
        if fits is not self._said:
            self._said = fits
            if fits:
                _log.info(
                    "checkpoints are copied on the device first, %d bytes: updates wait for nothing", nbytes
                )
            else:
                _log.info(
                    "no room on the device for a copy of %d bytes, there are %d to spare: updates wait for the copy to "
                    "the host",
                    nbytes,
                    room,
                )
        return fits


# Fewer sections cost less; with more, what follows on a copy begins earlier.
_SECTION_BYTES = 32 << 20
_SECTIONS_MAX = 64
_by_offset = attrgetter("offset")


class Mirror:
    """A copy on the device of one save. Its memory is given back as it is brought to the host."""

    def __init__(self, now: Sequence[Batch], behind: Sequence[Batch], slice_: SliceSources) -> None:
        self.made_of = now, behind
        self.is_whole = True  # it has all that is copied, and not only what anything may change
        self.batches = _sections([*now, *behind], slice_)
        runs = [runs_of(batch.pieces, slice_) for batch in self.batches]
        self._runs, self._parcels = runs, [*map(Parcel, runs)]
        self._sizes = [*map(packed_bytes, runs)]
        self.nbytes = sum(self._sizes)
        self._memory: list[torch.Tensor] = []
        self._packing: Packing | None = None

    def make(self, stream: DeviceStream, slice_: SliceSources) -> None:
        """Queue the copy, on the current stream. OutOfMemoryError: there is no memory for it after all."""
        if len(self._memory) == len(self._sizes):
            stream.fill(self._memory)
        else:
            self._memory = []
            for nbytes in self._sizes:
                self._memory.append(stream.on_device(nbytes))
        if self._packing is not None:
            self._packing.queue(stream)
            return
        with torch.inference_mode(mode=False):  # what is made in it could not be written outside of it
            live = LiveTensors(stream, slice_.sources, self.batches)
            packing = Packing()
            for runs, memory in zip(self._runs, self._memory, strict=True):
                packing.add(runs, memory, live, slice_.sources)
        self._packing = packing if live.lasts else None
        packing.queue(stream)

    def sections(self) -> Iterator[Crossing]:
        yield from map(Crossing, self.batches, self._parcels, self._memory)

    def drop(self) -> None:
        """Give back what has not been given back."""
        for memory in self._memory:
            empty(memory)


def _sections(of: Sequence[Batch], slice_: SliceSources) -> list[Batch]:
    """All pieces in the order of the area, cut where a section is large enough."""
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
_KEPT_MAX = 8  # of what is ready to be queued again; each area may leave out other tensors


class DeviceCopy:
    """Copies from one device into staging areas. `mirror` and `capture` belong to the training thread, and take all the
    memory there is to take; `bring` and `copy` to the copy thread, `give_back` to either. They never meet: a save waits
    for the copy before. When `bring` or `copy` returns, torch has the memory back.
    """

    def __init__(self, stream: DeviceStream, room: MirrorRoom) -> None:
        self._stream, self._room = stream, room
        self._mirrors: deque[Mirror] = deque(maxlen=_KEPT_MAX)
        self._captured: deque[LiveBatches] = deque(maxlen=_KEPT_MAX)
        self._behind: LiveBatches | None = None

    # -- in save() -----------------------------------------------------------------------------------------------

    def mirror(self, now: Sequence[Batch], behind: Sequence[Batch], slice_: SliceSources) -> Mirror | None:
        """Queue copies on the device, on the current stream, of all or at least of what anything may change.

        None: there is no room.
        """
        mirror = self._mirror(now, behind, slice_)
        is_whole = self._room.has(mirror.nbytes, self._stream.memory())
        if not is_whole:
            if not now:
                return None
            mirror = self._mirror(now, (), slice_)
            if not self._room.has_in_part(mirror.nbytes):
                return None
        mirror.is_whole = is_whole
        try:
            try:
                mirror.make(self._stream, slice_)
            finally:
                self._stream.go_on()  # whatever becomes of it, nobody has its memory before
        except torch.OutOfMemoryError as error:
            mirror.drop()
            self._room.refused()
            _log.warning("no memory on the device for a copy of %d bytes: %s", mirror.nbytes, error)
            return None
        except BaseException:
            mirror.drop()
            raise
        if is_whole:
            self._room.lent(mirror.nbytes)
        return mirror

    def capture(
        self, now: Sequence[Batch], slice_: SliceSources, area: torch.Tensor, *, behind: Sequence[Batch] = ()
    ) -> Callable[[], None]:
        """Queue copies of `now` into `area` on the current stream; work that is queued there later runs after them.

        `behind`: The batches that `copy` will copy; memory for their parcels is reserved now. The function that is
        returned waits until the copies have landed. At most one capture is in flight.
        """
        if behind:
            live = self._live_behind(behind, slice_)
            if live.nbytes and self._room.has_beside(live.nbytes):
                live.take(self._stream.on_device, self._stream.fill)
        live = self._live_now(now, slice_)
        # One slot is enough: the current stream packs a batch when the one before has crossed.
        live.take(self._stream.on_current_stream, refill_all)
        crossings: list[Crossing] = []
        try:
            with self._drained_on_error(crossings, area):
                for number in range(len(now)):
                    crossing = live.crossing(number)
                    self._begin(crossing, crossings, area)
                    live.queue(number, crossing, area, self._stream, slice_.sources)
                event = self._stream.record()
        finally:
            live.give_back()

        def land() -> None:
            event.synchronize()
            for crossing in crossings:
                if crossing.parcel is not None:
                    crossing.parcel.put_back(area)

        return land

    # -- in the copy thread --------------------------------------------------------------------------------------

    def bring(
        self,
        mirror: Mirror,
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy a mirror to the host and free it, cancelled or not; arguments as of `CopyEngine.copy`."""

        def queue(_number: int, crossing: Crossing) -> None:
            assert crossing.parcel is not None
            assert crossing.memory is not None
            crossing.parcel.send(crossing.memory, area)

        def landed(crossing: Crossing) -> None:
            assert crossing.memory is not None
            empty(crossing.memory)
            arrived(crossing.batch)

        try:
            with self._stream.beside(None):
                self._cross(mirror.sections(), queue, area, cancelled, lambda _: None, landed)
        finally:
            mirror.drop()
            self._room.over(self._stream.memory())

    def copy(
        self,
        behind: Sequence[Batch],
        slice_: SliceSources,
        area: torch.Tensor,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy live batches; arguments as of `CopyEngine.copy`."""
        live = self._live_behind(behind, slice_)

        def queue(number: int, crossing: Crossing) -> None:
            live.queue(number, crossing, area, self._stream, slice_.sources)

        try:
            with self._stream.beside(after):
                work = map(live.crossing, range(len(behind)))
                self._cross(work, queue, area, cancelled, read, lambda crossing: arrived(crossing.batch))
        finally:
            self.give_back()
            self._room.over(self._stream.memory())

    def give_back(self) -> None:
        """No copy is under way: what was taken of the device for one goes back."""
        if self._behind is not None:
            self._behind.give_back()

    def _cross(
        self,
        work: Iterable[Crossing],
        queue: Callable[[int, Crossing], None],
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        landed: Callable[[Crossing], None],
    ) -> None:
        pending: deque[Crossing] = deque()

        def land() -> None:
            crossing = pending[0]
            assert crossing.event is not None
            crossing.event.synchronize()
            read(crossing.batch)
            if crossing.parcel is not None:
                crossing.parcel.put_back(area)
            pending.popleft()
            landed(crossing)

        with self._drained_on_error(pending, area):
            for number, crossing in enumerate(work):
                if cancelled():
                    break
                if len(pending) == _AHEAD:
                    land()  # and so the slot of the same number is free
                self._begin(crossing, pending, area)
                queue(number, crossing)
                crossing.event = self._stream.record()
            while pending:  # also of a cancelled copy: when this returns, nothing live is read
                land()

    @staticmethod
    def _begin(crossing: Crossing, pending: list[Crossing] | deque[Crossing], area: torch.Tensor) -> None:
        if crossing.parcel is not None:
            crossing.parcel.put_aside(area)
        pending.append(crossing)

    @contextlib.contextmanager
    def _drained_on_error(self, pending: Iterable[Crossing], area: torch.Tensor) -> Iterator[None]:
        """After an error nothing that was queued writes to the host any more, and the holes are as they were: the area
        is going to be used again.
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a device that has failed writes nothing
                self._stream.record().synchronize()
            for crossing in pending:
                if crossing.parcel is not None:
                    crossing.parcel.put_back(area)
            raise

    # -- what is ready to be queued again ------------------------------------------------------------------------

    def _mirror(self, now: Sequence[Batch], behind: Sequence[Batch], slice_: SliceSources) -> Mirror:
        for known in self._mirrors:
            if known.made_of[0] is now and known.made_of[1] is behind:
                return known
        made = Mirror(now, behind, slice_)
        self._mirrors.append(made)
        return made

    def _live_behind(self, behind: Sequence[Batch], slice_: SliceSources) -> LiveBatches:
        if self._behind is None or self._behind.batches is not behind:
            self._behind = LiveBatches(behind, slice_, _AHEAD)
        return self._behind

    def _live_now(self, now: Sequence[Batch], slice_: SliceSources) -> LiveBatches:
        for known in self._captured:
            if known.batches is now:
                return known
        made = LiveBatches(now, slice_, 1)
        self._captured.append(made)
        return made
