"""Copies from a device into staging areas: queued in the training's own order, or on a stream beside the training.

    mirror   save(): live tensors ─► mirror, on the current stream │ own stream: mirror ─► area, section by section
    capture  save(): live tensors ─► area, on the current stream   │ what anything may change, where there is no mirror
    copy     behind the gate: live tensors ─► area, on the own stream

With a mirror of all nothing live is read after `save()`: the device itself puts whatever comes later, be it an update,
the replay of a graph or another state that is loaded, behind the copy of its own memory. So no gate is shut, and
nothing can be torn (docs/design/007-device-mirror.md). Without room for one, there may be one of what anything
may change, so that none of that crosses on the training's stream. The two others are strategy C of LightCheck (ICCD
2023). Strategy D, straight into a tier, is each of them with a slot for an area.

All of them pack small tensors by one launch and send parcels (parcel.py). Where there is no memory for a parcel,
tensors cross one by one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from trainer_side.save.copy_plan import Batch, SliceSources
from trainer_side.save.crossing import Crossing, LiveBatches
from trainer_side.save.device_lane import DeviceLane, empty, refill_all
from trainer_side.save.mirror import Mirror
from trainer_side.save.mirror_room import MirrorRoom
from trainer_side.state.accelerator import StreamEvent

_log = logging.getLogger("holdfast.trainer")

_AHEAD = 4  # so many parcels are queued: the device is never idle between two
_KEPT_MAX = 8  # of what is ready to be queued again; each area may leave out other tensors


class DeviceCopy:
    """Copies from one device into staging areas. `mirror` and `capture` belong to the training thread, and take all the
    memory there is to take; `bring` and `copy` to the copy thread, `give_back` to either. They never meet: a save waits
    for the copy before. When `bring` or `copy` returns, torch has the memory back.

    Args:
        lane: The device.
        room: Says whether there may be a mirror.
    """

    def __init__(self, lane: DeviceLane, room: MirrorRoom) -> None:
        self._lane, self._room = lane, room
        self._mirrors: deque[Mirror] = deque(maxlen=_KEPT_MAX)
        self._captured: deque[LiveBatches] = deque(maxlen=_KEPT_MAX)
        self._behind: LiveBatches | None = None

    # -- in save() -----------------------------------------------------------------------------------------------

    def mirror(self, now: Sequence[Batch], behind: Sequence[Batch], slice_: SliceSources) -> Mirror | None:
        """Queue copies on the device, on the current stream, of all or at least of what anything may change.

        Args:
            now: That.
            behind: The rest.
            slice_: What they are of.

        Returns:
            None: there is no room.
        """
        mirror = self._mirror(now, behind, slice_)
        is_whole = self._room.has(mirror.nbytes, self._lane.memory())
        if not is_whole:
            if not now:
                return None
            mirror = self._mirror(now, (), slice_)
            if not self._room.has_in_part(mirror.nbytes):
                return None
        mirror.is_whole = is_whole
        try:
            try:
                mirror.make(self._lane, slice_)
            finally:
                self._lane.go_on()  # whatever becomes of it, nobody has its memory before
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
        self,
        now: Sequence[Batch],
        slice_: SliceSources,
        area: torch.Tensor,
        *,
        behind: Sequence[Batch] = (),
    ) -> Callable[[], None]:
        """Queue copies of `now` into `area` on the current stream: what is queued on it later comes after them.

        Args:
            now: What is taken now.
            slice_: What it is of.
            area: A staging area's memory.
            behind: What `copy` is going to copy: memory for that is taken now, too.

        Returns:
            Waits until they are there. At most one capture is under way.
        """
        if behind:
            live = self._live_behind(behind, slice_)
            if live.nbytes and self._room.has_beside(live.nbytes):
                live.take(self._lane.on_device, self._lane.fill)
        live = self._live_now(now, slice_)
        # One slot is enough: the current stream packs a batch when the one before has crossed.
        live.take(self._lane.on_current_stream, refill_all)
        crossings: list[Crossing] = []
        try:
            with self._drained_on_error(crossings, area):
                for number in range(len(now)):
                    crossing = live.crossing(number)
                    self._begin(crossing, crossings, area)
                    live.queue(number, crossing, area, self._lane, slice_.sources)
                event = self._lane.record()
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
        """Copy a mirror to the host; arguments as of `CopyEngine.copy`. What a cancelled one has left is given back."""

        def queue(_number: int, crossing: Crossing) -> None:
            assert crossing.parcel is not None
            assert crossing.memory is not None
            crossing.parcel.send(crossing.memory, area)

        def landed(crossing: Crossing) -> None:
            assert crossing.memory is not None
            empty(crossing.memory)
            arrived(crossing.batch)

        try:
            with self._lane.beside(None):
                self._cross(mirror.sections(), queue, area, cancelled, lambda _: None, landed)
        finally:
            mirror.drop()
            self._room.over(self._lane.memory())

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
            live.queue(number, crossing, area, self._lane, slice_.sources)

        try:
            with self._lane.beside(after):
                work = map(live.crossing, range(len(behind)))
                self._cross(work, queue, area, cancelled, read, lambda crossing: arrived(crossing.batch))
        finally:
            self.give_back()
            self._room.over(self._lane.memory())

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
                crossing.event = self._lane.record()
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
                self._lane.record().synchronize()
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
