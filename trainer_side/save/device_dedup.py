"""Copies device tensors that do not change (the base model under an adapter, constants) to the host only once.

    save()        on the current stream: hashes of each large tensor that may be unchanged
    copy thread   hashes arrive: equal to those of the bytes in the area? the tensor was rightly left out
                                 otherwise the step is withdrawn, and the tensor is copied at each save from now on

A tensor is left out after `_PROVEN` saves with the same hashes, if the area already has these bytes, the tensor has not
moved and torch has counted no change. Changes that torch does not count (`.data`, foreign kernels) show in the hashes:
sums of words, each multiplied by a random 64-bit number of its place (multilinear hashing, Carter and Wegman
1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). A changed tensor passes for unchanged with a
probability below 2**-31. `save()` transfers no byte for it and does not wait; the device reads each byte once, and
writes and reads products of twice that size.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.image.layout import Layout
from trainer_side.save.copy_plan import CopyPiece
from trainer_side.state.accelerator import StreamEvent, copy_to_host
from trainer_side.state.survey import Sources

_NBYTES_MIN = 256 << 10  # below it a copy is as cheap as the calls of torch for a hash
_PROVEN = 2
_WORD_BYTES = 4
_ROW_WORDS = 1024
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES
_LOW = 2**32 - 1
_PART_BYTES = 32 << 20  # each has a hash of its own; the products of one take twice as much memory

# Address of the used part, its start in the storage, changes that torch has counted.
Place = tuple[int, int, int]


class SkippedBytesChanged(Exception):
    """Bytes of the tensor `path` that were left out of a copy have changed after all."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has changed, and torch has not counted it")
        self.path = path


@dataclass(frozen=True)
class _AreaContent:
    """The bytes of an entry in the area: where they were copied from, and the hashes of their parts."""

    place: Place
    hashes: tuple[int, ...]


@dataclass
class HashHistory:
    """The hashes of one tensor over earlier saves, whichever area they went to."""

    hashes: tuple[int, ...]  # of its parts at the last save
    unchanged_saves: int = 0  # consecutive saves with these hashes
    changes: int = 0

    def record(self, hashes: tuple[int, ...]) -> None:
        if hashes == self.hashes:
            self.unchanged_saves += 1
        else:
            self.hashes, self.unchanged_saves, self.changes = hashes, 1, self.changes + 1


class _PendingHashes(NamedTuple):
    """An entry whose hashes are on their way to the host."""

    entry: int
    place: Place
    hash_count: int
    is_skipped: bool


