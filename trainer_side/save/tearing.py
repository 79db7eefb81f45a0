"""Checks that bytes copied behind the gate are still those of `save()`; otherwise the copy is torn, and not used.

    save()        capture_instant ─► SavedInstant: the version counter of each tensor, and four words of each piece
    copy thread   each batch, read and not yet released: counters and live words as at save()? words in the copy, too?
    first update  before it changes anything: all counters and live words as at save()?

torch counts in-place changes by its own operations, but not changes through `.data`, a numpy view, a fused optimizer or
a foreign kernel. Words detect those: the first word of a piece, and three at places that depend on the step. An
uncounted change that touches none of these words is missed (docs/design/006-torn-copies-withdrawn.md). torch counts
changes of a DTensor in the DTensor, changes through `to_local()` in its local tensor: both counters are compared. In
DTensors it does not count changes by foreach and fused kernels at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from holdfast.image.layout import Layout
from holdfast.image.replicas import first_row
from trainer_side.save.copy_plan import Batch, CopyPiece, SlicePlan
from trainer_side.save.process_memory import AT_EACH_BYTE, PROCESS_BEGIN, PROCESS_BYTES, WORD_BYTES
from trainer_side.state import accelerator
from trainer_side.state.accelerator import copy_to_host
from trainer_side.state.skeleton import Capture
from trainer_side.state.split_tensor import local_of
from trainer_side.state.survey import Sources, StorageSource

if TYPE_CHECKING:
    import numpy.typing as npt

    _Places = npt.NDArray[np.int64]
    _Words = npt.NDArray[np.uint64]
    _Mask = npt.NDArray[np.bool_]

_WORDS = 4  # of one piece
_DRAWN_OF = 1 << 24
_LOOKS_MAX = 4096  # cached batches; they keep no tensor alive
_DEVICE_PIECES_MAX = 32  # at one save, others at the next: each costs a call or two of torch
_COMPARED_BYTES = 32 << 20  # of a tensor on a device, compared at a time
_UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_version = attrgetter("_version")
_address = attrgetter("data_ptr")
compare_bytes = ctypes.CDLL(None).memcmp  # without the GIL
compare_bytes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class TearCheck:
    """The checks in each save of one plan. Training thread. `gated`: Per entry, whether it is copied behind the gate.
    `watched`: Fingerprinted entry → its bytes on this rank; of the saved instant even if another rank sends them.
    """

    def __init__(
        self, layout: Layout, slice_plan: SlicePlan, gated: Sequence[bool], watched: Mapping[int, int]
    ) -> None:
        self._inputs = layout, slice_plan, gated, watched
        self._on_host: tuple[list[bool], TearCheck] | None = None
        sent = {piece.entry for piece in slice_plan.gated}
        self.pieces = [
            *slice_plan.gated,
            *(
                CopyPiece(-1, entry, 0, nbytes, -1)
                for entry, nbytes in watched.items()
                if gated[entry] and entry not in sent and nbytes
            ),
        ]
        self.place_of = {piece.offset: place for place, piece in enumerate(self.pieces) if piece.offset >= 0}
        self.paths = {tensor.entry: tensor.path for tensor in reversed(layout.tensors)}  # of the first tensor
        self._entries = {piece.entry for piece in self.pieces}
        self.starts = np.array([piece.entry_offset for piece in self.pieces], np.int64)
        sizes = np.array([piece.nbytes for piece in self.pieces], np.int64)
        self.wide = sizes >= WORD_BYTES
        self._offset_range = sizes - np.where(self.wide, WORD_BYTES, 1)  # range for the place of a word
        whole = _without_gaps(layout, {piece.entry for piece in self.pieces})
        self.gapless = np.array([piece.entry in whole for piece in self.pieces], bool)
        self.copies = np.array([piece.offset for piece in self.pieces], np.int64)
        self._pieces_of_entry = [piece.entry for piece in self.pieces]
        self._batch_checks: dict[int, BatchChecks] = {}
        self._tensor_entries: Sequence[int] = ()
        self._tensors: list[int] = []  # indices of the checked tensors
        self._dtensors: list[int] = []  # of the DTensors, whose local tensors are checked, too
        self.entry_of_tensor: list[int] = []  # of each checked tensor
        self.tensors_of: Mapping[int, list[int]] = {}  # entry → places among the checked tensors

    def capture_instant(self, taken: Capture, step: int) -> SavedInstant | None:
        """Note counters and words of the tensors in `save()`, on the training's stream; None without any to copy."""
        if not self.pieces:
            return None
        if taken.tensor_entries is not self._tensor_entries:
            self._select_tensors(taken.tensors, taken.tensor_entries)
        tensors = [*map(taken.tensors.__getitem__, self._tensors)]
        tensors += map(local_of, map(taken.tensors.__getitem__, self._dtensors))
        sources: list[Any] = [*map(taken.sources.__getitem__, self._pieces_of_entry)]
        # Drawn from the step, as the rows of the fingerprints are.
        drawn = [0, *(first_row(_WORDS * step + word, _DRAWN_OF) for word in range(1, _WORDS))]
        within = (self._offset_range[:, None] * (np.array(drawn) / _DRAWN_OF)).astype(np.int64)
        readable, device_words = self.gapless, None
        if accelerator.kind() is not None:
            on_device = np.array([source.device.type != "cpu" for source in sources], bool)
            readable = self.gapless & ~on_device
            chosen = np.flatnonzero(self.gapless & on_device)
            if chosen.size:
                chosen = np.roll(chosen, -first_row(step, chosen.size))[:_DEVICE_PIECES_MAX]
                with contextlib.suppress(torch.OutOfMemoryError):  # counters are still compared
                    device_words = DeviceWords(chosen.tolist(), self, sources, within)
        return SavedInstant(self, step, tensors, sources, within, readable, device_words)

    def host_only(self, sources: Sources) -> TearCheck:
        """Return the checks of host tensors alone, for a save that has already captured all device tensors."""
        layout, slice_plan, gated, watched = self._inputs
        here = [
            one and source is not None and source.device.type == "cpu"
            for one, source in zip(gated, sources, strict=True)
        ]
        if self._on_host is None or self._on_host[0] != here:
            pieces = tuple(piece for piece in slice_plan.gated if here[piece.entry])
            self._on_host = here, TearCheck(layout, replace(slice_plan, gated=pieces), here, watched)
        return self._on_host[1]

    def batch_checks(self, batch: Batch) -> BatchChecks:
        """Return the checks of a batch, cached: batches stay the same as long as no tensor moves. Copy thread."""
        found = self._batch_checks.get(id(batch))
        if found is None or found.batch is not batch:
            if len(self._batch_checks) >= _LOOKS_MAX:
                self._batch_checks.clear()
            places = [*map(self.place_of.__getitem__, batch.offsets)]
            entries = dict.fromkeys(self._pieces_of_entry[place] for place in places)
            tensors = [place for entry in entries for place in self.tensors_of.get(entry, ())]
            found = self._batch_checks[id(batch)] = BatchChecks(batch, np.array(places, np.int64), tensors)
        return found

    def _select_tensors(self, tensors: Sequence[torch.Tensor], tensor_entries: Sequence[int]) -> None:
        self._batch_checks.clear()
        self._tensor_entries = tensor_entries
        self._tensors = [place for place, entry in enumerate(tensor_entries) if entry in self._entries]
        self._dtensors = [place for place in self._tensors if local_of(tensors[place]) is not tensors[place]]
        self.entry_of_tensor = [tensor_entries[place] for place in self._tensors + self._dtensors]
        tensors_of: dict[int, list[int]] = {}
        for place, entry in enumerate(self.entry_of_tensor):
            tensors_of.setdefault(entry, []).append(place)
        self.tensors_of = tensors_of


