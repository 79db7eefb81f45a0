"""Batches of live tensors on a device, each packed into a slot of memory there, or one by one where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainer_side.save.copy_plan import Batch, CopyPiece, SliceSources
from trainer_side.save.device_lane import DeviceLane, empty
from trainer_side.save.live_tensors import LiveTensors
from trainer_side.save.parcel import Packing, Parcel, address_of, packed_bytes, runs_of, spans
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.survey import StorageSource


@dataclass
class Crossing:
    """A batch on its way to the host.

    Attributes:
        batch: What crosses.
        parcel: How, where it is packed. `memory`: where to.
        event: When it has arrived; None before it is queued.
    """

    batch: Batch
    parcel: Parcel | None
    memory: torch.Tensor | None
    event: StreamEvent | None = None


class LiveBatches:
    """Batches of live tensors, and memory of the device in which each is packed before it crosses.

    Args:
        of: The batches.
        slice_: What they are of.
        slots: So many of them are on their way at once.
    """

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
        self.is_there = False
        self._live: LiveTensors | None = None
        self._packings: dict[int, Packing] = {}
        self._views: dict[int, list[tuple[CopyPiece, int, torch.Tensor]]] = {}

    def take(
        self, make: Callable[[int], torch.Tensor], fill: Callable[[Sequence[torch.Tensor]], None]
    ) -> bool:
        """Take the memory, if there is any; whether it is there.

        Args:
            make: Makes a slot.
            fill: Fills slots that were emptied.
        """
        if not self.nbytes:
            return False
        with contextlib.suppress(torch.OutOfMemoryError):
            if not self.slots:
                self.slots = [make(max(1, nbytes)) for nbytes in self._sizes]
            else:
                fill(self.slots)
            self.is_there = True
        if not self.is_there:
            self.give_back()
        return self.is_there

    def give_back(self) -> None:
        """No batch is queued any more until the next save."""
        self.is_there = False
        for memory in self.slots:
            empty(memory)
        if self._live is not None and not self._live.lasts:
            self._live = None
            self._packings.clear()
            self._views.clear()

    def crossing(self, number: int) -> Crossing:
        """The way of one batch."""
        parcel = self._parcels[number] if self.is_there else None
        memory = None if parcel is None else self.slots[number % self._count]
        return Crossing(self.batches[number], parcel, memory)

    def queue(
        self,
        number: int,
        crossing: Crossing,
        area: torch.Tensor,
        lane: DeviceLane,
        sources: Sequence[StorageSource | None],
    ) -> None:
        """Queue one batch on the current stream."""
        with torch.inference_mode(mode=False):  # views that are made in it could not be written outside of it
            if self._live is None:
                self._live = LiveTensors(lane, sources, self.batches)
            if crossing.parcel is None or crossing.memory is None:
                for piece, nbytes, view in self._views_of(number, self._live, sources):
                    area[piece.offset : piece.offset + nbytes].copy_(view, non_blocking=True)
                return
            packing = self._packings.get(number)
            if packing is None:
                packing = self._packings[number] = Packing()
                packing.add(self._runs[number], crossing.memory, self._live, sources)
            packing.queue()
            crossing.parcel.send(crossing.memory, area)

    def _views_of(
        self, number: int, live: LiveTensors, sources: Sequence[StorageSource | None]
    ) -> list[tuple[CopyPiece, int, torch.Tensor]]:
        if number not in self._views:
            self._views[number] = [
                (piece, nbytes, live.view(address_of(piece, sources), piece, nbytes, torch.uint8))
                for piece, nbytes in self._pieces[number]
            ]
        return self._views[number]
