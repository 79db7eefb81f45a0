"""The staging buffer: this rank's bytes of one checkpoint, back to back, on their way from the tensors to the wire.

    layout.sends(rank):   chunk 0: ─piece─ ─piece─   chunk 1: ─────piece─────   …
    staging buffer:       │ piece │ piece │ piece        │ …       (in that order, nothing between)
                          └ frame 0 ──────┘└ frame 1 ────┘

Allocated and touched once per layout: the first touch of fresh pages costs far more than the copy itself. Literals
are laid down once, too; each save then copies
    1. at once, in `save()`: what anything may change: data.pkl, buffers, `PerRank` values  (`copy_now`)
    2. behind the gate, in the copy thread: what only the optimizer changes                 (`copy_gated`)
and moves the watermark `ready_bytes`, up to which the sender may read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.layout import Layout
from trainer_side.skeleton import Skeleton, Source

__all__ = ["Staging"]


class _Copy(NamedTuple):
    """Copy `nbytes` of the entry's bytes, from `entry_offset` on, to `offset` of the staging buffer."""

    offset: int
    entry: int
    entry_offset: int
    nbytes: int


@dataclass(frozen=True)
class _Plan:
    now: tuple[_Copy, ...]
    gated: tuple[_Copy, ...]
    nbytes: int


class Staging:
    """One rank's staging buffer for one layout. One checkpoint at a time is in it.

    `copy_now` belongs to the training thread, `copy_gated` to the copy thread, `view` and `ready_bytes` to any.

    Args:
        skeleton: The skeleton whose layout this is.
        rank: This rank.
        gated: Per entry, whether it is copied behind the gate.
        pinned: Page-locked memory, for copies from a CUDA device that do not stop the CPU.
    """

    def __init__(self, skeleton: Skeleton, rank: int, gated: Sequence[bool], *, pinned: bool) -> None:
        self._plan = _plan(skeleton.layout, rank, gated)
        self._buffer = torch.empty(max(1, self._plan.nbytes), dtype=torch.uint8, pin_memory=pinned)
        self._buffer.zero_()
        self._memory = self._buffer.numpy().data
        self._address = self._buffer.data_ptr()
        self._ready_bytes = 0
        offset = 0
        for _, extents in skeleton.layout.sends(rank):
            for extent in extents:
                skeleton.write_literals(extent, self._memory[offset : offset + extent.nbytes])
                offset += extent.nbytes

    @property
    def nbytes(self) -> int:
        """All bytes that this rank sends for one checkpoint."""
        return self._plan.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Part of the buffer; only bytes below `ready_bytes` mean anything."""
        return self._memory[offset : offset + nbytes]

    def ready_bytes(self) -> int:
        """How many bytes from the front are those of the checkpoint now in the buffer."""
        return self._ready_bytes

    def copy_now(self, sources: Sequence[Source | None], contents: Mapping[int, bytes | memoryview]) -> None:
        """Take what must be captured before `save()` returns. Training thread; the buffer must be released.

        Args:
            sources: Per entry its storage; None where `contents` has the bytes.
            contents: Entries whose bytes are made, not copied from a tensor (data.pkl, `PerRank` values).
        """
        self._ready_bytes = 0
        synchronize = False
        for copy in self._plan.now:
            content = contents.get(copy.entry)
            source = sources[copy.entry]
            if content is not None:
                self._memory[copy.offset : copy.offset + copy.nbytes] = memoryview(content)[
                    copy.entry_offset : copy.entry_offset + copy.nbytes
                ]
            elif source is not None:
                synchronize |= self._copy(copy, source)
        if synchronize:
            torch.cuda.current_stream().synchronize()
        self._ready_bytes = self._plan.gated[0].offset if self._plan.gated else 0

    def copy_gated(
        self,
        sources: Sequence[Source | None],
        *,
        after: torch.cuda.Event | None,
        cancelled: Callable[[], bool],
        copied: Callable[[], None],
    ) -> None:
        """Copy what only the optimizer changes, in image order, moving the watermark. Copy thread only.

        Args:
            sources: Per entry its storage.
            after: Recorded on the compute stream at `save()`; the copy waits for it on a stream of its own.
            cancelled: Asked before each copy; when it says True the rest is left out.
            copied: Called when the tensors are no longer read, before the last byte is given to the sender.
        """
        gated = self._plan.gated
        ends = [copy.offset for copy in gated[1:]] + [self._plan.nbytes]
        if after is None:
            for copy, end in zip(gated, ends, strict=False):
                if cancelled():
                    break
                source = sources[copy.entry]
                assert source is not None
                self._copy(copy, source)
                if end < self._plan.nbytes:
                    self._ready_bytes = end
        else:
            self._copy_gated_cuda(sources, after, ends)
        copied()
        if not cancelled():
            self._ready_bytes = self._plan.nbytes

    def _copy_gated_cuda(
        self, sources: Sequence[Source | None], after: torch.cuda.Event, ends: Sequence[int]
    ) -> None:
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_event(after)
        queued: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            for copy in self._plan.gated:
                source = sources[copy.entry]
                assert source is not None
                self._copy(copy, source)
                queued.append(stream.record_event())
        # All copies are queued; only now wait, so that the device is never idle between two of them.
        for event, end in zip(queued, ends, strict=False):
            event.synchronize()
            if end < self._plan.nbytes:
                self._ready_bytes = end

    def _copy(self, copy: _Copy, source: Source) -> bool:
        """Copy one run of bytes; True if the copy is only queued on the current CUDA stream."""
        if source.device.type == "cpu":
            # memmove, not Tensor.copy_: it gives the GIL back and does not call up torch's thread pool.
            ctypes.memmove(self._address + copy.offset, source.data_ptr + copy.entry_offset, copy.nbytes)
            return False
        part = source.bytes()[copy.entry_offset : copy.entry_offset + copy.nbytes]
        self._buffer[copy.offset : copy.offset + copy.nbytes].copy_(part, non_blocking=True)
        return True


def _plan(layout: Layout, rank: int, gated: Sequence[bool]) -> _Plan:
    now: list[_Copy] = []
    behind: list[_Copy] = []
    offset = 0
    for chunk, extents in layout.sends(rank):
        for segment in layout.segments(chunk):
            if layout.sender(chunk, segment) != rank:
                continue
            if segment.entry is not None and segment.nbytes:
                start = layout.entries[segment.entry].offset
                copy = _Copy(offset, segment.entry, segment.offset - start, segment.nbytes)
                (behind if gated[segment.entry] else now).append(copy)
            offset += segment.nbytes
        assert sum(extent.nbytes for extent in extents) > 0
    return _Plan(tuple(now), tuple(behind), offset)
