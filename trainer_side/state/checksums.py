"""A CRC-32 over every byte of every tensor, for the proof that replicas are equal (`holdfast/wire/replica_proof.py`).

    host memory   read where it lies                                 about as fast as memory
    a device      pieces ─► two pinned buffers, in turn ─► CRC       about as fast as the bus; small tensors together

Once for each agreement of the ranks, so at the first save and when the set of tensors changes. Training thread: the
ranks wait for each other there anyway, and what differs is refused before the first byte is copied.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Collection, Iterator, Sequence

import torch

from holdfast.crc import crc32
from trainer_side.state.survey import Slot, StoragePart, Survey

_COPIED_BYTES = 4096
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20  # below it tensors of a device are brought over together


def checksums(found: Survey, leave_out: Collection[str]) -> tuple[int, ...]:
    """One for each slot, in order. Tied tensors have the same one, and are read once.

    Args:
        found: The tensors.
        leave_out: Paths of those that are not read; theirs is 0.
    """
    by_view: dict[tuple[object, ...], int] = {}
    on_devices: dict[torch.device, dict[tuple[object, ...], torch.Tensor]] = {}
    for slot in found.slots:
        view = _view(slot)
        if slot.path in leave_out or view in by_view:
            continue
        memory = _memory_of(found.parts[slot.storage], slot)
        if isinstance(memory, torch.Tensor) and memory.device.type != "cpu":
            on_devices.setdefault(memory.device, {})[view] = memory
            by_view[view] = 0
        else:
            by_view[view] = _host_crc(memory)
    for tensors in on_devices.values():
        by_view.update(zip(tensors, device_crcs([*tensors.values()]), strict=True))
    return tuple(0 if slot.path in leave_out else by_view[_view(slot)] for slot in found.slots)


def _view(slot: Slot) -> tuple[object, ...]:
    return (slot.storage, slot.dtype, slot.offset, slot.shape, slot.stride)


def _memory_of(part: StoragePart, slot: Slot) -> torch.Tensor | tuple[int, int]:
    """Where a tensor's bytes lie: address and size in host memory, else as one-dimensional uint8. A tensor with gaps is
    copied; one without is taken as it lies, in whatever order: the strides are the same on every rank.
    """
    numbers = math.prod(slot.shape)
    if not numbers:
        return 0, 0
    dtype = _dtype(slot.dtype)
    sizes, device = slot.shape, part.storage.device
    if 0 in slot.stride:  # what `expand` repeats is there once
        sizes = tuple(size if stride else 1 for size, stride in zip(sizes, slot.stride, strict=True))
        numbers = math.prod(sizes)
    begin, nbytes = part.start_bytes + slot.offset * dtype.itemsize, numbers * dtype.itemsize
    if sum((size - 1) * stride for size, stride in zip(sizes, slot.stride, strict=True)) + 1 == numbers:
        if device.type == "cpu":
            return part.storage.data_ptr() + begin, nbytes
        return torch.empty(0, dtype=torch.uint8, device=device).set_(part.storage, begin, (nbytes,), (1,))
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(part.storage, begin // dtype.itemsize, sizes, slot.stride)
    return tensor.contiguous().view(-1).view(torch.uint8)


@functools.cache
def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _host_crc(memory: torch.Tensor | tuple[int, int]) -> int:
    address, nbytes = (memory.data_ptr(), memory.numel()) if isinstance(memory, torch.Tensor) else memory
    if nbytes <= _COPIED_BYTES:  # cheaper than a view of it
        return crc32(ctypes.string_at(address, nbytes)) if nbytes else 0
    return crc32(memoryview((ctypes.c_uint8 * nbytes).from_address(address)))


def device_crcs(memories: Sequence[torch.Tensor]) -> Iterator[int]:
    """Of the bytes of tensors on one device, in order."""
    small = [memory for memory in memories if memory.numel() <= _SMALL_BYTES]
    crcs = _together(small)
    buffers = None
    for memory in memories:
        if memory.numel() <= _SMALL_BYTES:
            yield next(crcs)
            continue
        if buffers is None:
            buffers = [_buffer(_PIECE_BYTES, memory.device) for _ in range(2)]
        yield _in_pieces(memory, buffers)


def _together(memories: Sequence[torch.Tensor]) -> Iterator[int]:
    """Of small ones: so many in one copy as make a piece."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for memory in memories:
        batch.append(memory)
        nbytes += memory.numel()
        if nbytes >= _PIECE_BYTES:
            yield from _batch(batch)
            batch, nbytes = [], 0
    yield from _batch(batch)


def _batch(batch: Sequence[torch.Tensor]) -> Iterator[int]:
    if not batch:
        return
    here, offset = torch.cat([*batch]).cpu().numpy().data, 0
    for memory in batch:
        yield crc32(here[offset : offset + memory.numel()])
        offset += memory.numel()


def _in_pieces(memory: torch.Tensor, buffers: Sequence[torch.Tensor]) -> int:
    """Of a large one: while one piece is read, the next is on its way."""
    size = buffers[0].numel()
    pieces = torch.split(memory, size)

    def bring(place: int) -> torch.cuda.Event | None:
        buffers[place % 2][: pieces[place].numel()].copy_(pieces[place], non_blocking=True)
        return torch.cuda.current_stream(memory.device).record_event() if memory.is_cuda else None

    crc, under_way = 0, bring(0)
    for place, piece in enumerate(pieces):
        arrived, under_way = under_way, bring(place + 1) if place + 1 < len(pieces) else None
        if arrived is not None:
            arrived.synchronize()
        crc = crc32(buffers[place % 2].numpy().data[: piece.numel()], crc)
    return crc


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
