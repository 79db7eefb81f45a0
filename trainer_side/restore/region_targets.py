"""The memory of a rank's regions, and how bytes of the image get there.

    bytes of the entry   ····│····│·xx·│·xx·│·xx·│····      as they were read, window by window
    RegionTarget         xxxxxx                             the rank's own memory: runs are copied, nothing is gathered
    ScatterTarget        all regions that the rank holds of one entry

A region lies in live memory itself where it can. Where it cannot (a CUDA device, another dtype, a tensor that is
stored transposed), it is read into memory of its own, and `settle` copies it from there.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.errors import StateError
from holdfast.image.regions import Comb, Region
from trainer_side.restore.image_map import Mapped
from trainer_side.state.split_tensor import Held


@dataclass(frozen=True)
class RegionTarget:
    """Memory for one region of one saved tensor.

    Attributes:
        entry: Index of the entry that holds the tensor.
        base: Where in the entry the tensor begins.
        comb: Where the region's bytes lie in the tensor.
        whole: Shape of the tensor, bytes of an element, and the region: what the comb is made of.
        memory: Of the region's size; bytes.
        copies: What was read, shaped as the region, and the tensor that it is copied to; None: `memory` is the
            tensor's own.
    """

    entry: int
    base: int
    comb: Comb
    whole: tuple[tuple[int, ...], int, Region]
    memory: np.ndarray
    copies: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, inside: int, source: np.ndarray) -> None:
        """Take what belongs to the region from bytes of the entry, which begin `inside` bytes into it."""
        copy_runs(self.comb, inside - self.base, source, self.memory, 0)

    def chunks(self, image: Mapped) -> Iterable[int]:
        base, span = image.entries[self.entry].offset + self.base, self.comb.span
        first, last = (base + span.offset) // image.chunk_bytes, (base + span.end - 1) // image.chunk_bytes
        before = 0
        for chunk in range(first, last + 1):
            after = self.comb.before((chunk + 1) * image.chunk_bytes - base)
            if after > before:
                yield chunk
            before = after


def copy_runs(comb: Comb, begin: int, source: np.ndarray, memory: np.ndarray, first: int) -> None:
    """Copy what belongs to a region from bytes of its tensor.

    Args:
        comb: Where the region's bytes lie in the tensor.
        begin: Where the source begins in it.
        source: Bytes of the tensor.
        memory: Where they go.
        first: The number of the region's byte with which the memory begins.
    """
    at, end = comb.before(begin), comb.before(begin + len(source))
    if at >= end:
        return
    for offset, run_bytes, stride, runs in comb.blocks(at, end):
        nbytes = run_bytes * runs
        there = np.ndarray((runs, run_bytes), np.uint8, source, offset - begin, (stride, 1))
        memory[at - first : at - first + nbytes].reshape(runs, run_bytes)[...] = there
        at += nbytes


@dataclass(frozen=True)
class ScatterTarget:
    """All regions that this rank holds of one entry; perhaps none."""

    regions: list[RegionTarget] = field(default_factory=list)

    def put(self, inside: int, _address: int, view: memoryview) -> None:
        """Take from bytes of the entry, which begin `inside` bytes into it. Any thread."""
        source = np.frombuffer(view, np.uint8)
        for region in self.regions:
            region.put(inside, source)


class Claims:
    """The live memory that regions are read into: no two of them into the same.

    Tied tensors are one memory at several paths. If what was saved for them is one tensor as well, it is read once; if
    not, the others are read beside it, and copied over it in their order.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # ascending, apart
        self._sources: dict[tuple[int, int], tuple[int, int, tuple[int, ...], Region]] = {}
        self.nbytes = 0

    def target(self, path: str, saved: torch.Tensor, entry: int, held: Held) -> RegionTarget | None:
        """The target of one part; None if it is empty, or is filled by another one.

        Args:
            path: For messages.
            saved: The whole tensor as the file describes it; its memory is not touched.
            entry: Where it lies.
            held: What this rank has of it.

        Raises:
            StateError: It does not lie in one piece in the file.
        """
        local, item_bytes = held.local, saved.element_size()
        if not local.numel():
            return None
        order = _order(path, saved)
        region = Region(
            tuple(held.region.start[dimension] for dimension in order),
            tuple(held.region.size[dimension] for dimension in order),
        )
        whole = (tuple(saved.shape[dimension] for dimension in order), item_bytes, region)
        comb = Comb(*whole)
        base = int(saved.storage_offset()) * item_bytes
        begin = local.data_ptr()
        span = (begin, begin + local.numel() * local.element_size())
        source = (entry, base, tuple(order), region)
        if self._sources.get(span) == source:
            return None
        as_it_lies = (
            order == sorted(order)
            and local.device.type == "cpu"
            and local.dtype == saved.dtype
            and not (local.is_conj() or local.is_neg())
        )
        if as_it_lies and self._claim(span):
            self._sources[span] = source
            self.nbytes += comb.nbytes
            return RegionTarget(entry, base, comb, whole, _bytes_of(local))
        read = torch.empty(region.size, dtype=saved.dtype)
        shaped = read.as_strided(local.shape, _strides(held.region.size, order))
        return RegionTarget(entry, base, comb, whole, _bytes_of(read), (shaped, local))

    def _claim(self, span: tuple[int, int]) -> bool:
        place = bisect.bisect_left(self._spans, span)
        after = self._spans[place : place + 1]
        before = self._spans[max(0, place - 1) : place]
        if (after and after[0][0] < span[1]) or (before and before[0][1] > span[0]):
            return False
        self._spans.insert(place, span)
        return True


def whole_entry(entry: int, nbytes: int, storage: torch.UntypedStorage) -> RegionTarget:
    """All of an entry: for a rank that takes it whole where others take parts of it."""
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    whole = ((nbytes,), 1, Region((0,), (nbytes,)))
    return RegionTarget(entry, 0, Comb(*whole), whole, memory)


def settle(targets: Iterable[ScatterTarget]) -> None:
    """Copy what could not be read into its place. Training thread, when all of it is there."""
    with torch.no_grad():
        for target in targets:
            for region in target.regions:
                if region.copies is not None:
                    read, local = region.copies
                    local.copy_(read)


def _order(path: str, saved: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in the file, without those of one place."""
    stride = saved.stride()
    order = [dimension for dimension, size in enumerate(saved.shape) if size != 1]
    order.sort(key=lambda dimension: -stride[dimension])
    step = 1
    for dimension in reversed(order):
        if stride[dimension] != step:
            raise StateError(
                f"{path}: the checkpoint has it as a view with strides {list(stride)} for {list(saved.shape)}, which "
                "cannot be read in parts; save it contiguous()"
            )
        step *= saved.shape[dimension]
    return order


def _strides(size: Sequence[int], order: Sequence[int]) -> list[int]:
    strides, step = [1] * len(size), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= size[dimension]
    return strides


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    storage = tensor.untyped_storage()
    begin = tensor.storage_offset() * tensor.element_size()
    memory: np.ndarray = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory[begin : begin + tensor.numel() * tensor.element_size()]
