"""Tensors of given sizes, and the slice of a layout that has an entry for each; for tests of how they are copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.image.entries import Entry
from holdfast.image.layout import Layout
from trainer_side.save.copy_plan import SlicePlan
from trainer_side.state.survey import StorageSource

CPU = torch.device("cpu")


def laid_out(sizes: Sequence[int], *, ranks: int = 1, chunk_bytes: int = 1 << 20) -> Layout:
    """A replicated entry of each size, with 64 bytes of literals before it."""
    entries, offset = [], 64
    for number, nbytes in enumerate(sizes):
        entries.append(Entry(f"archive/data/{number}", offset, nbytes, -1, ()))
        offset += nbytes + 64
    return Layout(offset, chunk_bytes, ranks, tuple(entries))


def sliced(sizes: Sequence[int], *, chunk_bytes: int = 1 << 20) -> SlicePlan:
    """The whole of it as one rank's slice, all behind the gate."""
    return SlicePlan.of(laid_out(sizes, chunk_bytes=chunk_bytes), 0, [True] * len(sizes))


def source_of(entry: int, tensor: torch.Tensor, device: torch.device = CPU) -> StorageSource:
    """The whole of a tensor's storage, said to be on `device`."""
    return StorageSource(entry, tensor.untyped_storage(), 0, tensor.numel(), tensor.data_ptr(), device)


def tensors_of(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Random bytes."""
    return [torch.randint(0, 200, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
