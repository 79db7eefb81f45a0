"""Moves bytes of an image into device memory, section by section, through page-locked windows.

    a reader        window A: read ─► CRC-32 ─► crosses ═══════►│      on a stream of its own
                    window B:                   read ─► CRC-32 ─► crosses ═══════►│ …
    of other ranks  window A: received ─► CRC-32 ─► crosses …          the same, in the training thread

A section is a reader's part of one chunk or frame: at most 192 MiB are being read while as much crosses. A section with
few pieces crosses piece by piece. A section with many crosses in one transfer, and the device distributes the pieces by
one call for each element width, as wide as address and size allow. If a tensor is sharded in another dimension than its
first, the whole section crosses as well, and the device picks the rows by one copy per tensor.
`device_memory.py` chooses the tensors that go to a device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer_side.state.accelerator import StreamEvent, module_of, record

Locked = Callable[[int], torch.Tensor]  # page-locked host memory of this size, for DMA

_SECTION_BYTES_MAX = 16 << 20  # larger chunks cross in several sections
_SECTIONS_BYTES_MAX = 192 << 20  # of all readers
_WINDOWS = 2  # for each reader: one is read into while the other one crosses
_WHOLE_FROM = 8  # pieces: from this number on, a section crosses as a whole
WIDEST_BYTES = 8  # of an element; sections keep what is aligned so
_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def section_bytes(readers: int) -> int:
    """Size of a section: the more readers, the smaller, for windows are locked before they are used."""
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
        """The byte of the window after the last one."""
        return self.begin + (self.runs - 1) * self.stride + self.run_bytes


class SectionWindow:
    """Locked memory of one thread: from `address` on, as a tensor, an array and a view."""

    def __init__(self, section: torch.Tensor) -> None:
        self.section, self.address = section, section.data_ptr()
        self.bytes: np.ndarray = section.numpy()
        self.memory = self.bytes.data
        # when what was sent from it is on the device; None: nothing was
        self.crossed: StreamEvent | None = None


class DeviceSections:
    """The way of one restore to its device. `window` and `send` belong to any thread, the rest to the training thread.

    `device`: A CUDA device. Memory that parts go to was taken on its current stream before.
    """

    def __init__(self, device: torch.device, locked: Locked) -> None:
        self._device, self._module, self._locked = device, module_of(device), locked
        self._begin = record(device)
        self._stream = self._new_stream()  # of all sections that are distributed on the device
        self._queue = threading.Lock()  # the scratch is used in the order of that stream
        self._scratch: torch.Tensor | None = None
        self._local = threading.local()
        self._windows: list[SectionWindow] = []  # readers end before what they have sent has crossed

    def window(self, nbytes: int) -> SectionWindow:
        """A window of this thread; waits until what was sent from it before has crossed."""
        mine: deque[SectionWindow] | None = getattr(self._local, "windows", None)
        if mine is None or len(mine[0].memory) < nbytes:
            mine = self._local.windows = deque(SectionWindow(self._locked(nbytes)) for _ in range(_WINDOWS))
            self._windows += mine
        mine.rotate()
        if mine[0].crossed is not None:
            mine[0].crossed.synchronize()
        return mine[0]

    def send(self, window: SectionWindow, parts: Sequence[SectionPart]) -> None:
        """Queue the copies of a section. The window may be read into again when `window` gives it."""
        if not parts:
            return
        with self._module.device(self._device), torch.no_grad():
            if len(parts) < _WHOLE_FROM and all(part.runs == 1 for part in parts):
                # On a stream of the thread's own: a dozen readers would wait for each other longer than for the device.
                if not hasattr(self._local, "stream"):
                    self._local.stream = self._new_stream()
                with self._module.stream(self._local.stream):
                    for memory, at, begin, nbytes, _, _ in parts:
                        memory[at : at + nbytes].copy_(
                            window.section[begin : begin + nbytes], non_blocking=True
                        )
                    window.crossed = record(self._device)
                return
            with self._queue, self._module.stream(self._stream):
                begin = min(part.begin for part in parts) // WIDEST_BYTES * WIDEST_BYTES
                self._deal(
                    self._on_device(window.section[begin : max(part.end for part in parts)]), begin, parts
                )
                window.crossed = record(self._device)

    def finish(self) -> None:
        """Wait until all that was sent is on the device. Nobody sends any more."""
        for window in self._windows:
            if window.crossed is not None:
                self._stream.wait_event(window.crossed)
        with self._module.device(self._device), self._module.stream(self._stream):
            event = record(self._device)
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
            self._scratch = torch.empty(
                -(-nbytes // WIDEST_BYTES) * WIDEST_BYTES, dtype=torch.uint8, device=self._device
            )
        self._scratch[:nbytes].copy_(section, non_blocking=True)
        return self._scratch

    def _deal(self, section: torch.Tensor, first: int, parts: Sequence[SectionPart]) -> None:
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
