"""What lies on a device and does not change crosses to the host once: the base model under an adapter, constants.

    save()        on the current stream: a sum of every byte of each tensor that may be so
    copy thread   sums arrive: as they were when the area's bytes were copied? it was rightly left out
                               otherwise the step is withdrawn, and the tensor is copied at each save from now on

A tensor is left out after `_PROVEN` copies into the same area that had the same sum, as long as it lies where it lay
and torch has counted no change. What torch does not count (`.data`, kernels of others) shows in the sums: nothing that
has changed is ever taken for unchanged, but for two values with the same 64 bits. No byte of it crosses, nothing is
waited for in `save()`, and the device reads each byte once, at the speed of its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.image.layout import Layout
from trainer_side.save.copy_plan import CopyPiece
from trainer_side.state.accelerator import StreamEvent, brought
from trainer_side.state.survey import StorageSource

_NBYTES_MIN = 256 << 10  # a sum takes a few calls of torch: for less, the copy is as cheap
_PROVEN = 2
_WORD_BYTES = 8
_ROW_WORDS = 32  # words within a row that change places are not told from those that stay
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES
_AT_ONCE_BYTES = 128 << 20  # the sums of its rows take a 32nd of that, and as much again

Place = tuple[
    int, int, int
]  # address of the used part, its start in the storage, changes that torch has counted


class Outdated(Exception):
    """Bytes that were left out of a copy have changed after all.

    Attributes:
        path: The tensor they belong to.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has changed, and torch has not counted it")
        self.path = path


@dataclass(frozen=True)
class _InArea:
    """The bytes of an entry in the area.

    Attributes:
        place: Where they were copied from. `total`: their sum; `alike`: copies in a row that had it.
    """

    place: Place
    total: int
    alike: int


class _Awaited(NamedTuple):
    """An entry of which a sum is on its way; `before`: what was known of its bytes in the area."""

    entry: int
    place: Place
    before: _InArea | None
    is_spared: bool


class Unchanged:
    """Knows what of one area need not be copied again. `settle` belongs to the copy thread, `forget` to any, all else
    to the training thread; a save waits for the copy before, so they never meet.

    Args:
        pieces: What is taken in `save()`, of this rank's slice.
        layout: Names the tensors.
    """

    def __init__(self, pieces: Iterable[CopyPiece], layout: Layout) -> None:
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for piece in pieces:
            end = piece.entry_offset + piece.nbytes
            begins[piece.entry] = min(piece.entry_offset, begins.get(piece.entry, piece.entry_offset))
            ends[piece.entry] = max(end, ends.get(piece.entry, 0))
            sizes[piece.entry] = piece.nbytes + sizes.get(piece.entry, 0)
        # Parts that lie apart are copied.
        self._ranges = {
            entry: (begins[entry], ends[entry])
            for entry, nbytes in sizes.items()
            if nbytes >= _NBYTES_MIN and ends[entry] - begins[entry] == nbytes
        }
        self._paths = {tensor.entry: tensor.path for tensor in layout.tensors if tensor.entry in self._ranges}
        self._tensor_entries: Sequence[int] = ()
        self._tensors: list[int] = []  # places among all tensors of those that may be left out
        self._known: dict[int, _InArea] = {}
        self._changes: dict[int, int] = {}  # how often the sum was another one
        self._looked: list[_Awaited] = []
        self._totals: torch.Tensor | None = None
        self._arrived: StreamEvent | None = None

    def versions(self, tensors: Sequence[torch.Tensor], tensor_entries: Sequence[int]) -> dict[int, int]:
        """Of each entry that may be left out, the changes of its tensors that torch has counted.

        Args:
            tensors: All of the state.
            tensor_entries: Of each, its entry.
        """
        if tensor_entries is not self._tensor_entries:
            self._tensor_entries = tensor_entries
            self._tensors = [place for place, entry in enumerate(tensor_entries) if entry in self._ranges]
        counted: dict[int, int] = {}
        for place in self._tensors:
            entry, tensor = tensor_entries[place], tensors[place]
            # In inference mode torch counts nothing: the sums alone tell.
            counted[entry] = counted.get(entry, 0) + (0 if tensor.is_inference() else tensor._version)
        return counted

    def look(self, sources: Sequence[StorageSource | None], versions: Mapping[int, int]) -> frozenset[int]:
        """Queue the sums on the current stream; returns the entries that need not be copied into the area.

        Args:
            sources: Per entry its storage.
            versions: As `versions` gave them; what is not among them is copied.
        """
        self._looked, self._totals = [], None
        spared: set[int] = set()
        totals: list[torch.Tensor] = []
        for entry, (begin, end) in self._ranges.items():
            # Whatever is copied is known again only when it has landed.
            known, source = self._known.pop(entry, None), sources[entry]
            if (
                source is None
                or entry not in versions
                or source.device.type == "cpu"
                or (source.start_bytes + begin) % _WORD_BYTES
                or self._changes.get(entry, 0) >= _PROVEN
            ):
                continue
            try:
                totals.append(_total(source.bytes()[begin:end]))
            except torch.OutOfMemoryError:  # no room for the sums of its rows: it is copied
                continue
            place = (source.data_ptr, source.start_bytes, versions[entry])
            is_spared = known is not None and known.place == place and known.alike >= _PROVEN
            self._looked.append(_Awaited(entry, place, known, is_spared))
            if known is not None and is_spared:
                self._known[entry] = known
                spared.add(entry)
        if totals:
            self._totals, self._arrived = brought(torch.stack(totals))
        return frozenset(spared)

    def settle(self) -> None:
        """The copy has landed, and nothing of it has been used yet; waits for the sums.

        Raises:
            Outdated: What was left out has changed.
        """
        looked, totals = self._looked, self._totals
        self._looked, self._totals = [], None
        if totals is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        outdated = None
        for (entry, place, before, is_spared), total in zip(looked, totals.tolist(), strict=True):
            is_alike = before is not None and before.total == total
            if is_spared and not is_alike:
                outdated, self._changes[entry] = entry, _PROVEN  # for good
                del self._known[entry]
                continue
            if before is not None and not is_alike:
                self._changes[entry] = self._changes.get(entry, 0) + 1
            self._known[entry] = _InArea(place, total, before.alike + 1 if before and is_alike else 1)
        if outdated is not None:
            raise Outdated(self._paths[outdated])

    def forget(self) -> None:
        """A copy has not landed: the area may hold anything."""
        self._known.clear()
        self._looked, self._totals = [], None


def _total(memory: torch.Tensor) -> torch.Tensor:
    """A sum of all bytes in which every 256 of them have their own weight; one number of 64 bits, on the device."""
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for begin in range(0, memory.numel(), _AT_ONCE_BYTES):
        part = memory[begin : begin + _AT_ONCE_BYTES]
        whole = part.numel() // _ROW_BYTES * _ROW_BYTES
        rows = part[:whole].view(torch.int64).view(-1, _ROW_WORDS).sum(dim=1)
        first = begin // _ROW_BYTES
        total += (
            rows * torch.arange(2 * first + 1, 2 * (first + rows.numel()), 2, device=memory.device)
        ).sum()
        if whole < part.numel():
            rest = part[whole:].to(torch.int64)
            total += (rest * torch.arange(3, 3 + 2 * rest.numel(), 2, device=memory.device)).sum()
    return total
