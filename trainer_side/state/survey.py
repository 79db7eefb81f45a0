"""The tensors of a tree, and the storages under them: what is copied, from where, and how much of it.

    model/embed.weight ─┐
    model/head.weight  ─┴─► storage 0: bytes 0..N          tied tensors share one
    window = big[10:20] ──► storage 1: bytes 40..80        only what the state's tensors use of a storage is saved

Storages are numbered in the order in which pickle meets them, which is how `torch.save` names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from trainer_side.state.tree import Named, refusal, tensor_paths


class StorageSource(NamedTuple):
    """The used part of one storage, where it lies now.

    Attributes:
        entry: Its entry in the layout.
        storage: The storage; kept alive as long as this is.
        start_bytes: Where the used part begins in the storage.
        nbytes: Its size.
        data_ptr: Its address, on `device`.
        device: Where it lies.
    """

    entry: int
    storage: torch.UntypedStorage
    start_bytes: int
    nbytes: int
    data_ptr: int
    device: torch.device

    def bytes(self) -> torch.Tensor:
        """The used part as a one-dimensional uint8 tensor that shares its memory."""
        alias = torch.empty(0, dtype=torch.uint8, device=self.device)
        return alias.set_(self.storage, self.start_bytes, (self.nbytes,), (1,))


class Slot(NamedTuple):
    """One tensor of the tree: all of it that must stay the same for a plan to fit.

    `offset` counts elements from the start of the used part of storage number `storage`.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int


class StoragePart(NamedTuple):
    """The used part of a storage."""

    storage: torch.UntypedStorage
    start_bytes: int
    nbytes: int

    def source(self, entry: int) -> StorageSource:
        address = self.storage.data_ptr() + self.start_bytes if self.nbytes else 0
        return StorageSource(entry, self.storage, self.start_bytes, self.nbytes, address, self.storage.device)


@dataclass(frozen=True)
class Survey:
    """Result of `survey`.

    Attributes:
        slots: The tensors, in order.
        parts: The storages, in order.
        numbers: `UntypedStorage._cdata` to the storage's number.
        paths: `id()` of each tensor object to its path.
        signature: Equal for two trees if one plan fits both.
    """

    slots: tuple[Slot, ...]
    parts: tuple[StoragePart, ...]
    numbers: dict[int, int]
    paths: dict[int, str]
    signature: tuple[Any, ...]

    @cached_property
    def first_slots(self) -> dict[int, Slot]:
        """Per storage, the first tensor on it."""
        return {slot.storage: slot for slot in reversed(self.slots)}

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage under `tensor`; None if it is not in the tree."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def description(self, slot: Slot) -> str:
        """The dtype, and what else must agree before replicas of the tensor are interchangeable."""
        first = self.first_slots[slot.storage]
        text = slot.dtype
        if slot.stride != _contiguous_stride(slot.shape):
            text += f", strides {slot.stride}"
        if first is not slot or slot.offset:
            text += f", at element {slot.offset} of the storage of {first.path}"
        return text


def survey(tree: Any) -> Survey:
    """Find all tensors of `tree` and the used parts of their storages. Training thread.

    Raises:
        StateError: A tensor is of a kind that cannot be saved; names its path and what to do.
    """
    found = tensor_paths(tree)
    numbers: dict[int, int] = {}
    used: list[_Used] = []
    placed: list[int] = []
    for named in found:
        reason = refusal(named.tensor)
        if reason is not None:
            raise StateError(f"{named.path} is {reason}")
        storage = named.tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(used))
        if number == len(used):
            used.append(_Used(storage))
        used[number].include(named)
        placed.append(number)
    parts = tuple(one.part() for one in used)
    slots = tuple(_slot(named, number, parts[number]) for named, number in zip(found, placed, strict=True))
    paths: dict[int, str] = {}
    for named in found:
        paths.setdefault(id(named.tensor), named.path)
    return Survey(slots, parts, numbers, paths, (slots, tuple(part.nbytes for part in parts)))


class _Used:
    """The range of a storage that tensors use; grows."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._first: int | None = None
        self._end = 0
        self._itemsize = 1

    def include(self, named: Named) -> None:
        tensor = named.tensor
        if not tensor.numel():
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = int(tensor.storage_offset()) * tensor.itemsize
        end = first + (last + 1) * tensor.itemsize
        if end > self._storage.nbytes():
            raise StateError(
                f"{named.path} reaches to byte {end} of a storage of {self._storage.nbytes()} bytes, because its "
                "memory was freed; save it while it is whole"
            )
        self._first = first if self._first is None else min(self._first, first)
        self._end = max(self._end, end)
        self._itemsize = max(self._itemsize, tensor.itemsize)

    def part(self) -> StoragePart:
        # Offsets within a storage are counted in elements: begin at a whole one of the largest dtype on it.
        start = (self._first or 0) // self._itemsize * self._itemsize
        return StoragePart(self._storage, start, self._end - start)


def _slot(named: Named, number: int, part: StoragePart) -> Slot:
    tensor = named.tensor
    # An empty tensor may point anywhere; it has no bytes.
    offset = int(tensor.storage_offset()) - part.start_bytes // tensor.itemsize if tensor.numel() else 0
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Slot(named.path, dtype, tuple(tensor.shape), tensor.stride(), offset, number)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
