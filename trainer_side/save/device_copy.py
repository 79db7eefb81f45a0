"""Copies from a device, beside the training: on a stream of its own, waited for by event, never by device.

    C  live tensors ── gather small ones ─► scratch ─► pinned slot ─► scatter ─┐
                   └── large ones ─────────────────────────────────────────────┴─► staging area
    G  live tensors ─► mirror on the device │ gate open │ mirror ─► as above, no gathering

The strategies are LightCheck's (ICCD 2023): G where memory on the device allows it, C otherwise. With G nothing live is
read any more after a copy at the speed of the device's memory. D (straight into a tier) would be one more `_to_host`.

All CUDA calls are in `CudaLane`; what is gathered, queued and landed when is the same for any device that torch knows.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer_side.save.copy_plan import BATCH_BYTES_MAX, Batch
from trainer_side.state.survey import StorageSource

_log = logging.getLogger("holdfast.trainer")

_SLOTS = 8  # so many batches are queued ahead: the device is never idle between two
_ALIGNMENT_BYTES = 512
_SPARE_SHARE = 10  # a tenth of the device's memory is left alone


class StreamEvent(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...


class DeviceLane(Protocol):
    """The calls to a device that a copy needs."""

    def beside(self, after: StreamEvent | None) -> AbstractContextManager[None]:
        """Work of this thread goes to a stream of its own meanwhile, behind `after`."""
        ...

    def record(self) -> StreamEvent: ...

    def on_device(self, nbytes: int) -> torch.Tensor: ...

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device can copy into without stopping the CPU."""
        ...

    def spare_bytes(self) -> int:
        """Memory of the device that nobody will miss."""
        ...


class CudaLane:
    """A stream on one CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of the lowest priority: kernels of the training go first.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self, after: StreamEvent | None) -> Iterator[None]:
        """As `DeviceLane`."""
        if isinstance(after, torch.cuda.Event):
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> StreamEvent:
        """As `DeviceLane`."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def on_device(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def on_host(self, nbytes: int) -> torch.Tensor:
        """As `DeviceLane`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def spare_bytes(self) -> int:
        """As `DeviceLane`."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return free_bytes - total_bytes // _SPARE_SHARE


@dataclass(frozen=True)
class _Queued:
    """A batch on its way to the host. `bounce`: where it lands if it has to be scattered from there."""

    batch: Batch
    bounce: torch.Tensor | None
    event: StreamEvent


