"""A mirror: a copy on the device of what one save takes, in the order of the staging area, section by section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from trainer_side.save.copy_plan import Batch, CopyPiece, SliceSources, batches
from trainer_side.save.crossing import Crossing
from trainer_side.save.device_lane import DeviceLane, empty
from trainer_side.save.live_tensors import LiveTensors
from trainer_side.save.parcel import Packing, Parcel, packed_bytes, runs_of

# Fewer sections cost less; with more, what follows on a copy begins earlier.
_SECTION_BYTES = 32 << 20
_SECTIONS_MAX = 64
_by_offset = attrgetter("offset")


class Mirror:
    """A copy on the device of one save. Its memory is given back as it is brought to the host.

    Attributes:
        batches: Its sections, in the order of the area.
        nbytes: Memory that it takes.
        is_whole: Whether it has all that is copied, or only what anything may change.
    """

    def __init__(self, now: Sequence[Batch], behind: Sequence[Batch], slice_: SliceSources) -> None:
        self.made_of = now, behind
        self.is_whole = True
        self.batches = _sections([*now, *behind], slice_)
        runs = [runs_of(batch.pieces, slice_) for batch in self.batches]
        self._runs, self._parcels = runs, [*map(Parcel, runs)]
        self._sizes = [*map(packed_bytes, runs)]
        self.nbytes = sum(self._sizes)
        self._memory: list[torch.Tensor] = []
        self._packing: Packing | None = None

    def make(self, lane: DeviceLane, slice_: SliceSources) -> None:
        """Queue the copy, on the current stream.

        Raises:
            OutOfMemoryError: There is no memory for it after all.
        """
        if len(self._memory) == len(self._sizes):
            lane.fill(self._memory)
        else:
            self._memory = []
            for nbytes in self._sizes:
                self._memory.append(lane.on_device(nbytes))
        if self._packing is not None:
            self._packing.queue()
            return
        with torch.inference_mode(mode=False):  # what is made in it could not be written outside of it
            live = LiveTensors(lane, slice_.sources, self.batches)
            packing = Packing()
            for runs, memory in zip(self._runs, self._memory, strict=True):
                packing.add(runs, memory, live, slice_.sources)
        self._packing = packing if live.lasts else None
        packing.queue()

    def sections(self) -> Iterator[Crossing]:
        """In order."""
        yield from map(Crossing, self.batches, self._parcels, self._memory)

    def drop(self) -> None:
        """Give back what has not been given back."""
        for memory in self._memory:
            empty(memory)


def _sections(of: Sequence[Batch], slice_: SliceSources) -> list[Batch]:
    """All pieces in the order of the area, cut where a section is large enough."""
    pieces = sorted((piece for batch in of for piece in batch.pieces), key=_by_offset)
    least = max(_SECTION_BYTES, -(-sum(batch.nbytes for batch in of) // _SECTIONS_MAX))
    groups: list[list[CopyPiece]] = [[]]
    nbytes = 0
    for piece in pieces:
        if nbytes >= least:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    return [
        batch
        for group in groups
        for batch in batches(
            group, slice_.sources, pieces_max=len(group), bytes_max=sum(one.nbytes for one in group)
        )
    ]
