"""A parcel: pieces of tensors that cross from a device together, packed there as they lie in the staging area.

    live tensors         ─w─   ──m──  ─v─           one launch for all small ones, a copy for each large one
                          │      │     │
    parcel's memory      ─w─ · ──m── · ─v─ │ ─x─    in the order of the area, with its holes
                         └───── run ─────┘ └run┘    each run crosses in one transfer, straight into the area
    staging area      lit─w─lit──m──lit─v─ ▓▓▓ ─x─

A hole lies between two pieces of a run: zip headers, padding, small host tensors such as a step counter. A transfer
overwrites the holes, so their bytes are put aside before it is queued and put back when it has arrived. A run ends at
bytes that must not be overwritten: other parcels, large host tensors, unchanged tensors that are left out, and frames
that the sender may read already.

Views of the parcel's memory and of the live tensors are made once, and reused as long as no tensor moves.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer_side.save.copy_plan import Batch, CopyPiece, SliceSources, address_of, source_of
from trainer_side.save.device_stream import DeviceStream, free_storage
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.survey import Sources

_WIDEST_BYTES = 8  # of the widest element; a wider one could begin in memory of others


class LiveTensors:
    """Views of the live tensors of some batches."""

    def __init__(self, stream: DeviceStream, sources: Sources, batches: Iterable[Batch]) -> None:
        begins: list[int] = []
        ends: list[int] = []
        for batch in batches:
            begins += batch.addresses
            ends += map(int.__add__, batch.addresses, batch.sizes)
        self._begin = min(begins) // _WIDEST_BYTES * _WIDEST_BYTES
        nbytes = -(-(max(ends) - self._begin) // _WIDEST_BYTES) * _WIDEST_BYTES
        # All memory from the first tensor to the last, gaps included.
        self._all = stream.span(self._begin, nbytes)
        # Whether the views may be kept for the next save. Views that are not made by address (XPU) would keep tensors
        # alive that training has replaced.
        self.is_reusable = self._all is not None
        self._sources = None if self.is_reusable else sources
        self._wide: dict[torch.dtype, torch.Tensor] = {}

    def view(self, address: int, piece: CopyPiece, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """View `nbytes` from the begin of a piece on, perhaps of the next pieces of the same tensor as well, as
        elements of `dtype`, which divides address and size.
        """
        if self._all is None:
            assert self._sources is not None
            memory = source_of(self._sources, piece).bytes()
            return memory[piece.entry_offset : piece.entry_offset + nbytes].view(dtype)
        if dtype not in self._wide:
            self._wide[dtype] = self._all.view(dtype)
        width, at = dtype.itemsize, address - self._begin
        return self._wide[dtype][at // width : (at + nbytes) // width]


# Enough for headers and the padding of a page. Another transfer takes as long to begin as 64 KiB take to cross, but
# larger holes cost memory: the place of each word in them is kept.
_HOLE_BYTES_MAX = 8 << 10
_ALIGNMENT_BYTES = 512
# The kernel behind `_foreach_copy_` moves elements, so it gets the widest ones that place and size allow.
_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# The device copies this much in the microseconds that the host needs to queue one copy.
LARGE_BYTES = 8 << 20
_by_offset = attrgetter("offset")


class Run(NamedTuple):
    """A part of the area that crosses in one transfer."""

    begin: int  # offset in the area
    start: int  # offset in the parcel's memory
    nbytes: int  # holes included
    pieces: tuple[CopyPiece, ...]  # in order


def runs_of(pieces: Iterable[CopyPiece], slice_: SliceSources) -> tuple[Run, ...]:
    """The runs of pieces on a device, in the order of the area."""
    groups: list[list[CopyPiece]] = []
    for piece in sorted(pieces, key=_by_offset):
        if groups and _is_bridged(groups[-1][-1], piece, slice_):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    runs: list[Run] = []
    end = 0
    for group in groups:
        begin, nbytes = group[0].offset, group[-1].offset + group[-1].nbytes - group[0].offset
        # A piece that is aligned in the area is aligned in the parcel as well.
        start = _aligned(end) + begin % _ALIGNMENT_BYTES
        runs.append(Run(begin, start, nbytes, tuple(group)))
        end = start + nbytes
    return tuple(runs)


def packed_bytes(runs: Sequence[Run]) -> int:
    """Return the memory that a parcel of these runs takes, aligned so that another may follow."""
    return _aligned(runs[-1].start + runs[-1].nbytes) if runs else 0


def spans(runs: Iterable[Run]) -> Iterator[tuple[Run, CopyPiece, int]]:
    """Yield run, first piece and bytes of each span: pieces that are adjacent in the tensor and in the area."""
    for run in runs:
        first, nbytes = run.pieces[0], 0
        for piece in run.pieces:
            is_next = piece.entry == first.entry and piece.offset == first.offset + nbytes
            if not is_next or piece.entry_offset != first.entry_offset + nbytes:
                yield run, first, nbytes
                first, nbytes = piece, 0
            nbytes += piece.nbytes
        yield run, first, nbytes


def _is_bridged(before: CopyPiece, after: CopyPiece, slice_: SliceSources) -> bool:
    return (
        after.offset - before.offset - before.nbytes <= _HOLE_BYTES_MAX
        and after.frame - before.frame <= 1
        and all(entry in slice_.host_entries for entry in slice_.plan.entries_between(before, after))
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _LargeCopy(NamedTuple):
    """Copy of one large span into the memory of a parcel, from byte `at` on."""

    memory: torch.Tensor
    at: int
    address: int
    nbytes: int
    packed: torch.Tensor
    view: torch.Tensor


class Packing:
    """Copies of pieces into parcels' memory, queued again at each save."""

    def __init__(self) -> None:
        self._small: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._large: list[_LargeCopy] = []

    def add(self, runs: Iterable[Run], memory: torch.Tensor, live: LiveTensors, sources: Sources) -> None:
        """Add the pieces of one parcel. `memory`: Its bytes; their storage may be emptied and filled again later."""
        wide = {width: memory.view(dtype) for width, dtype in _WIDTHS.items()}
        for run, first, nbytes in spans(runs):
            at, address = run.start + first.offset - run.begin, address_of(sources, first)
            width = next(one for one in _WIDTHS if not (at | address | nbytes) % one)
            packed = wide[width][at // width : (at + nbytes) // width]
            view = live.view(address, first, nbytes, _WIDTHS[width])
            if nbytes >= LARGE_BYTES:
                self._large.append(_LargeCopy(memory, at, address, nbytes, packed, view))
            else:
                to, of = self._small.setdefault(width, ([], []))
                to.append(packed)
                of.append(view)

    def queue(self, stream: DeviceStream) -> None:
        if not stream.copy(
            [(one.memory.data_ptr() + one.at, one.address, one.nbytes) for one in self._large]
        ):
            for one in self._large:
                one.packed.copy_(one.view, non_blocking=True)
        for to, of in self._small.values():
            torch._foreach_copy_(to, of, non_blocking=True)


class Parcel:
    """The transfers of one parcel from its memory into an area."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        holes = [
            (before.offset + before.nbytes, after.offset)
            for run in runs
            for before, after in itertools.pairwise(run.pieces)
            if before.offset + before.nbytes < after.offset
        ]
        # One call for all holes: a call for each would compete with the training for the GIL.
        width = next(one for one in _WIDTHS if not any((begin | end) % one for begin, end in holes))
        self._dtype = np.dtype(f"u{width}")
        self._holes = np.concatenate(
            [np.arange(begin // width, end // width) for begin, end in holes] or [np.arange(0)]
        )
        self._hole_bytes = np.empty(len(self._holes), self._dtype)

    def save_holes(self, area: torch.Tensor) -> None:
        """Keep the bytes of the holes, before `send`. Nothing else writes there until `restore_holes`."""
        np.take(self._words(area), self._holes, out=self._hole_bytes, mode="clip")  # `raise` would copy `out`

    def send(self, memory: torch.Tensor, area: torch.Tensor) -> None:
        """Queue the transfers on the current stream: one for each run."""
        for begin, start, nbytes, _ in self._runs:
            area[begin : begin + nbytes].copy_(memory[start : start + nbytes], non_blocking=True)

    def restore_holes(self, area: torch.Tensor) -> None:
        """Restore the bytes of the holes, once the transfers have arrived."""
        self._words(area)[self._holes] = self._hole_bytes

    def _words(self, area: torch.Tensor) -> np.ndarray[Any, Any]:
        """The area as words, without the odd bytes at its end, where no hole is."""
        return area.numpy()[: area.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)


@dataclass
class BatchTransfer:
    """A batch on its way to the host. Without a parcel its pieces cross one by one."""

    batch: Batch
    parcel: Parcel | None
    memory: torch.Tensor | None  # of the device, where the parcel is packed
    event: StreamEvent | None = None  # completes when the batch has arrived; None before it is queued


class LiveBatches:
    """Batches of live tensors, and device memory in which each is packed before it crosses; `slots` cross at once."""

    def __init__(self, of: Sequence[Batch], slice_: SliceSources, slots: int) -> None:
        self.batches, self._count = of, slots
        self._runs = [runs_of(batch.pieces, slice_) for batch in of]
        joined = [[*spans(runs)] for runs in self._runs]
        self._pieces = [[(piece, nbytes) for _, piece, nbytes in one] for one in joined]
        self._parcels = [
            Parcel(runs) if len(one) > 1 else None for runs, one in zip(self._runs, joined, strict=True)
        ]
        sizes = [0] * slots
        for number, (runs, parcel) in enumerate(zip(self._runs, self._parcels, strict=True)):
            if parcel is not None:
                sizes[number % slots] = max(sizes[number % slots], packed_bytes(runs))
        self._sizes = sizes
        self.nbytes = sum(sizes)
        self.slots: list[torch.Tensor] = []
        self.is_allocated = False
        self._live: LiveTensors | None = None
        self._packings: dict[int, Packing] = {}
        self._views: dict[int, list[tuple[CopyPiece, int, torch.Tensor]]] = {}

    def allocate(
        self, make: Callable[[int], torch.Tensor], fill: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """Allocate the memory, if the device has enough. `fill` reallocates emptied slots."""
        if not self.nbytes:
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            if not self.slots:
                self.slots = [make(max(1, nbytes)) for nbytes in self._sizes]
            else:
                fill(self.slots)
            self.is_allocated = True
        if not self.is_allocated:
            self.free_memory()

    def free_memory(self) -> None:
        """Free the memory: no batch is queued until the next save."""
        self.is_allocated = False
        for memory in self.slots:
            free_storage(memory)
        if self._live is not None and not self._live.is_reusable:
            self._live = None
            self._packings.clear()
            self._views.clear()

    def transfer(self, number: int) -> BatchTransfer:
        parcel = self._parcels[number] if self.is_allocated else None
        memory = None if parcel is None else self.slots[number % self._count]
        return BatchTransfer(self.batches[number], parcel, memory)

    def queue(
        self, number: int, transfer: BatchTransfer, area: torch.Tensor, stream: DeviceStream, sources: Sources
    ) -> None:
        """Queue one batch on the current stream."""
        with torch.inference_mode(mode=False):  # inference tensors could not be written to later
            if self._live is None:
                self._live = LiveTensors(stream, sources, self.batches)
            if transfer.parcel is None or transfer.memory is None:
                for piece, nbytes, view in self._views_of(number, self._live, sources):
                    area[piece.offset : piece.offset + nbytes].copy_(view, non_blocking=True)
                return
            packing = self._packings.get(number)
            if packing is None:
                packing = self._packings[number] = Packing()
                packing.add(self._runs[number], transfer.memory, self._live, sources)
            packing.queue(stream)
            transfer.parcel.send(transfer.memory, area)

    def _views_of(
        self, number: int, live: LiveTensors, sources: Sources
    ) -> list[tuple[CopyPiece, int, torch.Tensor]]:
        if number not in self._views:
            self._views[number] = [
                (piece, nbytes, live.view(address_of(sources, piece), piece, nbytes, torch.uint8))
                for piece, nbytes in self._pieces[number]
            ]
        return self._views[number]