class DeviceDedup:
    """Knows which bytes of one area need not be copied again. `verify` belongs to the copy thread, `forget` to any, all
    else to the training thread; a save waits for the previous copy, so they never overlap.

    `pieces` are those of this rank's slice that are copied in `save()`. `seen` is the history of each tensor, by path
    and range; all areas of a rank share it.
    """

    def __init__(
        self, pieces: Iterable[CopyPiece], layout: Layout, seen: dict[tuple[str, int, int], HashHistory]
    ) -> None:
        by_entry: dict[int, list[CopyPiece]] = {}
        for piece in pieces:
            by_entry.setdefault(piece.entry, []).append(piece)
        self._ranges: dict[int, tuple[int, int]] = {}
        for entry, mine in by_entry.items():
            begin = min(piece.entry_offset for piece in mine)
            end = max(piece.entry_offset + piece.nbytes for piece in mine)
            # Entries whose parts lie apart are always copied.
            if _NBYTES_MIN <= end - begin == sum(piece.nbytes for piece in mine):
                self._ranges[entry] = begin, end
        self._paths = {tensor.entry: tensor.path for tensor in layout.tensors if tensor.entry in self._ranges}
        self._tensor_entries: Sequence[int] = ()
        self._tensors: list[int] = []  # indices of the tensors that may be left out
        self._known: dict[int, _AreaContent] = {}
        self._histories = seen
        self._pending: list[_PendingHashes] = []
        self._hashes: torch.Tensor | None = None
        self._arrived: StreamEvent | None = None

    def versions(self, tensors: Sequence[torch.Tensor], tensor_entries: Sequence[int]) -> dict[int, int]:
        """Version counters by entry, for each entry that may be left out."""
        if tensor_entries is not self._tensor_entries:
            self._tensor_entries = tensor_entries
            self._tensors = [place for place, entry in enumerate(tensor_entries) if entry in self._ranges]
        counted: dict[int, int] = {}
        for place in self._tensors:
            entry, tensor = tensor_entries[place], tensors[place]
            # In inference mode torch counts nothing: the hashes alone show changes.
            counted[entry] = counted.get(entry, 0) + (0 if tensor.is_inference() else tensor._version)
        return counted

    def find_unchanged(self, sources: Sources, versions: Mapping[int, int]) -> frozenset[int]:
        """Queue the hashes on the current stream; return the entries that need not be copied into the area. `versions`:
        Result of `versions`; entries that are missing in it are copied.
        """
        self._pending, self._hashes = [], None
        spared: set[int] = set()
        queued: list[torch.Tensor] = []
        for entry, (begin, end) in self._ranges.items():
            # A copied entry counts as known only once it has landed.
            known, source = self._known.pop(entry, None), sources[entry]
            if (
                source is None
                or entry not in versions
                or source.device.type == "cpu"
                or (source.start_bytes + begin) % _WORD_BYTES
            ):
                continue
            seen = self._histories.get((self._paths[entry], begin, end))
            if seen is not None and seen.changes >= _PROVEN:
                continue
            try:
                hashes = _hashes(source.bytes()[begin:end])
            except torch.OutOfMemoryError:  # no room for the products: copy it
                continue
            queued += hashes
            place = (source.data_ptr, source.start_bytes, versions[entry])
            is_steady = (
                seen is not None
                and seen.unchanged_saves >= _PROVEN
                and known == _AreaContent(place, seen.hashes)
            )
            if is_steady and known is not None:
                self._known[entry] = known
                spared.add(entry)
            self._pending.append(_PendingHashes(entry, place, len(hashes), entry in spared))
        if queued:
            self._hashes, self._arrived = copy_to_host(torch.stack(queued))
        return frozenset(spared)

    def verify(self) -> None:
        """Check the hashes when the copy has landed, before any byte of it is used. SkippedBytesChanged: a tensor that
        was left out has changed.
        """
        looked, arriving = self._pending, self._hashes
        self._pending, self._hashes = [], None
        if arriving is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        outdated = None
        arrived = iter(arriving.tolist())
        for entry, place, count, is_skipped in looked:
            hashes = tuple(itertools.islice(arrived, count))
            seen = self._histories.setdefault((self._paths[entry], *self._ranges[entry]), HashHistory(hashes))
            seen.record(hashes)
            if is_skipped and seen.unchanged_saves == 1:
                outdated, seen.changes = entry, _PROVEN  # never left out again
                del self._known[entry]
                continue
            self._known[entry] = _AreaContent(place, hashes)
        if outdated is not None:
            raise SkippedBytesChanged(self._paths[outdated])

    def forget(self) -> None:
        """Forget the area's content, since a copy has not landed."""
        self._known.clear()
        self._pending, self._hashes = [], None


class _Factors(NamedTuple):
    """Random numbers of 64 bits on a device: for the words of a row, and for both halves of each row's sum."""

    words: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


@functools.cache
def _factors(device: torch.device) -> _Factors:
    # A separate generator leaves the training's random numbers alone.
    generator = torch.Generator("cpu").manual_seed(secrets.randbits(63))
    rows = _PART_BYTES // _ROW_BYTES + 1
    made = torch.empty(_ROW_WORDS + _WORD_BYTES + 2 * rows, dtype=torch.int64, device="cpu")
    made.random_(-(2**63), None, generator=generator)
    there = made.to(device)
    return _Factors(there[: -2 * rows], there[-2 * rows : -rows], there[-rows:])


def _hashes(memory: torch.Tensor) -> list[torch.Tensor]:
    """A hash of 64 bits of each part, on the device. OutOfMemoryError: there is no room for the products of a part."""
    factors = _factors(memory.device)
    hashes = []
    for begin in range(0, memory.numel(), _PART_BYTES):
        part = memory[begin : begin + _PART_BYTES]
        whole, even = (part.numel() // unit * unit for unit in (_ROW_BYTES, _WORD_BYTES))
        rows = (part[:whole].view(torch.int32).view(-1, _ROW_WORDS) * factors.words[:_ROW_WORDS]).sum(dim=1)
        if whole < part.numel():
            words = torch.cat([part[whole:even].view(torch.int32), part[even:].to(torch.int32)])
            rows = torch.cat([rows, (words * factors.words[: words.numel()]).sum().view(1)])
        count = rows.numel()
        hashes.append(((rows & _LOW) * factors.low[:count] + (rows >> 32) * factors.high[:count]).sum())
    return hashes