class BatchChecks(NamedTuple):
    """The checks of one batch."""

    batch: Batch
    places: _Places  # of its pieces in `TearCheck.pieces`
    tensors: list[int]  # in these pieces, by their place in a `SavedInstant`


class SavedInstant:
    """Counters and words of the tensors at one `save()`; keeps the tensors alive until they are copied or compared. Any
    thread. Each check returns the path of a tensor, or "".
    """

    def __init__(
        self,
        check: TearCheck,
        step: int,
        tensors: list[torch.Tensor],
        sources: Sequence[StorageSource],
        within: _Places,
        readable: _Mask,
        device_words: DeviceWords | None,
    ) -> None:
        self.step, self.check = step, check
        self._tensors, self._sources, self._device_words = tensors, sources, device_words
        self._within, self._readable = within, readable
        begins = np.fromiter(map(_address, sources), np.int64, len(sources)) + check.starts
        self._live = begins[:, None] + within
        self._tensors_of, self._entry_of_tensor = check.tensors_of, check.entry_of_tensor
        self._versions = versions_of(tensors)
        self._words = _read_words(self._live, check.wide, readable)

    def find_changed(self) -> str:
        """Return a tensor that has changed."""
        return self._find_changed(np.arange(len(self._live)), range(len(self._tensors)))

    def find_changed_at(self, storages: Collection[int]) -> str:
        """Return a changed tensor in one of the storages at these addresses."""
        mine = [place for place, storage in enumerate(self.storages()) if storage in storages]
        entries = {self.check.pieces[place].entry for place in mine}
        tensors = [place for entry in entries for place in self._tensors_of.get(entry, ())]
        return self._find_changed(np.array(mine, np.int64), tensors)

    def find_changed_in(self, batch: Batch) -> str:
        """Return a changed tensor of `batch`, before an update may change it. Copy thread."""
        checks = self.check.batch_checks(batch)
        return self._find_changed(checks.places, checks.tensors)

    def find_miscopied(self, batch: Batch, area: torch.Tensor) -> str:
        """Return a tensor whose words in the staging area differ from those at `save()`. Copy thread."""
        places, check = self.check.batch_checks(batch).places, self.check
        words = self._device_words
        if words is not None and (place := words.find_wrong(places.tolist(), area)) is not None:
            return check.paths[check.pieces[place].entry]
        copies = area.data_ptr() + check.copies[places, None] + self._within[places]
        here = _read_words(copies, check.wide[places], self._readable[places])
        return self._first_wrong_path(places, here != self._words[places])

    def find_uncounted_change(self, area: torch.Tensor) -> str:
        """Return a tensor that differs from the staging area though torch has counted no change. Reads all bytes, on
        the training's stream. Training thread.
        """
        versions = versions_of(self._tensors)
        counted = {
            entry
            for entry, now, before in zip(self._entry_of_tensor, versions, self._versions, strict=True)
            if now != before
        }
        for place, (piece, source) in enumerate(zip(self.check.pieces, self._sources, strict=True)):
            if piece.offset < 0 or piece.entry in counted or _is_same(piece, source, area):
                continue
            mine = map(local_of, map(self._tensors.__getitem__, self._tensors_of.get(piece.entry, ())))
            if self.check.gapless[place] or _differs_in(mine, piece, source, area):
                return self.check.paths[piece.entry]
        return ""

    def storages(self) -> list[int]:
        """Return the address of the storage under each checked piece."""
        return [source.data_ptr - source.start_bytes for source in self._sources]

    def _find_changed(self, places: _Places, tensors: Sequence[int]) -> str:
        now = versions_of([*map(self._tensors.__getitem__, tensors)])
        before = [*map(self._versions.__getitem__, tensors)]
        if now != before:
            changes = zip(tensors, now, before, strict=True)
            wrong = next(place for place, one, other in changes if one != other)
            return self.check.paths[self._entry_of_tensor[wrong]]
        words = _read_words(self._live[places], self.check.wide[places], self._readable[places])
        return self._first_wrong_path(places, words != self._words[places])

    def _first_wrong_path(self, places: _Places, wrong: _Mask) -> str:
        """The path of the first piece with a wrong word; empty without one."""
        of_pieces = wrong.any(axis=1)
        if not of_pieces.any():
            return ""
        return self.check.paths[self.check.pieces[int(places[int(of_pieces.argmax())])].entry]


