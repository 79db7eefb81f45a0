"""The memory that an image is read into: reusable windows, and targets that take the bytes from there.

    bytes of the entry   ····│····│·xx·│·xx·│·xx·│····      as they were read, window by window
    EntryTarget          all of an entry                    in host memory
    RegionTarget         xxxxxx                             the rank's own memory: runs are copied, nothing is gathered
    ScatterTarget        all regions that the rank holds of one entry

If possible, a region is read straight into live memory. Otherwise (another dtype, a tensor that is stored transposed)
it is read into memory of its own, and `copy_regions` copies it from there. For a tensor on a device, that memory is on
the device if there is room (`device_memory.py`): bytes are then transferred in sections, and the device copies.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from holdfast.crc import crc32
from holdfast.errors import StateError
from holdfast.image.entries import Extent
from holdfast.image.regions import Comb, Region
from holdfast.ring.pages import aligned_buffer
from trainer_side.restore.device_sections import SectionPart
from trainer_side.restore.structure import ImageMap
from trainer_side.state.split_tensor import HeldPart


@dataclass(frozen=True)
class RegionTarget:
    """Memory for one region of one saved tensor."""

    entry: int  # that holds the tensor
    base: int  # where in the entry the tensor begins
    shape: tuple[int, ...]  # of the tensor
    item_bytes: int
    region: Region
    memory: np.ndarray  # of the host, as bytes; empty if the region is read into a device
    # The memory as a tensor of the region's shape, and the tensor to copy it to; None: `memory` is the live tensor's.
    copies: tuple[torch.Tensor, torch.Tensor] | None = None
    device: torch.Tensor | None = None  # memory of the region, as bytes
    # The bytes can be read into the tensor itself on its device: it is not in use yet and has their memory order.
    is_fresh: bool = False

    @functools.cached_property
    def comb(self) -> Comb:
        """Where the region's bytes lie in the tensor."""
        return Comb(self.shape, self.item_bytes, self.region)

    def put(self, entry_offset: int, source: np.ndarray) -> None:
        """Copy the region's bytes from `source`, which begins `entry_offset` bytes into the entry."""
        if self.device is None:
            copy_runs(self.comb, entry_offset - self.base, source, self.memory, 0)

    def parts(self, entry_offset: int, begin: int, nbytes: int) -> Iterator[SectionPart]:
        """As `ScatterTarget.parts`."""
        if self.device is None:
            return
        first = entry_offset - self.base  # of the tensor
        at, end = self.comb.bytes_before(first), self.comb.bytes_before(first + nbytes)
        for offset, run_bytes, stride, runs in self.comb.blocks(at, end):
            yield SectionPart(self.device, at, begin + offset - first, run_bytes, runs, stride)
            at += run_bytes * runs

    def chunks(self, image: ImageMap) -> Iterable[int]:
        base, span = image.entries[self.entry].offset + self.base, self.comb.span
        first, last = (base + span.offset) // image.chunk_bytes, (base + span.end - 1) // image.chunk_bytes
        before = 0
        for chunk in range(first, last + 1):
            after = self.comb.bytes_before((chunk + 1) * image.chunk_bytes - base)
            if after > before:
                yield chunk
            before = after


def copy_runs(comb: Comb, begin: int, source: np.ndarray, memory: np.ndarray, first: int) -> None:
    """Copy a region's bytes from a part of its tensor.

    `comb`: Where the region's bytes lie in the tensor. `begin`: Where the source begins in the tensor. `first`: Where
    the memory begins in the region.
    """
    at, end = comb.bytes_before(begin), comb.bytes_before(begin + len(source))
    if at >= end:
        return
    for offset, run_bytes, stride, runs in comb.blocks(at, end):
        nbytes = run_bytes * runs
        there = np.ndarray((runs, run_bytes), np.uint8, source, offset - begin, (stride, 1))
        memory[at - first : at - first + nbytes].reshape(runs, run_bytes)[...] = there
        at += nbytes


def whole_entry(entry: int, storage: torch.UntypedStorage) -> RegionTarget:
    """Return a target for all of an entry, in a storage of the entry's size."""
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    nbytes = storage.nbytes()
    whole = (nbytes,), 1, Region((0,), (nbytes,))
    if memory.device.type != "cpu":
        return RegionTarget(entry, 0, *whole, np.empty(0, np.uint8), device=memory)
    return RegionTarget(entry, 0, *whole, memory.numpy())


