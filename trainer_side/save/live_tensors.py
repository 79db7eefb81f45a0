"""Views of the live tensors on a device, made by address: they keep no tensor alive, and hold as long as none moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainer_side.save.copy_plan import Batch, CopyPiece
from trainer_side.save.device_lane import DeviceLane
from trainer_side.state.survey import StorageSource

_ALIGNMENT_BYTES = 8  # of the widest element; not more, or the first address may be nobody's


class LiveTensors:
    """The tensors of some batches, while they live.

    Args:
        lane: The device.
        sources: Per entry its storage.
        batches: What is going to be viewed.

    Attributes:
        lasts: Whether the views may be kept for the next save. Where they cannot be made by address (XPU) they may not:
            they would keep tensors alive that training has replaced.
    """

    def __init__(
        self, lane: DeviceLane, sources: Sequence[StorageSource | None], batches: Iterable[Batch]
    ) -> None:
        begins: list[int] = []
        ends: list[int] = []
        for batch in batches:
            begins += batch.addresses
            ends += map(int.__add__, batch.addresses, batch.sizes)
        self._begin = min(begins) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        nbytes = -(-(max(ends) - self._begin) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        # All memory from the first to the last of them, with whatever lies between.
        self._all = lane.span(self._begin, nbytes)
        self.lasts = self._all is not None
        self._sources = None if self.lasts else sources
        self._wide: dict[torch.dtype, torch.Tensor] = {}

    def view(self, address: int, piece: CopyPiece, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Bytes from the first one of a piece on, as elements of a dtype that address and size are multiples of.

        Args:
            address: Of that byte.
            piece: The piece.
            nbytes: How many; the piece may be followed by others of its tensor.
            dtype: The dtype.
        """
        if self._all is None:
            assert self._sources is not None
            source = self._sources[piece.entry]
            assert source is not None, "what is on a device lies in a tensor"
            return source.bytes()[piece.entry_offset : piece.entry_offset + nbytes].view(dtype)
        if dtype not in self._wide:
            self._wide[dtype] = self._all.view(dtype)
        width, at = dtype.itemsize, address - self._begin
        return self._wide[dtype][at // width : (at + nbytes) // width]
