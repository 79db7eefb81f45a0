"""Checks the metadata of a DCP folder against its files before memory is allocated for it.

    each place      its file exists and is long enough; no byte is claimed twice; it is a torch file, uncompressed
    each tensor     its chunks cover each element once; the place of each chunk has enough bytes
    each path       lists are no longer than the number of their items

All tensors together therefore take no more memory than the files have bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.errors import DamageError, StateError
from holdfast.image.regions import Region, grid_cuts, overlap
from holdfast.parse_cost import check_cost
from holdfast.pickle_cost import PICKLE_FACTOR
from holdfast.store.base import Store
from holdfast.store.ranged import RangedFile
from trainer_side.state.pickle_bounds import refuse_costly_pickle, refuse_packed

_LIST_ITEM_BYTES = 8
_ODD_CHUNKS_MAX = 4096  # compared pairwise


def check_claims(folder: Path, metadata: Metadata, metadata_bytes: int) -> None:
    """Check that the folder has the bytes that its metadata claims.

    DamageError: it has not; names the file, the claim and the actual size. StateError: a part is compressed. TypeError,
    ValueError, AttributeError: DCP does not write such metadata.
    """
    _check_paths(metadata.planner_data or {}, metadata_bytes)
    _check_places(folder, metadata.storage_data)
    for name, record in metadata.state_dict_metadata.items():
        if isinstance(record, TensorStorageMetadata):
            _check_tensor(folder, name, record, metadata.storage_data)


def _check_paths(paths: Mapping[str, Any], metadata_bytes: int) -> None:
    """Limit the lengths of lists, as DCP makes each list as long as the largest index in it."""
    lengths: dict[tuple[Any, ...], int] = {}
    for path in paths.values():
        if not isinstance(path, tuple) or not all(type(part) in (str, int) for part in path):
            raise TypeError(f"{path!r:.200} is no place in a state")
        for at, part in enumerate(path):
            if isinstance(part, int):
                if part < 0:
                    raise ValueError(f"{path!r:.200} is no place in a state")
                lengths[path[:at]] = max(lengths.get(path[:at], 0), part + 1)
    check_cost(_LIST_ITEM_BYTES * sum(lengths.values()), metadata_bytes, PICKLE_FACTOR)


def _check_places(folder: Path, places: Mapping[Any, Any]) -> None:
    by_file: dict[str, list[tuple[int, int]]] = {}
    for index, info in places.items():
        name = PurePosixPath(info.relative_path)
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"the metadata leads out of the folder, to {name}")
        if getattr(info, "transform_descriptors", None):
            raise StateError(
                f"{folder}: {getattr(index, 'fqn', index)!r:.200} is packed in {name}, and may unpack to any size; "
                "if you trust it, dcp.load it, and save it without the extension"
            )
        if min(info.offset, info.length) < 0:
            raise ValueError(f"{info.length} bytes at byte {info.offset} of {name}")
        by_file.setdefault(info.relative_path, []).append((info.offset, info.length))
    for relative, claimed in by_file.items():
        _check_file(folder / relative, sorted(claimed))


def _check_file(path: Path, places: list[tuple[int, int]]) -> None:
    if not path.is_file():
        raise DamageError(
            f"{path}: the file is not there, and the metadata puts {len(places)} parts of the state into it; copy the "
            "folder with all its files"
        )
    file_bytes, free = path.stat().st_size, 0
    for offset, length in places:
        if offset + length > file_bytes:
            raise DamageError(
                f"{path}: the file has {file_bytes} bytes, and the metadata claims {length} bytes at byte {offset}; "
                "copy it again from where it was written"
            )
        if offset < free:
            raise DamageError(
                f"{path}: the metadata claims the bytes at byte {offset} twice; DCP writes no such folder, so find out "
                "which program did"
            )
        free = offset + length
    with path.open("rb") as file:
        for offset, length in places:
            what = describe_part(path, offset, length)
            view = file_part(file, offset, length, what)
            refuse_packed(view, what)
            refuse_costly_pickle(view, what)


def describe_part(path: Path, offset: int, length: int) -> str:
    return f"{path}, {length} bytes at byte {offset}"


def file_part(file: IO[bytes], offset: int, length: int, what: str) -> IO[bytes]:
    return cast(IO[bytes], RangedFile(cast(Store, _FilePart(file, offset)), what, length))


class _FilePart:
    """Part of a file, as the store of a `RangedFile`."""

    def __init__(self, file: IO[bytes], offset: int) -> None:
        self._file, self._offset = file, offset

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._file.seek(self._offset + offset)
        data = self._file.read(buffer.nbytes)
        if len(data) < buffer.nbytes:
            raise DamageError(
                f"{name}: the file ends {buffer.nbytes - len(data)} bytes early; copy the folder again"
            )
        buffer[:] = data


def _check_tensor(folder: Path, name: str, record: TensorStorageMetadata, places: Mapping[Any, Any]) -> None:
    size, item_bytes = tuple(record.size), record.properties.dtype.itemsize
    regions = []
    for chunk in record.chunks:
        region = Region(tuple(chunk.offsets), tuple(chunk.sizes))
        inside = len(region.start) == len(region.size) == len(size) and all(
            min(offset, extent) >= 0 and offset + extent <= whole
            for offset, extent, whole in zip(*region, size, strict=True)
        )
        if not inside:
            raise DamageError(
                f"{folder}: {name!r:.200}: a chunk of {region.size} at {region.start} of a tensor of {size}"
            )
        place = places.get(MetadataIndex(name, chunk.offsets))
        nbytes, there = region.numel * item_bytes, 0 if place is None else place.length
        if nbytes > there:
            raise DamageError(
                f"{folder}: {name!r:.200}: a chunk of {region.size} takes {nbytes} bytes, and the metadata has {there} "
                "bytes for it; save the checkpoint again with dcp.save"
            )
        if region.numel:
            regions.append(region)
    _check_tiling(f"{folder}: {name!r:.200}", size, regions)


def _check_tiling(what: str, size: tuple[int, ...], regions: list[Region]) -> None:
    if math.prod(size) and grid_cuts(size, regions) is not None:
        return
    if len(regions) > _ODD_CHUNKS_MAX:
        raise DamageError(
            f"{what}: the tensor of {size} is in {len(regions)} chunks that are no grid, expected at most "
            f"{_ODD_CHUNKS_MAX}; save the checkpoint again with dcp.save"
        )
    both = overlap(regions)
    if both is not None:
        one, other = (regions[number] for number in both)
        raise DamageError(
            f"{what}: the chunks {one} and {other} overlap, so the tensor of {size} has two values in one place; save "
            "the checkpoint again with dcp.save"
        )
    found = sum(region.numel for region in regions)
    if found != math.prod(size):
        raise DamageError(
            f"{what}: the tensor of {size} has {math.prod(size)} elements, its chunks have {found}; save the "
            "checkpoint again with dcp.save"
        )