@dataclass(frozen=True)
class ScatterTarget:
    """All regions that this rank holds of one entry; perhaps none."""

    regions: list[RegionTarget] = field(default_factory=list)

    @classmethod
    def whole(cls, entry: int, storage: torch.UntypedStorage) -> ScatterTarget:
        return cls([whole_entry(entry, storage)])

    def put(self, entry_offset: int, _address: int, view: memoryview) -> None:
        """Copy the regions' bytes from `view`, which begins `entry_offset` bytes into the entry. Any thread."""
        source = np.frombuffer(view, np.uint8)
        for region in self.regions:
            region.put(entry_offset, source)

    def parts(self, entry_offset: int, begin: int, nbytes: int) -> list[SectionPart]:
        """Return the parts for a device in `nbytes` of the entry from `entry_offset`, read to `begin` of a window."""
        return [part for region in self.regions for part in region.parts(entry_offset, begin, nbytes)]


class Claims:
    """Assigns live memory to regions, so that no two are read into the same memory.

    Tied tensors share memory at several paths. If they were also saved as one tensor, it is read once; if not, the
    others are read into other memory, and copied over the first in order. `live`: Whether the script uses the tensors
    already.
    """

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._spans: list[tuple[int, int]] = []  # ascending, apart
        self._sources: dict[tuple[int, int], tuple[int, int, tuple[int, ...], Region]] = {}
        self.nbytes = 0

    def target(self, path: str, saved: torch.Tensor, entry: int, held: HeldPart) -> RegionTarget | None:
        """Return the target of one part; None if the part is empty, or another target fills it.

        `saved`: The whole tensor as the file describes it; its memory is not touched. `held`: This rank's part of it.
        StateError: the tensor does not lie in one piece in the file.
        """
        local, item_bytes = held.local, saved.element_size()
        if not local.numel():
            return None
        order = _order(path, saved)
        region = Region(*(tuple(one[dimension] for dimension in order) for one in held.region))
        base = int(saved.storage_offset()) * item_bytes
        place = entry, base, tuple(saved.shape[dimension] for dimension in order), item_bytes, region
        begin = local.data_ptr()
        span = (begin, begin + local.numel() * local.element_size())
        source = (entry, base, tuple(order), region)
        if self._sources.get(span) == source:
            return None
        is_same_layout = order == sorted(order) and same_bits(saved, local)
        on_cpu = local.device.type == "cpu"
        is_in_place = is_same_layout and (on_cpu or not self._live) and self._claim(span)
        if is_in_place and on_cpu:
            self._sources[span] = source
            self.nbytes += region.numel * item_bytes
            return RegionTarget(*place, _bytes_of(local))
        read = torch.empty(region.size, dtype=saved.dtype, device="cpu")
        shaped = read.as_strided(local.shape, _strides(held.region.size, order))
        return RegionTarget(*place, _bytes_of(read), (shaped, local), is_fresh=is_in_place)

    def _claim(self, span: tuple[int, int]) -> bool:
        place = bisect.bisect_left(self._spans, span)
        neighbours = self._spans[max(0, place - 1) : place + 1]
        if any(begin < span[1] and span[0] < end for begin, end in neighbours):
            return False
        self._spans.insert(place, span)
        return True


def copy_regions(targets: Iterable[ScatterTarget]) -> None:
    """Copy regions that could not be read into their final place. Training thread, after all bytes arrived."""
    on_device: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for target in targets:
            for region in target.regions:
                if region.copies is None:
                    continue
                read, local = region.copies
                if region.device is None:
                    local.copy_(read)
                else:
                    to, of = on_device.setdefault(local.dtype, ([], []))
                    to.append(local)
                    of.append(read)
        for to, of in on_device.values():
            torch._foreach_copy_(to, of)  # one launch, or a few


def same_bits(read: torch.Tensor, local: torch.Tensor) -> bool:
    """Whether a copy of the bytes to a live tensor is a copy of the values."""
    return local.dtype == read.dtype and not (local.is_conj() or local.is_neg())


