"""Moves bytes of an image into device memory, section by section, through page-locked windows.

    a reader        window A: read ─► CRC-32 ─► transfer ══════►│      on a stream of its own
                    window B:                   read ─► CRC-32 ─► transfer ══════►│ …
    other ranks     window A: received ─► CRC-32 ─► transfer …         the same, in the training thread

A section is a reader's part of one chunk or frame. One with few pieces is transferred piece by piece. One with many is
transferred as a whole, and the device distributes the pieces by one call for each element width. If a tensor is sharded
in another dimension than its first, the device picks the rows by one copy per tensor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer_side.state.accelerator import StreamEvent, module_of, record_event

PinnedAllocator = Callable[[int], torch.Tensor]  # page-locked host memory of this size, for DMA

_SECTION_BYTES_MAX = 16 << 20  # larger chunks cross in several sections
_SECTIONS_BYTES_MAX = 192 << 20  # of all readers
_WINDOWS = 2  # for each reader: one is filled while the other is transferred
_WHOLE_FROM = 8  # pieces: from this number on, a section is transferred as a whole
WIDEST_BYTES = 8  # of an element; sections keep this alignment
_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def pad(nbytes: int) -> int:
    """Round up to whole elements of the widest kind."""
    return -(-nbytes // WIDEST_BYTES) * WIDEST_BYTES


def section_bytes(readers: int) -> int:
    """Return the size of a section: smaller with more readers, to limit page-locked memory."""
    return min(_SECTION_BYTES_MAX, _SECTIONS_BYTES_MAX // readers)


class SectionPart(NamedTuple):
    """A part of a section, and its place on the device: `runs` of `run_bytes`."""

    memory: torch.Tensor  # of the device, as bytes
    at: int  # where the part goes in it, back to back
    begin: int  # where in the window the part begins
    run_bytes: int
    runs: int = 1
    stride: int = 0  # from the begin of a run to that of the next one

    @property
    def end(self) -> int:
        """End of the part in the window."""
        return self.begin + (self.runs - 1) * self.stride + self.run_bytes


class SectionWindow:
    """Page-locked memory of one thread, as a tensor, an array and a view."""

    def __init__(self, section: torch.Tensor) -> None:
        self.section, self.address = section, section.data_ptr()
        self.bytes: np.ndarray = section.numpy()
        self.memory = self.bytes.data
        # End of the last transfer from this window; None: nothing was sent.
        self.transfer_done: StreamEvent | None = None


class DeviceSections:
    """Transfers of one restore to its device. Any thread may call `window` and `send`, the training thread the rest.

    `device`: A CUDA device. The memory of the parts was allocated on its current stream before.
    """

    def __init__(self, device: torch.device, allocate_pinned: PinnedAllocator) -> None:
        self._device, self._module, self._allocate_pinned = device, module_of(device), allocate_pinned
        self._begin = record_event(device)
        self._stream = self._new_stream()  # of all sections that are distributed on the device
        self._queue = threading.Lock()  # keeps uses of the scratch in the order of that stream
        self._scratch: torch.Tensor | None = None
        self._local = threading.local()
        self._windows: list[SectionWindow] = []  # of all threads, which may end before their transfers

    def window(self, nbytes: int) -> SectionWindow:
        """Return the next window of this thread, once its previous transfer is complete."""
        mine: deque[SectionWindow] | None = getattr(self._local, "windows", None)
        if mine is None or len(mine[0].memory) < nbytes:
            mine = deque(SectionWindow(self._allocate_pinned(nbytes)) for _ in range(_WINDOWS))
            self._local.windows = mine
            self._windows += mine
        mine.rotate()
        if mine[0].transfer_done is not None:
            mine[0].transfer_done.synchronize()
        return mine[0]

    def send(self, window: SectionWindow, parts: Sequence[SectionPart]) -> None:
        """Queue the copies of a section. The window may be reused when `window` returns it."""
        if not parts:
            return
        with self._module.device(self._device), torch.no_grad():
            if len(parts) < _WHOLE_FROM and all(part.runs == 1 for part in parts):
                # Each thread has its own stream: on one stream, a dozen readers would wait for each other.
                if not hasattr(self._local, "stream"):
                    self._local.stream = self._new_stream()
                with self._module.stream(self._local.stream):
                    for memory, at, begin, nbytes, _, _ in parts:
                        source = window.section[begin : begin + nbytes]
                        memory[at : at + nbytes].copy_(source, non_blocking=True)
                    window.transfer_done = record_event(self._device)
                return
            with self._queue, self._module.stream(self._stream):
                begin = min(part.begin for part in parts) // WIDEST_BYTES * WIDEST_BYTES
                end = max(part.end for part in parts)
                self._distribute(self._on_device(window.section[begin:end]), begin, parts)
                window.transfer_done = record_event(self._device)

    def finish(self) -> None:
        """Wait until all transfers are complete. No thread may call `send` any more."""
        for window in self._windows:
            if window.transfer_done is not None:
                self._stream.wait_event(window.transfer_done)
        with self._module.device(self._device), self._module.stream(self._stream):
            event = record_event(self._device)
        event.synchronize()
        self._windows.clear()
        self._local = threading.local()
        self._scratch = None

    def _new_stream(self) -> Any:
        stream = self._module.Stream(self._device)
        stream.wait_event(self._begin)
        return stream

    def _on_device(self, section: torch.Tensor) -> torch.Tensor:
        nbytes = section.numel()
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = torch.empty(pad(nbytes), dtype=torch.uint8, device=self._device)
        self._scratch[:nbytes].copy_(section, non_blocking=True)
        return self._scratch

    def _distribute(self, section: torch.Tensor, first: int, parts: Sequence[SectionPart]) -> None:
        """Copy the parts from a section on the device that begins with byte `first` of its window."""
        wide = {width: section.view(dtype) for width, dtype in _WIDTHS.items()}
        small: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for memory, at, begin, run_bytes, runs, stride in parts:
            begin -= first
            places = begin | run_bytes | stride | (int(memory.storage_offset()) + at)
            width = next(one for one in _WIDTHS if not places % one)
            to = memory[at : at + run_bytes * runs].view(_WIDTHS[width])
            if runs == 1:
                to_these, of_these = small.setdefault(width, ([], []))
                to_these.append(to)
                of_these.append(wide[width][begin // width : (begin + run_bytes) // width])
            else:
                shape = runs, run_bytes // width
                to.view(shape).copy_(wide[width].as_strided(shape, (stride // width, 1), begin // width))
        for to_these, of_these in small.values():
            torch._foreach_copy_(to_these, of_these)  # one launch, or a few