class DeviceWords:
    """Words of some device tensors, on their way to the host in stream order. `within`: Their begins in each piece."""

    def __init__(
        self, places: Sequence[int], check: TearCheck, sources: Sequence[StorageSource], within: _Places
    ) -> None:
        self.check, self._within = check, within
        self._begin_of: dict[int, int] = {}
        parts: list[torch.Tensor] = []
        nbytes = 0
        for place in places:
            piece, memory = check.pieces[place], sources[place].bytes()
            self._begin_of[place] = nbytes
            for at in within[place].tolist():
                begin = piece.entry_offset + at
                parts.append(memory[begin : begin + self._width(place)])
                nbytes += self._width(place)
        self._here, self._arrived = copy_to_host(torch.cat(parts))

    def find_wrong(self, places: Iterable[int], area: torch.Tensor) -> int | None:
        """Return one of these places whose words in the staging area differ; None without one."""
        mine = [place for place in places if place in self._begin_of]
        if not mine:
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
        copy, wanted = area.numpy(), self._here.numpy()
        for place in mine:
            width, begin = self._width(place), self._begin_of[place]
            offset = self.check.pieces[place].offset
            for at in self._within[place].tolist():
                if (copy[offset + at : offset + at + width] != wanted[begin : begin + width]).any():
                    return place
                begin += width
        return None

    def _width(self, place: int) -> int:
        return WORD_BYTES if self.check.wide[place] else 1