class DeviceCopy:
    """Copies from one device into staging areas. Its buffers are taken once, when first needed.

    Args:
        lane: The device.
        device_bytes_max: Most of its memory for a mirror; 0: none (strategy C); None: what is to spare at first.
    """

    def __init__(self, lane: DeviceLane, *, device_bytes_max: int | None = None) -> None:
        self._lane, self._device_bytes_max = lane, device_bytes_max
        self._scratch: torch.Tensor | None = None
        self._bounce: torch.Tensor | None = None
        self._mirror: torch.Tensor | None = None
        self._no_mirror_for = 0  # bytes for which there was no room
        self._captured: torch.Tensor | None = None

    def capture(
        self, batches: Sequence[Batch], sources: Sequence[StorageSource | None], area: torch.Tensor
    ) -> Callable[[], None]:
        """Queue copies of `batches` into `area` on the current stream: what is queued on it later comes after them.

        Returns:
            Waits until they are there. At most one capture is under way.
        """
        needed = sum(batch.nbytes for batch in batches if len(batch.pieces) > 1)
        if self._captured is None or self._captured.numel() < needed:
            self._captured = self._lane.on_host(needed)
        at, scattered = 0, []
        for batch in batches:
            if len(batch.pieces) == 1:
                _target(batch, area).copy_(_parts(batch, sources)[0], non_blocking=True)
                continue
            bounce = self._captured[at : at + batch.nbytes]
            bounce.copy_(torch.cat(_parts(batch, sources)), non_blocking=True)
            scattered.append((batch, bounce))
            at += batch.nbytes
        event = self._lane.record()

        def land() -> None:
            event.synchronize()
            for batch, bounce in scattered:
                _scatter(batch, bounce, area)

        return land

    def copy(
        self,
        batches: Sequence[Batch],
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        after: StreamEvent | None,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
    ) -> None:
        """Copy `batches`; arguments as of `CopyEngine.copy`."""
        with self._lane.beside(after):
            mirror = self._mirror_for(batches)
            if mirror is None:
                live = ((batch, None) for batch in batches)
                self._to_host(live, sources, area, cancelled, read, arrived)
                return
            packed = self._to_mirror(batches, sources, mirror, cancelled, read)
            if not cancelled():
                self._to_host(packed, sources, area, cancelled, lambda _: None, arrived)

    # -- G: on the device first ----------------------------------------------------------------------------------

    def _mirror_for(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        needed = sum(_aligned(batch.nbytes) for batch in batches)
        if self._mirror is not None and self._mirror.numel() >= needed:
            return self._mirror
        if 0 < self._no_mirror_for <= needed:
            return None
        self._mirror = None
        limit = self._lane.spare_bytes() if self._device_bytes_max is None else self._device_bytes_max
        if needed <= limit:
            try:
                self._mirror = self._lane.on_device(needed)
            except torch.OutOfMemoryError as error:
                _log.warning("no memory on the device for a copy of %d bytes: %s", needed, error)
        if self._mirror is None:
            self._no_mirror_for = needed
        return self._mirror

    def _to_mirror(
        self,
        batches: Sequence[Batch],
        sources: Sequence[StorageSource | None],
        mirror: torch.Tensor,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
    ) -> list[tuple[Batch, torch.Tensor | None]]:
        at = 0
        queued: list[tuple[Batch, torch.Tensor, StreamEvent]] = []
        for batch in batches:
            if cancelled():
                break
            packed = mirror[at : at + batch.nbytes]
            torch.cat(_parts(batch, sources), out=packed)
            queued.append((batch, packed, self._lane.record()))
            at += _aligned(batch.nbytes)
        for batch, _, event in queued:
            event.synchronize()
            read(batch)
        return [(batch, packed) for batch, packed, _ in queued]

    # -- to the host ---------------------------------------------------------------------------------------------

    def _to_host(
        self,
        work: Iterable[tuple[Batch, torch.Tensor | None]],
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        cancelled: Callable[[], bool],
        read: Callable[[Batch], None],
        arrived: Callable[[Batch], None],
    ) -> None:
        pending: deque[_Queued] = deque()

        def land() -> None:
            queued = pending.popleft()
            queued.event.synchronize()
            read(queued.batch)
            if queued.bounce is not None:
                _scatter(queued.batch, queued.bounce, area)
            arrived(queued.batch)

        for number, (batch, packed) in enumerate(work):
            if cancelled():
                break
            if len(pending) == _SLOTS:
                land()  # and so the slot of the same number is free
            pending.append(self._queue(batch, packed, sources, area, number % _SLOTS))
        while pending:  # also of a cancelled copy: when this returns, nothing live is read
            land()

    def _queue(
        self,
        batch: Batch,
        packed: torch.Tensor | None,
        sources: Sequence[StorageSource | None],
        area: torch.Tensor,
        slot: int,
    ) -> _Queued:
        if len(batch.pieces) == 1:
            live = packed if packed is not None else _parts(batch, sources)[0]
            _target(batch, area).copy_(live, non_blocking=True)
            return _Queued(batch, None, self._lane.record())
        if self._bounce is None:
            self._bounce = self._lane.on_host(_SLOTS * BATCH_BYTES_MAX)
        here = slice(slot * BATCH_BYTES_MAX, slot * BATCH_BYTES_MAX + batch.nbytes)
        if packed is None:
            if self._scratch is None:
                self._scratch = self._lane.on_device(_SLOTS * BATCH_BYTES_MAX)
            packed = self._scratch[here]
            torch.cat(_parts(batch, sources), out=packed)
        bounce = self._bounce[here]
        bounce.copy_(packed, non_blocking=True)
        return _Queued(batch, bounce, self._lane.record())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _parts(batch: Batch, sources: Sequence[StorageSource | None]) -> list[torch.Tensor]:
    """The live bytes of each piece."""
    parts = []
    for piece in batch.pieces:
        source = sources[piece.entry]
        assert source is not None, "what is on a device lies in a tensor"
        parts.append(source.bytes()[piece.entry_offset : piece.entry_offset + piece.nbytes])
    return parts


def _target(batch: Batch, area: torch.Tensor) -> torch.Tensor:
    """Where the only piece of a batch goes."""
    (offset,) = batch.offsets
    return area[offset : offset + batch.nbytes]


def _scatter(batch: Batch, bounce: torch.Tensor, area: torch.Tensor) -> None:
    begins = itertools.accumulate(batch.sizes, initial=bounce.data_ptr())
    deque(map(ctypes.memmove, map(area.data_ptr().__add__, batch.offsets), begins, batch.sizes), maxlen=0)