def _order(path: str, saved: torch.Tensor) -> list[int]:
    """Return the dimensions in their order in the file, without those of size 1."""
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


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that lies in one piece, on its device."""
    begin = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return memory[begin : begin + tensor.numel() * tensor.element_size()]


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    memory: np.ndarray = bytes_in(tensor).numpy()
    return memory


class Sum(NamedTuple):
    """A CRC-32, and how many bytes it covers."""

    crc32: int
    nbytes: int

    @classmethod
    def of(cls, view: memoryview) -> Sum:
        return cls(crc32(view), view.nbytes)


class EntryTarget(NamedTuple):
    """The host memory to which all bytes of one entry go."""

    address: int
    memory: memoryview

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> EntryTarget:
        """The memory of a CPU storage; the view keeps the storage alive."""
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return cls(storage.data_ptr(), memory.numpy().data)

    def put(self, entry_offset: int, address: int, view: memoryview) -> None:
        """Copy `view`, which begins `entry_offset` bytes into the entry. Any thread."""
        # memmove releases the GIL, so other readers proceed.
        ctypes.memmove(self.address + entry_offset, address, view.nbytes)

    def parts(self, _entry_offset: int, _begin: int, _nbytes: int) -> Sequence[SectionPart]:
        """Nothing: the entry is in host memory."""
        return ()


EntrySink = EntryTarget | ScatterTarget
"""Takes bytes of one entry as they are read: all of them, or the parts that a rank holds."""


class ReadWindow(NamedTuple):
    """Page-aligned memory of one reader."""

    address: int
    memory: memoryview

    @classmethod
    def of_size(cls, nbytes: int) -> ReadWindow:
        """Allocate memory, which takes space only when it is touched."""
        memory = aligned_buffer(nbytes)
        return cls(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), memory)


class EntryPart(NamedTuple):
    """A part of one entry: `nbytes` from `offset` of the image on, which is `entry_offset` bytes into the entry."""

    offset: int
    nbytes: int
    entry: int
    entry_offset: int


class ReadRun(NamedTuple):
    """One request: `nbytes` from `offset` of the source on, and the parts of entries that lie in it, in order.

    `begins`: Where each part begins in these bytes.
    """

    offset: int
    nbytes: int
    parts: tuple[EntryPart, ...]
    begins: tuple[int, ...]


class ChunkWindows:
    """Finds the parts of entries in extents of one image. Immutable; any thread.

    `entries`: Indices of the entries to find; all other bytes are ignored.
    """

    def __init__(self, image: ImageMap, entries: Collection[int]) -> None:
        self._image = image
        filled = [index for index in entries if image.entries[index].nbytes]
        self._order = sorted(filled, key=lambda index: image.entries[index].offset)
        self._ends = [image.entries[index].offset + image.entries[index].nbytes for index in self._order]

    def parts(self, extents: Sequence[Extent]) -> list[EntryPart]:
        return [part for extent in extents for part in self._parts_between(extent.offset, extent.end)]

    def runs(
        self,
        extents: Sequence[Extent],
        offset: int,
        run_bytes: int,
        *,
        wanted: Sequence[Extent] | None = None,
    ) -> Iterator[ReadRun]:
        """Yield requests of at most `run_bytes` that read extents of the image: in order, without gaps.

        `extents`: The extents, ascending; they lie back to back from `offset` of the source on. `wanted`: Only parts of
        entries within these extents are returned; by default all.
        """
        *befores, nbytes = itertools.accumulate((extent.nbytes for extent in extents), initial=0)
        end = offset + nbytes
        pieces = [
            (before + part.offset - extent.offset, part)
            for before, extent in zip(befores, extents, strict=True)
            for needed in ((extent,) if wanted is None else _overlaps(extent, wanted))
            for part in self._parts_between(needed.offset, needed.end)
        ]
        first = 0
        for begin in range(offset, end, run_bytes):
            stop = min(end, begin + run_bytes)
            low, high = begin - offset, stop - offset
            parts, begins = [], []
            while first < len(pieces) and pieces[first][0] < high:
                position, part = pieces[first]
                skipped = max(0, low - position)
                nbytes = min(position + part.nbytes, high) - position - skipped
                place = part.entry, part.entry_offset + skipped
                parts.append(EntryPart(part.offset + skipped, nbytes, *place))
                begins.append(position + skipped - low)
                if position + part.nbytes > high:
                    break
                first += 1
            yield ReadRun(begin, stop - begin, tuple(parts), tuple(begins))

    def _parts_between(self, begin: int, end: int) -> list[EntryPart]:
        found = []
        for position in range(bisect.bisect_right(self._ends, begin), len(self._order)):
            index = self._order[position]
            entry = self._image.entries[index]
            if entry.offset >= end:
                break
            offset = max(begin, entry.offset)
            stop = min(end, entry.offset + entry.nbytes)
            found.append(EntryPart(offset, stop - offset, index, offset - entry.offset))
        return found


def _overlaps(extent: Extent, wanted: Sequence[Extent]) -> Iterator[Extent]:
    for needed in wanted:
        begin, end = max(extent.offset, needed.offset), min(extent.end, needed.end)
        if begin < end:
            yield Extent(begin, end - begin)
