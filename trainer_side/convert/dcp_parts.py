"""The bytes of a DCP folder's tensors, read on request from the files of their parts.

    a tensor    │·······│·······│······│      parts, one from each rank: __0_0.distcp, __1_0.distcp, …
    read        ────────────▓▓▓▓▓▓─────      the requested bytes of each part, one run of its file

DCP writes each part as torch.save does, so its bytes lie in the file unchanged. A part that is not in row-major order,
or has another dtype or byte order, is loaded whole by torch, and kept until its last byte is read.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from holdfast.errors import DamageError
from holdfast.image.regions import Pattern, Region
from trainer_side.convert.contents import bytes_of
from trainer_side.convert.dcp_claims import describe_part, file_part
from trainer_side.state.pickle_bounds import NOT_READABLE

_PATTERNS_MAX = 64  # tensors that are split alike share one
_STORAGE = "data/0"  # where torch.save puts the bytes of a tensor alone


class _StoredPart(NamedTuple):
    """Where one part lies."""

    path: Path
    offset: int  # in the file: of its first byte, or of torch.save's output
    length: int = 0  # of torch.save's output; 0: the bytes lie in the file as in the tensor


class StoredTensor:
    """One tensor of a folder: the untouched tensor in the tree, and the regions of its parts. Any thread."""

    def __init__(self, tensor: torch.Tensor, pattern: Pattern, parts: list[_StoredPart]) -> None:
        self.tensor = tensor
        self._pattern, self._parts = pattern, parts
        self._lock = threading.Lock()
        self._loaded: tuple[int, torch.Tensor] | None = None

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the tensor's bytes from `offset` on. Raises OSError; DamageError: a file has changed."""
        target = np.frombuffer(out, np.uint8)
        for number in self._pattern.regions_within(offset, offset + len(target)):
            comb = self._pattern.combs[number]
            first, end = comb.bytes_before(offset), comb.bytes_before(offset + len(target))
            blocks = list(comb.blocks(first, end))
            if len(blocks) == 1 and blocks[0].runs == 1:
                place = blocks[0].offset - offset
                self._fetch(number, first, target[place : place + end - first])
                continue
            source, at = np.empty(end - first, np.uint8), 0
            self._fetch(number, first, source)
            for begin, run_bytes, stride, runs in blocks:
                nbytes = run_bytes * runs
                there = np.ndarray((runs, run_bytes), np.uint8, target, begin - offset, (stride, 1))
                there[...] = source[at : at + nbytes].reshape(runs, run_bytes)
                at += nbytes

    def _fetch(self, number: int, first: int, out: np.ndarray) -> None:
        part = self._parts[number]
        if part.length:
            with self._lock:
                if self._loaded is None or self._loaded[0] != number:
                    self._loaded = None  # frees the memory for the next part
                    self._loaded = number, self._load_part(number)
                part_tensor = self._loaded[1]
                source = np.frombuffer(bytes_of(part_tensor.data_ptr(), part_tensor.nbytes), np.uint8)
                out[:] = source[first : first + len(out)]
                if first + len(out) == part_tensor.nbytes:
                    self._loaded = None
            return
        with part.path.open("rb") as file:
            file.seek(part.offset + first)
            if file.readinto(out.data) < len(out):
                raise DamageError(
                    f"{part.path}: the file has become shorter while it was read; copy the folder again"
                )

    def _load_part(self, number: int) -> torch.Tensor:
        path, offset, length = self._parts[number]
        what = describe_part(path, offset, length)
        found = torch.empty(self._pattern.regions[number].size, dtype=self.tensor.dtype, device="cpu")
        try:
            with path.open("rb") as file:
                loaded = torch.load(
                    file_part(file, offset, length, what), map_location="cpu", weights_only=True
                )
            return found.copy_(loaded.detach())
        except OSError:
            raise
        except NOT_READABLE as error:
            raise DamageError(f"{what}: not what DCP reads: {error}; copy the folder again") from error


def pattern_of(record: TensorStorageMetadata) -> Pattern:
    """Return how a tensor is split. Its chunks must tile it, as `check_claims` checks."""
    chunks = [chunk for chunk in record.chunks if 0 not in chunk.sizes]
    regions = tuple(Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
    return _pattern(tuple(record.size), record.properties.dtype.itemsize, regions)


@functools.lru_cache(maxsize=_PATTERNS_MAX)
def _pattern(shape: tuple[int, ...], item_bytes: int, regions: tuple[Region, ...]) -> Pattern:
    return Pattern(shape, item_bytes, regions, tuple((number,) for number in range(len(regions))))


def stored_tensor(
    folder: Path,
    name: str,
    tensor: torch.Tensor,
    record: TensorStorageMetadata,
    places: Mapping[Any, Any],
    pattern: Pattern,
) -> StoredTensor:
    """Check that torch can read the parts of a tensor, and find their bytes without reading them.

    DamageError: the parts contradict the metadata. pickle.UnpicklingError: a part cannot be read without running code.
    """
    parts = []
    for region in pattern.regions:
        info = places[MetadataIndex(name, torch.Size(region.start))]
        path = folder / info.relative_path
        parts.append(_part(path, info.offset, info.length, region, record.properties.dtype))
    return StoredTensor(tensor, pattern, parts)


def _part(path: Path, offset: int, length: int, region: Region, dtype: torch.dtype) -> _StoredPart:
    what = describe_part(path, offset, length)
    with path.open("rb") as file:
        view = file_part(file, offset, length, what)
        with torch.serialization.skip_data():
            tensor = torch.load(view, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != region.size:
            found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DamageError(
                f"{what}: holds {found}, and the metadata has a part of {list(region.size)} there; save the checkpoint "
                "again with dcp.save"
            )
        is_same_layout = (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.dtype == dtype
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )
        view.seek(0)
        reader: Any = torch._C.PyTorchFileReader(view)
        order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
        if not is_same_layout or order != sys.byteorder.encode():
            return _StoredPart(path, offset, length)
        begin = reader.get_record_offset(_STORAGE) + int(tensor.storage_offset()) * tensor.itemsize
        if begin + tensor.nbytes > length:
            raise DamageError(
                f"{what}: its tensor of {tensor.nbytes} bytes ends behind it; copy the folder again"
            )
        return _StoredPart(path, offset + begin)
