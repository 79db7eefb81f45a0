"""A staging area: this rank's bytes of one checkpoint, frame by frame, on their way from the tensors to the wire.

    copy_now    training thread, in `save()`: what anything may change: data.pkl, buffers, `PerRank` values;
                with room on the device all that is there
    copy_gated  copy thread: what is on its way from the device; behind the gate: what only the optimizer changes
    is_ready    the sender: a frame may go as soon as all its pieces are there

Allocated and touched once per layout: the first touch of fresh pages costs far more than the copy itself. Literals are
laid down once, too. Each frame begins on a page, and is padded with zeros to the next one: so O_DIRECT takes it. Where
each piece goes is in `trainer_side/save/copy_plan.py`; how it gets there in `trainer_side/save/copy_engine.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from holdfast.faultpoint import Point, reach
from holdfast.image.slices import frames_of
from trainer_side.save.copy_engine import CopyEngine, Move
from trainer_side.save.copy_plan import Batch, Route, SlicePlan, SliceSources
from trainer_side.save.host_memory import huge_buffer, in_slot, locked_buffer
from trainer_side.save.mirror import Mirror
from trainer_side.save.unchanged import Unchanged
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.skeleton import Skeleton
from trainer_side.state.survey import StorageSource

# Counters of steps and the like beside tensors on a device: so few bytes are copied in `save()`, without any gate.
_HOST_BYTES_AT_ONCE = 1 << 20


class Staging:
    """One staging area of one rank for one layout. One checkpoint at a time is in it.

    `copy_now` belongs to the training thread, `copy_gated` to the copy thread, `view` and `is_ready` to any.

    Args:
        skeleton: The skeleton whose layout this is.
        plan: This rank's slice of it.
        engine: Does the copies; all areas of a rank share one.
        pinned: Page-locked memory, for copies from a CUDA device that do not stop the CPU.
        slot: Memory of a local tier that is to be the area itself (strategy D); None: it takes its own.
        memory: The same, or any other memory, prepared already.
        move: How bytes are best put into that; as `ctypes.memmove`.
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
        # Per frame; nothing is ready before the first checkpoint.
        self._copies_left = [1] * len(plan.frames)
        # One more than there are: no frame is given away before all of what is captured at once is here.
        self._copies_at_first = [1] * len(plan.frames)
        for piece in plan.gated:
            self._copies_at_first[piece.frame] += 1
        self._now_batches = engine.now_batches(plan)
        self._unchanged = Unchanged(plan.now, skeleton.layout, engine.seen)
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
        sources: Sequence[StorageSource | None],
        contents: Mapping[int, bytes | memoryview],
        route: Route | None = None,
        versions: Mapping[int, int] | None = None,
    ) -> bool:
        """Take what must be captured before `save()` returns. Training thread; the area must be released.

        What lies on a device is captured in the order of the current stream, and arrives later: no update that is
        queued after this call comes before it, and nothing is waited for here.

        Args:
            sources: Per entry its storage; None where `contents` has the bytes.
            contents: Entries whose bytes are made, not copied from a tensor (data.pkl, `PerRank` values).
            route: The way through what is gated, where some of it is on a device.
            versions: As `counted` gave them; without, all is copied.

        Returns:
            Whether all that is on a device is taken: `copy_gated` reads nothing there, and needs no gate for it.
        """
        self._copies_left = [*self._copies_at_first]
        self._took_host = False
        self._mirror = self._landing = None
        self.fill(contents)
        spared = self._unchanged.look(sources, versions or {})
        host, device = self._now_batches.of(sources, contents, spared)
        slice_ = SliceSources(self._plan, sources)
        for batch in host:
            self._engine.copy_host(batch, self.memory, self._move)
        behind = () if route is None else route.device
        if route is not None:
            self._mirror = self._engine.mirror(device, behind, slice_)
        if self._mirror is not None:
            for batch in device:
                self._count(batch, -1)
        if self._mirror is None or not self._mirror.is_whole:
            now = device if self._mirror is None else ()
            self._landing = self._engine.capture(now, slice_, self.memory, behind=behind)
        elif route is not None and sum(batch.nbytes for batch in route.host) <= _HOST_BYTES_AT_ONCE:
            self._took_host = True
            for batch in route.host:
                self._engine.copy_host(batch, self.memory, self._move)
                self._count(batch)
        return self._mirror is not None and self._mirror.is_whole

    def counted(self, tensors: Sequence[torch.Tensor], tensor_entries: Sequence[int]) -> Mapping[int, int]:
        """The changes that torch has counted, of what is not copied again while it stays as it is: for `copy_now`.

        Args:
            tensors: All of the state.
            tensor_entries: Of each, its entry.
        """
        return self._unchanged.versions(tensors, tensor_entries)

    def drop(self) -> None:
        """No `copy_gated` follows on `copy_now`, or it has failed. Waits for what is on its way into the area, which is
        going to be used again.
        """
        if self._mirror is not None:
            self._mirror.drop()
            self._mirror = None
        self._unchanged.forget()
        if self._landing is not None:
            self._landing()
            self._landing = None
        self._engine.give_back()

    def live(self, route: Route) -> Route:
        """What of the route is still to be read from live tensors. Between `copy_now` and `copy_gated`."""
        if self._mirror is None or not self._mirror.is_whole:
            return route
        return Route((), (), frozenset()) if self._took_host else route.on_host()

    def fill(self, contents: Mapping[int, bytes | memoryview]) -> None:
        """Lay down entries whose bytes are made. By `copy_now`, or after it and before `copy_gated` gives frames away.

        Args:
            contents: As of `copy_now`.
        """
        for piece in self._plan.now:
            content = contents.get(piece.entry)
            if content is not None:
                self._view[piece.offset : piece.offset + piece.nbytes] = memoryview(content)[
                    piece.entry_offset : piece.entry_offset + piece.nbytes
                ]

    def copy_gated(
        self,
        sources: Sequence[StorageSource | None],
        route: Route,
        *,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        passed: Callable[[Collection[int]], None],
        copied: Callable[[], None],
        was_read: Callable[[Batch], None] = lambda _: None,
        was_copied: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        """Copy what only the optimizer changes, in the order of the route, and bring what was taken. Copy thread only.

        Args:
            sources: Per entry its storage.
            route: The way through them.
            after: Recorded on the compute stream at `save()`; what lies on a device is copied after it.
            cancelled: Asked between batches; when it says True the rest is left out.
            passed: Told the addresses of the storages that are no longer read.
            copied: Called when nothing is read any more, before the last frame is given to the sender.
            was_read: Called with each batch that was read, before its storages are passed; it may cancel.
            was_copied: Called with each batch whose bytes are in the area, before its frames may go; it may cancel.

        Raises:
            Outdated: What `copy_now` has left out has changed, uncounted by torch. Nothing was given to the sender.
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

        def arrived(batch: Batch, *, look: Callable[[Batch], None] = was_copied) -> None:
            look(batch)
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
            self._bring(mirror, cancelled, arrived)
        self._mirror = None
        if not self._plan.gated and not cancelled():
            self._copies_left = [0] * len(self._copies_left)
            self._told()

    def _bring(self, mirror: Mirror, cancelled: Callable[[], bool], arrived: Callable[..., None]) -> None:
        has_landed = False

        def here(batch: Batch) -> None:
            nonlocal has_landed
            reach(Point.TENSOR_COPIED, len(batch.pieces))
            if not has_landed:
                self._land()  # hashes of what is not in the mirror were queued before it
                has_landed = True
            arrived(batch, look=lambda _: None)  # nothing could change it on the way

        self._engine.bring(mirror, self.memory, cancelled, here)

    def _count(self, batch: Batch, here: int = 1) -> None:
        for frame, count in batch.frames.items():
            self._copies_left[frame] -= here * count
        if not all(map(self._copies_left.__getitem__, batch.frames)):
            self._told()

    def _land(self) -> None:
        """What `copy_now` has captured is here, all of it: frames count from now on."""
        if self._landing is not None:
            self._landing()
            self._landing = None
        self._unchanged.settle()
        if self._plan.gated:
            for frame in range(len(self._copies_left)):
                self._copies_left[frame] -= 1
            self._told()