def _is_same(piece: CopyPiece, source: StorageSource, area: torch.Tensor) -> bool:
    copy = area.data_ptr() + piece.offset
    if source.device.type == "cpu":
        return bool(compare_bytes(source.data_ptr + piece.entry_offset, copy, piece.nbytes) == 0)
    live = source.bytes()
    for begin in range(0, piece.nbytes, _COMPARED_BYTES):
        end = min(begin + _COMPARED_BYTES, piece.nbytes)
        here = live[piece.entry_offset + begin : piece.entry_offset + end]
        copied = area[piece.offset + begin : piece.offset + end]
        # The area is locked, so its bytes cross quickly, and no more host memory is locked for this.
        if not torch.equal(here, copied.to(here.device, non_blocking=True)):
            return False
    return True


def _differs_in(
    tensors: Iterable[torch.Tensor], piece: CopyPiece, source: StorageSource, area: torch.Tensor
) -> bool:
    """Whether a byte that differs belongs to a tensor, not to a gap between two."""
    belongs = torch.zeros(source.storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
    for tensor in tensors:
        unit = _UNITS[tensor.element_size()]
        times = tensor.element_size() // unit.itemsize  # a complex128 is two words
        mark = torch.empty(0, dtype=unit, device="cpu")
        shape, stride = (*tensor.shape, times), (*(times * one for one in tensor.stride()), 1)
        mark.set_(belongs, times * tensor.storage_offset(), shape, stride).fill_(-1)
    first, last = piece.entry_offset, piece.entry_offset + piece.nbytes
    live = source.bytes()[first:last].cpu().numpy()
    copy = area[piece.offset : piece.offset + piece.nbytes].numpy()
    begin = source.start_bytes + first
    mine = torch.empty(0, dtype=torch.uint8, device="cpu").set_(belongs, begin, (piece.nbytes,), (1,)).numpy()
    return bool(((live != copy) & (mine != 0)).any())


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # one was made in inference mode, where torch counts nothing
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _read_words(addresses: _Places, wide: _Mask, readable: _Mask) -> _Words:
    """Read the word at each address, or a byte of pieces smaller than a word; zero if not readable."""
    words, single_bytes = wide & readable, ~wide & readable
    if words.all():
        found: _Words = AT_EACH_BYTE[addresses - PROCESS_BEGIN].view(np.uint64)
        return found
    found = np.zeros(addresses.shape, np.uint64)
    found[words] = AT_EACH_BYTE[addresses[words] - PROCESS_BEGIN].view(np.uint64)
    found[single_bytes] = PROCESS_BYTES[addresses[single_bytes] - PROCESS_BEGIN]
    return found


def _without_gaps(layout: Layout, entries: Collection[int]) -> set[int]:
    """Return the entries without gaps between tensors; bytes in a gap may change at any time."""
    sizes: dict[int, list[int]] = {}
    for tensor in layout.tensors:
        if tensor.entry in entries:
            # The dtype may be followed by strides and the like.
            dtype: torch.dtype = getattr(torch, tensor.dtype.partition(",")[0])
            sizes.setdefault(tensor.entry, []).append(math.prod(tensor.shape) * dtype.itemsize)
    return {
        entry for entry, found in sizes.items() if layout.entries[entry].nbytes in (sum(found), max(found))
    }
