"""Fingerprints of this rank's replicas at the saved instant, for the stager to compare (`holdfast/image/replicas.py`).

    tensor   │row│row│row│row│row│row│row│row│row│row│row│row│row│…│tail│      rows of 64 bytes
                   ▲               ▲               ▲               ▲           every stride-th, from a row that the
                   └───────────────┴───────────────┴── CRC-32 ─────┘           step draws; the tail always

At most 64 rows (4 KiB) of a tensor are read, so the cost depends on the number of tensors, not on their size. Gated
tensors in host memory are sampled by the copy thread before the gate opens: no update can lie between copy and
fingerprint. All else is sampled in `save()`: on a device the samples are gathered there by a few launches
(`device_samples.py`), and brought over in one small copy on the stream that is current; only that copy is waited for,
by the copy thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

import numpy as np
import torch

from holdfast.crc import crc32, crc32_of_each
from holdfast.image.replicas import ROW_BYTES, digest, encode, first_row, stride
from trainer_side.save.device_lane import lane_of
from trainer_side.save.device_samples import DeviceRows, DeviceSamples
from trainer_side.save.process_memory import PROCESS_BEGIN, PROCESS_MEMORY
from trainer_side.state import accelerator
from trainer_side.state.accelerator import StreamEvent, brought
from trainer_side.state.survey import StorageSource

_ROW = np.dtype((np.void, ROW_BYTES))
_AT_ONCE_MAX = 1024  # in a loop in C, which other threads wait for
_WHOLE_BYTES_MAX = 4096  # below it every row is looked at: see `stride`


@dataclass(frozen=True)
class _Gathered:
    """Samples of several entries on their way from a device, taken one by one."""

    entries: list[int]
    sizes: list[int]
    memory: torch.Tensor
    arrived: StreamEvent | None

    def crcs(self) -> Iterator[tuple[int, int]]:
        """Entry and CRC. Copy thread; waits for what is still on its way."""
        if self.arrived is not None:
            self.arrived.synchronize()
        memory, offset = self.memory.numpy().data, 0
        for entry, nbytes in zip(self.entries, self.sizes, strict=True):
            yield entry, crc32(memory[offset : offset + nbytes])
            offset += nbytes


class Fingerprints:
    """The fingerprints of one checkpoint. The training thread makes and begins them, the copy thread ends them.

    Args:
        entries: Those that are watched (`holdfast.image.replicas.watched`).
        gated: Per entry, whether it is copied behind the gate.
        step: The checkpoint's step: says which rows are looked at.
        shared: Those that are split, of which some ranks hold the same region.
        samples: By device; kept from one checkpoint of a plan to the next, and added to.
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
        self._gathered: list[_Gathered | DeviceRows] = []
        self._left: list[int] = []

    def take_now(self, sources: Sequence[StorageSource | None], *, also_gated: bool = False) -> None:
        """Sample what may change as soon as `save()` has returned, and all that is on a device. Training thread.

        Args:
            sources: Per entry its storage.
            also_gated: Nothing is held back: all of it may change.
        """
        held_back = [not also_gated and self._gated[entry] for entry in self._watched]
        if accelerator.kind() is not None:
            # What is on a device is sampled there, in order: the copy thread takes no memory of the device.
            here = map(sources.__getitem__, self._watched)
            held_back = [
                held and source is not None and source.device.type == "cpu"
                for held, source in zip(held_back, here, strict=True)
            ]
        self._left = [*compress(self._watched, held_back)]
        self._take([*compress(self._watched, map(not_, held_back))], sources)

    def take_gated(self, sources: Sequence[StorageSource | None]) -> None:
        """Sample the rest. Behind the gate; copy thread."""
        self._take(self._left, sources)

    def text(self) -> str:
        """For DONE. Copy thread; waits for what is still on its way from a device."""
        self._arrive()
        return encode([*map(self._crcs.__getitem__, self._watched)])

    def digest(self) -> str:
        """Short words for those that are the same on every rank: entries that are split are left out. As `text`."""
        self._arrive()
        same = (
            [entry for entry in self._watched if entry not in self._shared] if self._shared else self._watched
        )
        return digest(encode([*map(self._crcs.__getitem__, same)]))

    def _take(self, entries: Sequence[int], sources: Sequence[StorageSource | None]) -> None:
        self._crcs.update(dict.fromkeys(entries, 0))  # of a tensor that is split, nothing may be here
        there = [*filter(None, map(sources.__getitem__, entries))]
        if accelerator.kind() is None:
            self._crcs.update(_crcs(there, self._step))
            return
        self._crcs.update(_crcs([source for source in there if source.device.type == "cpu"], self._step))
        # They are all on one device: `save()` refuses others.
        if on_device := [source for source in there if source.device.type != "cpu"]:
            device = on_device[0].device
            if device not in self._samples:
                self._samples[device] = DeviceSamples(device, lane_of(device).span)
            gathered = self._samples[device].gather(on_device, self._step)
            self._gathered.append(_gather(on_device, self._step) if gathered is None else gathered)

    def _arrive(self) -> None:
        for gathered in self._gathered:
            self._crcs.update(gathered.crcs())
        self._gathered.clear()


def _crcs(sources: Sequence[StorageSource], step: int) -> dict[int, int]:
    """Entry and CRC of tensors in host memory. Few calls for each: another thread wants to run Python meanwhile."""
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


def _gather(sources: Sequence[StorageSource], step: int) -> _Gathered:
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
    return _Gathered([source.entry for source in sources], sizes, *brought(torch.cat(pieces)))
