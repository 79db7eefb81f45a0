"""Copies bytes from tensors into a staging area: from host memory by memmove, from a device through its own stream.

    CopyEngine ─┬─ host batches:   memmove, piece by piece; no torch call, no thread pool
                └─ device batches: `DeviceCopy` (device_copy.py), made when the first tensor is on a device;
                                   at `save()` in a mirror, where there is room, and else behind the gate

`copy` goes through a route and tells two things of each batch, in this order: `read`, nothing of it is read from the
live tensors any more; `arrived`, its bytes are in the staging area. On the host they come together; on a device the
first may be much earlier.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import torch

from trainer_side.save.copy_plan import Batch, NowBatches, Route, SlicePlan, SliceSources
from trainer_side.save.device_copy import DeviceCopy
from trainer_side.save.device_lane import lane_of
from trainer_side.save.mirror import Mirror
from trainer_side.save.mirror_room import MirrorRoom
from trainer_side.save.unchanged import Steadiness
from trainer_side.state.accelerator import StreamEvent

Move = Callable[
    [int, int, int], object
]  # (to address, from address, bytes), as ctypes.memmove; without the GIL


class CopyEngine:
    """Does the copies of one rank, into any of its areas. `mirror` and `capture` belong to the training thread, `copy`
    and `bring` to the copy thread; `save()` waits for the copy before, so they never meet.

    Args:
        device_bytes_max: Device memory that a mirror may take; 0: none is made; None: what is to spare.

    Attributes:
        seen: What its areas know of tensors that do not change.
    """

    def __init__(self, *, device_bytes_max: int | None = None) -> None:
        self.seen: dict[tuple[str, int, int], Steadiness] = {}
        self._device_bytes_max = device_bytes_max
        self._on_device: DeviceCopy | None = None
        self._now: NowBatches | None = None

    def now_batches(self, plan: SlicePlan) -> NowBatches:
        """What `save()` takes of a slice; the areas of the slice share it."""
        if self._now is None or self._now.plan is not plan:
            self._now = NowBatches(plan)
        return self._now

    @staticmethod
    def copy_host(batch: Batch, area: torch.Tensor, move: Move = ctypes.memmove) -> None:
        """Copy one batch of tensors in host memory. Any thread."""
        # memmove, not Tensor.copy_: it gives the GIL back and does not call up torch's thread pool. And `map`, so that
        # many small pieces cost little more than their bytes.
        places = map(area.data_ptr().__add__, batch.offsets)
        deque(map(move, places, batch.addresses, batch.sizes), maxlen=0)

    def mirror(self, now: Sequence[Batch], behind: Sequence[Batch], slice_: SliceSources) -> Mirror | None:
        """Take batches on a device as they are at this point of the current stream: all, or else those of `now`.

        Returns:
            None: there is no room there.
        """
        return self._device(slice_).mirror(now, behind, slice_) if now or behind else None

    def capture(
        self,
        batches: Sequence[Batch],
        slice_: SliceSources,
        area: torch.Tensor,
        *,
        behind: Sequence[Batch] = (),
    ) -> Callable[[], None] | None:
        """The same straight into `area`, where there is no mirror.

        Args:
            batches: What is taken.
            slice_: What it is of.
            area: A staging area's memory.
            behind: What is going to be copied behind the gate: what that takes of memory is taken now.

        Returns:
            Waits until they are in `area`; for the copy thread. None: there is nothing to wait for.
        """
        if not batches and not behind:
            return None
        return self._device(slice_).capture(batches, slice_, area, behind=behind)

    def bring(
        self,
        mirror: Mirror,
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy all of a mirror into `area`; arguments as of `copy`."""
        assert self._on_device is not None, "it has made the mirror"
        self._on_device.bring(mirror, area, cancelled, arrived)

    def copy(
        self,
        route: Route,
        slice_: SliceSources,
        area: torch.Tensor,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
        *,
        move: Move = ctypes.memmove,
    ) -> None:
        """Copy all batches of `route` into `area`; see the module. When it returns nothing is read any more.

        Args:
            route: What is copied.
            slice_: What it is of.
            area: A staging area's memory.
            after: Recorded on the compute stream when the state was right.
            cancelled: Asked between batches; when it says True the rest is left out.
            read: Told each batch that is read.
            arrived: Told each batch that has arrived.
            move: Copies what is in host memory.
        """
        # The host's first: they are counters of a step and the like, if there is a device at all.
        for batch in route.host:
            if cancelled():
                return
            self.copy_host(batch, area, move)
            read(batch)
            arrived(batch)
        if route.device:
            self._device(slice_).copy(route.device, slice_, area, after, cancelled, read, arrived)

    def give_back(self) -> None:
        """No copy is under way, and none follows on the last `capture`: its memory on a device goes back."""
        if self._on_device is not None:
            self._on_device.give_back()

    def _device(self, slice_: SliceSources) -> DeviceCopy:
        if self._on_device is None:
            device = next(
                source.device
                for source in slice_.sources
                if source is not None and source.device.type != "cpu"
            )
            self._on_device = DeviceCopy(lane_of(device), MirrorRoom(self._device_bytes_max))
        return self._on_device
