"""Fingerprints of this rank's replicas at the saved instant, for the stager to compare (`holdfast/image/replicas.py`).

    tensor   │row│row│row│row│row│row│row│row│row│row│row│row│row│…│tail│      rows of 64 bytes
                   ▲               ▲               ▲               ▲           every stride-th, from a row that the
                   └───────────────┴───────────────┴── CRC-32 ─────┘           step draws; the tail always

At most 64 rows (4 KiB) of a tensor are read, so the cost depends on the number of tensors, not on their size. Gated
tensors in host memory are sampled by the copy thread before the gate opens: no update can lie between copy and
fingerprint. All else is sampled in `save()`: a few launches gather the samples of a device (`DeviceSamples`), and one
small copy on the current stream brings them to the host. Only the copy thread waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from holdfast.crc import crc32, crc32_of_each
from holdfast.image.replicas import ROW_BYTES, digest, encode, first_row, stride
from trainer_side.save.device_stream import stream_of
from trainer_side.save.process_memory import PROCESS_BEGIN, PROCESS_MEMORY
from trainer_side.state import accelerator
from trainer_side.state.accelerator import StreamEvent, copy_to_host
from trainer_side.state.survey import Sources, StorageSource

if TYPE_CHECKING:
    import numpy.typing as npt

    _Numbers = npt.NDArray[np.int64]
Span = Callable[[int, int], torch.Tensor | None]  # bytes of the device, from an address on


class _Plan(NamedTuple):
    """The sampled rows of some tensors, and the rest after each one's last whole row: one value per tensor."""

    strides: _Numbers  # distance between sampled rows
    rows: _Numbers  # the most rows that are sampled
    last_first: _Numbers  # one row less is sampled if the step draws a first row after this one
    begins: _Numbers  # place of the first sampled row in the table
    tails: _Numbers  # place of the row that holds the rest
    rest_at: _Numbers  # where the rest begins in that row
    rest_bytes: _Numbers  # 0 without a rest

    @classmethod
    def of(cls, addresses: _Numbers, sizes: _Numbers) -> _Plan:
        whole, rest = np.divmod(sizes, ROW_BYTES)
        strides = np.array([*map(stride, sizes.tolist())], np.int64)
        rows = -(-whole // strides)
        ends = np.cumsum(rows)
        has_rest = (rest > 0).astype(np.int64)
        tails = rows.sum() + np.cumsum(has_rest) - has_rest
        rest_at = np.where(whole > 0, ROW_BYTES - rest, addresses % ROW_BYTES)
        return cls(strides, rows, whole - 1 - (rows - 1) * strides, ends - rows, tails, rest_at, rest)


class DeviceRows(NamedTuple):
    entries: list[int]
    plan: _Plan
    step: int
    memory: torch.Tensor
    arrived: StreamEvent | None

    def crcs(self) -> Iterator[tuple[int, int]]:
        """Yield entry and CRC. Copy thread; waits for samples still in flight."""
        if self.arrived is not None:
            self.arrived.synchronize()
        memory, plan = self.memory.view(-1).numpy().data, self.plan
        counts = plan.rows - (_firsts(plan.strides, self.step) > plan.last_first)
        begins, ends = plan.begins * ROW_BYTES, (plan.begins + np.maximum(counts, 0)) * ROW_BYTES
        rests = plan.tails * ROW_BYTES + plan.rest_at
        columns = (begins, ends, rests, rests + plan.rest_bytes)
        for entry, begin, end, rest, rest_end in zip(
            self.entries, *(column.tolist() for column in columns), strict=True
        ):
            found = crc32(memory[begin:end])
            yield entry, crc32(memory[rest:rest_end], found) if rest < rest_end else found


class DeviceSamples:
    """Gathers the samples of a plan's tensors on one device. Training thread."""

    def __init__(self, device: torch.device, span: Span) -> None:
        self._device, self._span = device, span
        self._places: list[tuple[int, int]] = []
        self._plan: _Plan | None = None
        # Distance between rows, and the last row that may be the first one.
        self._groups: list[tuple[int, int]] = []
        self._rows = self._index = self._group = torch.empty(0, device="cpu")

    def gather(self, sources: Sequence[StorageSource], step: int) -> DeviceRows | None:
        """Queue the samples on the current stream; None: they must be taken one by one."""
        filled = [source for source in sources if source.nbytes]
        places = [(source.data_ptr, source.nbytes) for source in filled]
        if places != self._places:
            self._places = places
            self._plan = self._lay_out(*np.array(places, np.int64).T) if places else None
        if self._plan is None:
            return None
        pinned = self._device.type != "cpu"
        firsts = torch.empty(len(self._groups), dtype=torch.int64, device="cpu", pin_memory=pinned)
        firsts.numpy()[:] = [min(first_row(step, one), last) * ROW_BYTES for one, last in self._groups]
        index = firsts.to(self._device, non_blocking=True).index_select(0, self._group)
        rows = self._rows.index_select(0, index.add_(self._index))
        return DeviceRows([source.entry for source in filled], self._plan, step, *copy_to_host(rows))

    def _lay_out(self, addresses: _Numbers, sizes: _Numbers) -> _Plan | None:
        """Find the rows; None if memory cannot be viewed by address, or a tensor below a row's size lies across two."""
        plan = _Plan.of(addresses, sizes)
        is_small = sizes < ROW_BYTES
        if (addresses[is_small] % ROW_BYTES + sizes[is_small] > ROW_BYTES).any():
            return None  # a row around it might reach into unmapped memory
        begin = int(addresses.min()) // ROW_BYTES * ROW_BYTES
        nbytes = -(-(int((addresses + sizes).max()) - begin) // ROW_BYTES) * ROW_BYTES
        memory = self._span(begin, nbytes)
        if memory is None:
            return None
        self._rows = memory.as_strided((nbytes - ROW_BYTES + 1, ROW_BYTES), (1, 1))
        of_row = np.repeat(np.arange(len(sizes)), plan.rows)
        number = np.arange(len(of_row)) - plan.begins[of_row]
        strides = plan.strides[of_row]
        is_last = number == plan.rows[of_row] - 1
        # A last row drawn beyond the tensor is replaced by another one and ignored.
        last_first = np.where(is_last, plan.last_first[of_row], strides - 1)
        rests = np.flatnonzero(plan.rest_bytes)
        ends = np.where(is_small, addresses // ROW_BYTES * ROW_BYTES, addresses + sizes - ROW_BYTES)[rests]
        index = np.concatenate([addresses[of_row] + number * strides * ROW_BYTES, ends]) - begin
        keys = np.stack([strides, last_first], axis=1)
        groups, group = np.unique(
            np.concatenate([keys, np.tile([1, 0], (len(rests), 1))]), axis=0, return_inverse=True
        )
        self._groups = [(one, last) for one, last in groups.tolist()]
        self._index = self._to_device(index)
        self._group = self._to_device(group.reshape(-1).astype(np.int32))
        return plan

    def _to_device(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        here = torch.from_numpy(numbers)
        if self._device.type == "cpu":
            return here
        return here.pin_memory().to(self._device, non_blocking=True)


def _firsts(strides: _Numbers, step: int) -> _Numbers:
    values, places = np.unique(strides, return_inverse=True)
    return np.array([first_row(step, one) for one in values.tolist()], np.int64)[places.reshape(-1)]


_ROW = np.dtype((np.void, ROW_BYTES))
_AT_ONCE_MAX = 1024  # per loop in C, during which other threads wait
_WHOLE_BYTES_MAX = 4096  # up to here every row is sampled: see `stride`


@dataclass(frozen=True)
class _GatheredSamples:
    """Samples of several entries on their way from a device, taken one by one."""

    entries: list[int]
    sizes: list[int]
    memory: torch.Tensor
    arrived: StreamEvent | None

    def crcs(self) -> Iterator[tuple[int, int]]:
        """Yield entry and CRC. Copy thread; waits for samples still in flight."""
        if self.arrived is not None:
            self.arrived.synchronize()
        memory, offset = self.memory.numpy().data, 0
        for entry, nbytes in zip(self.entries, self.sizes, strict=True):
            yield entry, crc32(memory[offset : offset + nbytes])
            offset += nbytes


class Fingerprints:
    """The fingerprints of one checkpoint. The training thread begins them, the copy thread finishes them.

    `entries`: The watched ones (`holdfast.image.replicas.watched_entries`). `gated`: Per entry, whether it is copied
    behind the gate. `step` selects the sampled rows. `shared`: Sharded entries of which several ranks hold the same
    region. `samples`: By device; reused by all checkpoints of one plan.
    """

    def __init__(
        self,
        entries: Sequence[int],
        gated: Sequence[bool],
        step: int,
        shared: Collection[int] = (),
        samples: dict[torch.device, DeviceSamples] | None = None,
    ) -> None:
        self._samples = {} if samples is None else samples
        self._watched, self._shared = entries, shared
        self._gated, self._step = gated, step
        self._crcs: dict[int, int] = {}
        self._gathered: list[_GatheredSamples | DeviceRows] = []
        self._deferred: list[int] = []

    def sample_now(self, sources: Sources, *, also_gated: bool = False) -> None:
        """Sample the tensors that may change once `save()` has returned (all of them with `also_gated`), and all on a
        device. Training thread.
        """
        held_back = [not also_gated and self._gated[entry] for entry in self._watched]
        if accelerator.kind() is not None:
            # Device tensors are sampled here, in stream order, so that the copy thread allocates no device memory.
            here = map(sources.__getitem__, self._watched)
            held_back = [
                held and source is not None and source.device.type == "cpu"
                for held, source in zip(held_back, here, strict=True)
            ]
        self._deferred = [*compress(self._watched, held_back)]
        self._sample([*compress(self._watched, map(not_, held_back))], sources)

    def sample_gated(self, sources: Sources) -> None:
        """Sample the rest. Behind the gate; copy thread."""
        self._sample(self._deferred, sources)

    def text(self) -> str:
        """Return the fingerprints for DONE. Copy thread; waits for samples still in flight."""
        self._collect()
        return encode([*map(self._crcs.__getitem__, self._watched)])

    def digest(self) -> str:
        """Return a digest of those that are the same on every rank, without split entries. Copy thread, as `text`."""
        self._collect()
        same = [entry for entry in self._watched if entry not in self._shared]
        return digest(encode([*map(self._crcs.__getitem__, same)]))

    def _sample(self, entries: Sequence[int], sources: Sources) -> None:
        self._crcs.update(dict.fromkeys(entries, 0))  # this rank may hold nothing of a split tensor
        there = [*filter(None, map(sources.__getitem__, entries))]
        if accelerator.kind() is None:
            self._crcs.update(_crcs(there, self._step))
            return
        self._crcs.update(_crcs([source for source in there if source.device.type == "cpu"], self._step))
        # All are on one device: `save()` refuses several.
        if on_device := [source for source in there if source.device.type != "cpu"]:
            device = on_device[0].device
            if device not in self._samples:
                self._samples[device] = DeviceSamples(device, stream_of(device).span)
            gathered = self._samples[device].gather(on_device, self._step)
            self._gathered.append(_gather(on_device, self._step) if gathered is None else gathered)

    def _collect(self) -> None:
        for gathered in self._gathered:
            self._crcs.update(gathered.crcs())
        self._gathered.clear()


def _crcs(sources: Sequence[StorageSource], step: int) -> dict[int, int]:
    """Return the CRC of each host tensor by entry, with few calls: another thread needs the GIL meanwhile."""
    found: dict[int, int] = {}
    whole = [source for source in sources if source.nbytes <= _WHOLE_BYTES_MAX]
    for begin in range(0, len(whole), _AT_ONCE_MAX):
        group = whole[begin : begin + _AT_ONCE_MAX]
        places = [
            slice(address - PROCESS_BEGIN, address - PROCESS_BEGIN + nbytes)
            for _, _, _, nbytes, address, _ in group
        ]
        crcs = crc32_of_each(map(PROCESS_MEMORY.__getitem__, places))
        found.update(zip([source.entry for source in group], crcs, strict=True))
    for source in sources:
        if source.nbytes > _WHOLE_BYTES_MAX:
            found[source.entry] = _crc_of_sample(source, step)
    return found


def _crc_of_sample(source: StorageSource, step: int) -> int:
    nbytes = source.nbytes
    rows_apart = stride(nbytes)
    rows, rest = divmod(nbytes, ROW_BYTES)
    memory = memoryview((ctypes.c_uint8 * nbytes).from_address(source.data_ptr))
    sample = np.frombuffer(memory, _ROW, rows)[first_row(step, rows_apart) :: rows_apart].tobytes()
    return crc32(sample + ctypes.string_at(source.data_ptr + nbytes - rest, rest))


def _gather(sources: Sequence[StorageSource], step: int) -> _GatheredSamples:
    """Queue the samples of tensors on one device on its current stream."""
    pieces: list[torch.Tensor] = []
    sizes: list[int] = []
    for source in sources:
        memory, rows_apart = source.bytes(), stride(source.nbytes)
        if rows_apart == 1:
            pieces.append(memory)
            sizes.append(source.nbytes)
            continue
        whole = source.nbytes // ROW_BYTES * ROW_BYTES
        rows = memory[:whole].view(-1, ROW_BYTES)[first_row(step, rows_apart) :: rows_apart]
        pieces += [rows.reshape(-1), memory[whole:]]
        sizes.append(rows.numel() + source.nbytes - whole)
    return _GatheredSamples([source.entry for source in sources], sizes, *copy_to_host(torch.cat(pieces)))
