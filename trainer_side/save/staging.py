"""A staging area: this rank's bytes of one checkpoint, frame by frame, on their way from the tensors to the wire.

    copy_now    training thread, in `save()`: what anything may change: data.pkl, buffers, `PerRank` values;
                with room on the device all that is there
    copy_gated  copy thread: what is on its way from the device; behind the gate: what only the optimizer changes
    is_ready    the sender: a frame may go as soon as all its pieces are there

Allocated and touched once per layout: the first touch of fresh pages costs far more than the copy itself. Literals are
laid down once, too. Each frame begins on a page, and is padded with zeros to the next one: so O_DIRECT takes it. Where
each piece goes is in copy_plan.py; bytes on a device are copied by device_copy.py.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.faultpoint import Point, reach
from holdfast.image.slices import frames_of
from trainer_side.save.copy_plan import Batch, CopyPiece, Route, SlicePlan, SliceSources, batches
from trainer_side.save.device_copy import DeviceCopy, Mirror, MirrorRoom
from trainer_side.save.device_dedup import DeviceDedup, Steadiness
from trainer_side.save.device_stream import stream_of
from trainer_side.save.host_memory import in_slot, locked_buffer
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.skeleton import Skeleton
from trainer_side.state.survey import Sources
from trainer_side.tiers.first_touch import huge_buffer

_SPARED_SETS_MAX = 8  # each area may leave out other tensors
# (to address, from address, bytes), as ctypes.memmove; without the GIL.
Move = Callable[[int, int, int], object]


class NowBatches:
    """The batches of what `save()` takes from tensors, kept for all areas of one slice. Training thread."""

    def __init__(self, plan: SlicePlan) -> None:
        self.plan = plan
        self._entries = sorted({piece.entry for piece in plan.now})
        # All that a batch depends on, beside the plan. It holds addresses, never memory.
        self._places: list[tuple[int, int, Any] | None] = []
        self._found: dict[frozenset[int], tuple[tuple[Batch, ...], tuple[Batch, ...]]] = {}

    def of(
        self, sources: Sources, contents: Collection[int], spared: frozenset[int]
    ) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
        """In host memory, and on a device; the same objects as long as nothing has moved.

        The bytes of entries in `contents` are made, and entries in `spared` are not copied.
        """
        places = [
            None
            if source is None or entry in contents
            else (source.data_ptr, source.start_bytes, source.device)
            for entry, source in zip(self._entries, map(sources.__getitem__, self._entries), strict=True)
        ]
        if places != self._places:
            self._places = places
            self._found.clear()
        if spared not in self._found:
            if len(self._found) == _SPARED_SETS_MAX:
                self._found.clear()
            host: list[CopyPiece] = []
            device: list[CopyPiece] = []
            place_of = dict(zip(self._entries, places, strict=True))
            for piece in self.plan.now:
                place = place_of[piece.entry]
                if place is not None and piece.entry not in spared:
                    (host if place[2].type == "cpu" else device).append(piece)
            self._found[spared] = batches(host, sources), batches(device, sources)
        return self._found[spared]


class CopyEngine:
    """Does the copies of one rank, into any of its areas. Training thread, except `copy`; `save()` waits for the copy
    before, so they never meet.

    A mirror may take `device_bytes_max` of a device; 0: no mirror; None: as much as is spare.
    """

    def __init__(self, *, device_bytes_max: int | None = None) -> None:
        self.seen: dict[tuple[str, int, int], Steadiness] = {}  # by `DeviceDedup`; all areas share it
        self._device_bytes_max = device_bytes_max
        self._on_device: DeviceCopy | None = None
        self._now: NowBatches | None = None

    def now_batches(self, plan: SlicePlan) -> NowBatches:
        """The batches that `save()` copies itself; all areas of a slice share them."""
        if self._now is None or self._now.plan is not plan:
            self._now = NowBatches(plan)
        return self._now

    @staticmethod
    def copy_host(batch: Batch, area: torch.Tensor, move: Move) -> None:
        """Copy one batch of tensors in host memory. Any thread."""
        # memmove, not Tensor.copy_: it gives the GIL back and does not call up torch's thread pool. And `map`, so that
        # many small pieces cost little more than their bytes.
        places = map(area.data_ptr().__add__, batch.offsets)
        deque(map(move, places, batch.addresses, batch.sizes), maxlen=0)

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
        move: Move,
    ) -> None:
        """Copy all batches of `route` into `area`. When it returns nothing live is read any more. Copy thread.

        The host's batches are copied by `move`, those of a device by `DeviceCopy`, after `after`, which was recorded on
        the compute stream when the state was right. `cancelled` is asked between batches; once it says True, the
        remaining ones are skipped. `read` is called with each batch whose live tensors are no longer read, `arrived`
        with each whose bytes are in the area; on a device that is much later.
        """
        # The host's first: they are counters of a step and the like, if there is a device at all.
        for batch in route.host:
            if cancelled():
                return
            self.copy_host(batch, area, move)
            read(batch)
            arrived(batch)
        if route.device:
            self.on_device(slice_).copy(route.device, slice_, area, after, cancelled, read, arrived)

    def give_back(self) -> None:
        """No copy is under way, and none follows on the last `capture`: its memory on a device goes back."""
        if self._on_device is not None:
            self._on_device.give_back()

    def on_device(self, slice_: SliceSources) -> DeviceCopy:
        """The copies from the device on which some of the slice lies."""
        if self._on_device is None:
            device = next(
                source.device
                for source in slice_.sources
                if source is not None and source.device.type != "cpu"
            )
            self._on_device = DeviceCopy(stream_of(device), MirrorRoom(self._device_bytes_max))
        return self._on_device


# Counters of steps and the like beside tensors on a device: so few bytes are copied in `save()`, without any gate.
_HOST_BYTES_AT_ONCE = 1 << 20


class Staging:
    """One staging area of one rank for one layout. One checkpoint at a time is in it.

    `copy_now` belongs to the training thread, `copy_gated` to the copy thread, `view` and `is_ready` to any. `engine`:
    All areas of a rank share one. `pinned`: Page-locked memory, for copies from a CUDA device that do not stop the CPU.
    `slot`: Memory of a local tier that is to be the area itself (strategy D); None: it takes its own. `memory`: The
    same, or any other memory, prepared already. `move`: How bytes are best put into that; as `ctypes.memmove`.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        plan: SlicePlan,
        engine: CopyEngine,
        *,
        pinned: bool,
        slot: memoryview | None = None,
        memory: torch.Tensor | None = None,
        move: Move = ctypes.memmove,
    ) -> None:
        self._plan, self._engine, self._move = plan, engine, move
        nbytes = max(1, plan.area_bytes)
        if memory is None and slot is not None:
            memory = in_slot(slot, pinned=pinned)
        elif memory is None:
            memory = locked_buffer(nbytes) if pinned else huge_buffer(nbytes)
        assert memory.numel() >= plan.area_bytes
        self.memory = memory
        self._view = self.memory.numpy().data
        self._frame_at = {offset: frame for frame, offset in enumerate(plan.frames)}
        # By frame; nothing is ready before the first checkpoint.
        self._copies_left = [1] * len(plan.frames)
        # One more than there are: no frame is given away before all of what is captured at once is here.
        self._copies_at_first = [1] * len(plan.frames)
        for piece in plan.gated:
            self._copies_at_first[piece.frame] += 1
        self._now_batches = engine.now_batches(plan)
        # Only bytes that would cross from a device are worth a comparison.
        self._dedup = DeviceDedup(plan.now, skeleton.layout, engine.seen) if pinned else None
        self._landing: Callable[[], None] | None = None
        self._mirror: Mirror | None = None
        self._took_host = False  # beside the mirror, all that is in host memory
        self._told: Callable[[], None] = lambda: None
        for frame in frames_of(skeleton.layout, skeleton.rank):
            offset = frame.offset
            for extent in frame.extents:
                skeleton.write_literals(extent, self._view[offset : offset + extent.nbytes])
                offset += extent.nbytes

    @property
    def nbytes(self) -> int:
        """All bytes that this rank sends for one checkpoint."""
        return self._plan.nbytes

    @property
    def area_bytes(self) -> int:
        return self._plan.area_bytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Part of the area; it means something once its frame is ready."""
        return self._view[offset : offset + nbytes]

    def is_ready(self, offset: int) -> bool:
        """Whether the frame that begins at `offset` holds the checkpoint that is now in the area."""
        return self._copies_left[self._frame_at[offset]] == 0

    def tell(self, ready: Callable[[], None]) -> None:
        """Call `ready`, in the copy thread, whenever frames of the checkpoint that follows have become ready."""
        self._told = ready

    def copy_now(
        self,
        sources: Sources,
        contents: Mapping[int, bytes | memoryview],
        route: Route | None = None,
        versions: Mapping[int, int] | None = None,
    ) -> bool:
        """Copy the bytes that must be captured before `save()` returns. Training thread; the area must be released.

        Device tensors are captured in the order of the current stream and arrive later: updates that are queued after
        this call run after the capture, and this call does not wait. `contents`: Entries whose bytes are made, not
        copied from a tensor (data.pkl, `PerRank` values). `route`: The route through the gated tensors, if some of them
        are on a device. `versions`: As `counted` gave them; None: everything is copied. Returns whether every device
        tensor is captured, so that `copy_gated` reads none and needs no gate for it.
        """
        self._copies_left = [*self._copies_at_first]
        self._took_host = False
        self._mirror = self._landing = None
        self.fill(contents)
        spared: frozenset[int] = frozenset()
        if self._dedup is not None:
            spared = self._dedup.look(sources, versions or {})
        host, device = self._now_batches.of(sources, contents, spared)
        slice_ = SliceSources(self._plan, sources)
        for batch in host:
            self._engine.copy_host(batch, self.memory, self._move)
        behind = () if route is None else route.device
        if route is not None and (device or behind):
            self._mirror = self._engine.on_device(slice_).mirror(device, behind, slice_)
        if self._mirror is not None:
            for batch in device:
                self._count(batch, -1)
        if self._mirror is None or not self._mirror.is_whole:
            now = device if self._mirror is None else ()
            if now or behind:
                self._landing = self._engine.on_device(slice_).capture(
                    now, slice_, self.memory, behind=behind
                )
        elif route is not None and sum(batch.nbytes for batch in route.host) <= _HOST_BYTES_AT_ONCE:
            self._took_host = True
            for batch in route.host:
                self._engine.copy_host(batch, self.memory, self._move)
                self._count(batch)
        return self._mirror is not None and self._mirror.is_whole

    def counted(self, tensors: Sequence[torch.Tensor], tensor_entries: Sequence[int]) -> Mapping[int, int]:
        """The changes that torch has counted, of what is not copied again while it stays as it is: for `copy_now`."""
        return {} if self._dedup is None else self._dedup.versions(tensors, tensor_entries)

    def drop(self) -> None:
        """No `copy_gated` follows on `copy_now`, or it has failed. Waits for what is on its way into the area, which is
        going to be used again.
        """
        if self._mirror is not None:
            self._mirror.drop()
            self._mirror = None
        if self._dedup is not None:
            self._dedup.forget()
        if self._landing is not None:
            self._landing()
            self._landing = None
        self._engine.give_back()

    def live(self, route: Route) -> Route:
        """The part of the route that still has to be read from live tensors. Between `copy_now` and `copy_gated`."""
        if self._mirror is None or not self._mirror.is_whole:
            return route
        return Route((), (), frozenset()) if self._took_host else route.on_host()

    def fill(self, contents: Mapping[int, bytes | memoryview]) -> None:
        """Lay down entries whose bytes are made: in `copy_now`, or later, before `copy_gated` gives frames away."""
        for piece in self._plan.now:
            content = contents.get(piece.entry)
            if content is not None:
                self._view[piece.offset : piece.offset + piece.nbytes] = memoryview(content)[
                    piece.entry_offset : piece.entry_offset + piece.nbytes
                ]

    def copy_gated(
        self,
        sources: Sources,
        route: Route,
        *,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        passed: Callable[[Collection[int]], None],
        copied: Callable[[], None],
        was_read: Callable[[Batch], None] = lambda _: None,
        was_copied: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        """Copy the gated tensors in the order of the route, and bring a mirror to the host. Copy thread only.

        `after`: Recorded on the compute stream at `save()`; device tensors are copied after it. `cancelled`: Asked
        between batches; once True, the remaining ones are skipped. `passed`: Called with the addresses of storages that
        are no longer read. `copied`: Called when no tensor is read any more, before the last frame goes to the sender.
        `was_read`: Called with each batch that was read, before its storages are passed. `was_copied`: Called with each
        batch whose bytes are in the area, before its frames may go. Both may cancel.

        Outdated: a tensor that `copy_now` left out has changed without torch counting it. No frame went to the sender.
        """
        route = self.live(route)
        mirror = self._mirror
        unread = len(route.host) + len(route.device)

        def read(batch: Batch) -> None:
            nonlocal unread
            reach(Point.TENSOR_COPIED, len(batch.pieces))
            was_read(batch)
            passed(batch.read)
            unread -= 1
            if not unread:
                copied()

        def arrived(batch: Batch) -> None:
            was_copied(batch)
            # An update that did not wait comes after `cancelled`: what is here before is of the checkpoint.
            if not cancelled():
                self._count(batch)

        if mirror is None:
            self._land()
        slice_ = SliceSources(self._plan, sources)
        self._engine.copy(route, slice_, self.memory, after, cancelled, read, arrived, move=self._move)
        if unread or not (route.host or route.device):
            copied()
        if mirror is not None:
            self._bring(mirror, slice_, cancelled)
        self._mirror = None
        if not self._plan.gated and not cancelled():
            self._copies_left = [0] * len(self._copies_left)
            self._told()

    def _bring(self, mirror: Mirror, slice_: SliceSources, cancelled: Callable[[], bool]) -> None:
        has_landed = False

        def here(batch: Batch) -> None:
            nonlocal has_landed
            reach(Point.TENSOR_COPIED, len(batch.pieces))
            if not has_landed:
                self._land()  # hashes of what is not in the mirror were queued before it
                has_landed = True
            if not cancelled():  # nothing could change it on the way
                self._count(batch)

        self._engine.on_device(slice_).bring(mirror, self.memory, cancelled, here)

    def _count(self, batch: Batch, here: int = 1) -> None:
        for frame, count in batch.frames.items():
            self._copies_left[frame] -= here * count
        if not all(map(self._copies_left.__getitem__, batch.frames)):
            self._told()

    def _land(self) -> None:
        """Wait until the capture of `copy_now` has landed; from then on frames may be complete."""
        if self._landing is not None:
            self._landing()
            self._landing = None
        if self._dedup is not None:
            self._dedup.settle()
        if self._plan.gated:
            for frame in range(len(self._copies_left)):
                self._copies_left[frame] -= 1
            self._told()
