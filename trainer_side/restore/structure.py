"""The tree of an image, with tensors allocated but not yet read.

    file    │ data.pkl, small entries │ storages …………………………………………… │ serialization id, directory │
              head ───────┐                                             tail ───────┐
                          └► rank 0 reads both, broadcasts ► each rank: torch.load under skip_data ► tree
                                                                       storages, in the order of the pickle ► entries

Only head and tail are read for this (from slices by `slice_reader.py`, which checks them first). `reading.py` reads the
bytes between straight into the tensors of the tree, or of the live objects (`Structure.adopt`): loading then copies
nothing.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from holdfast.crc import crc32
from holdfast.errors import DamageError, HoldfastError, StateError
from holdfast.image.entries import Entry, Extent
from holdfast.image.layout import Layout
from holdfast.image.manifest import EntryRecord, Manifest
from holdfast.store.base import Store
from holdfast.store.ranged import RangedFile
from trainer_side.state.pickle_bounds import NOT_READABLE, fill_disabled, refuse_costly_pickle
from trainer_side.state.position_names import Position, from_record, read_on_host
from trainer_side.state.split_tensor import is_split
from trainer_side.state.tree import NamedTensor, tensor_paths, tensor_refusal

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# A zip reader looks for the end of the directory in this many bytes at the end of the file.
_TAIL_BYTES = 4096
_ENDS_BYTES_MAX = 1 << 30  # about three million tensors, as for a layout


@dataclass(frozen=True)
class ImageEnds:
    """Head and tail of an image as its two entries: enough to make the tree."""

    image_bytes: int
    chunk_bytes: int
    head_bytes: int
    tail_offset: int

    def __post_init__(self) -> None:
        if self.nbytes > _ENDS_BYTES_MAX:
            raise DamageError(
                f"an image of {self.image_bytes} bytes has {self.nbytes} bytes outside its tensors, expected at most "
                f"{_ENDS_BYTES_MAX}"
            )

    @property
    def nbytes(self) -> int:
        return self.head_bytes + self.image_bytes - self.tail_offset

    @property
    def entries(self) -> Sequence[Entry]:
        tail_bytes = self.image_bytes - self.tail_offset
        return (Entry("head", 0, self.head_bytes, 0, ()), Entry("tail", self.tail_offset, tail_bytes, 0, ()))


# Says where each entry of an image lies: the manifest of a portable file, with every CRC-32; the layout of slices in
# local tiers, whose entries have no CRC-32 yet; or the ends of an image alone.
ImageMap = Manifest | Layout | ImageEnds


def is_storage(name: str) -> bool:
    """Whether the entry of this name holds the bytes of tensors."""
    folder, _, key = name.rpartition("/")
    return folder.endswith("/data") and key.isascii() and key.isdecimal()


def ends_of(image: ImageMap) -> tuple[int, int]:
    """Return where the head ends and the tail begins; all tensors lie between."""
    storages = [entry for entry in image.entries if is_storage(entry.name) and entry.nbytes]
    if not storages:
        return image.image_bytes, image.image_bytes
    head_bytes = min(entry.offset for entry in storages)
    tail_offset = min(max(entry.offset + entry.nbytes for entry in storages), image.image_bytes - _TAIL_BYTES)
    return head_bytes, max(head_bytes, tail_offset)


def chunk_extent(image: ImageMap, chunk: int) -> Extent:
    offset = chunk * image.chunk_bytes
    return Extent(offset, min(image.chunk_bytes, image.image_bytes - offset))


# The first bytes of a zip file. torch reads any other file as one of its older formats, which holdfast never writes.
_ZIP_MAGIC = b"PK\x03\x04"
_ITEMSIZES = (1, 2, 4, 8, 16)
_SCRATCH_BYTES = 1024 * 1024


def read_structure_bytes(store: Store, manifest: Manifest) -> bytes:
    """Read head and tail of the file, back to back. Any thread. DamageError: it is short, or its pickle is damaged."""
    head_bytes, tail_offset = ends_of(manifest)
    data = bytearray(head_bytes + manifest.image_bytes - tail_offset)
    view = memoryview(data)
    store.read_into(manifest.file, 0, view[:head_bytes])
    if tail_offset < manifest.image_bytes:
        store.read_into(manifest.file, tail_offset, view[head_bytes:])
    for entry in manifest.entries:
        if entry.name.endswith("/data.pkl"):
            found = crc32(view[entry.offset : entry.offset + entry.nbytes])
            if entry.offset + entry.nbytes > head_bytes or found != entry.crc32:
                raise DamageError(
                    f"{store.url}/{manifest.file}: {entry.name}: CRC-32 expected {entry.crc32:08x}, got {found:08x}"
                )
    return bytes(data)


def check_structure_chunks(store: Store, manifest: Manifest) -> None:
    """Check the CRCs of all chunks that hold head or tail. DamageError: one differs.

    Call this when a structure does not fit the state: it was parsed before any chunk was checked, so a damaged file may
    be the cause.
    """
    head_bytes, tail_offset = ends_of(manifest)
    chunk_bytes, chunks = manifest.chunk_bytes, len(manifest.chunk_crc32s)
    head = range(min(chunks, -(-head_bytes // chunk_bytes)))
    scratch = memoryview(bytearray(min(_SCRATCH_BYTES, manifest.image_bytes)))
    for chunk in sorted({*head, *range(tail_offset // chunk_bytes, chunks)}):
        offset, found = chunk * chunk_bytes, 0
        end = min(offset + chunk_bytes, manifest.image_bytes)
        while offset < end:
            view = scratch[: min(len(scratch), end - offset)]
            store.read_into(manifest.file, offset, view)
            found = crc32(view, found)
            offset += len(view)
        expected = manifest.chunk_crc32s[chunk]
        if found != expected:
            raise DamageError(
                f"{store.url}/{manifest.file}: chunk {chunk} (from {chunk * chunk_bytes}), which holds structure: "
                f"CRC-32 expected {expected:08x}, got {found:08x}"
            )


class Structure:
    """The tree, and the storage of each entry.

    `data`: Head and tail of the image, back to back. `store`: Provides bytes that are in neither; None without a
    portable file. DamageError: torch cannot read the file, or it contradicts its manifest. StateError: the file is
    whole, but holds a type that `torch.load(weights_only=True)` does not allow.
    """

    def __init__(self, file: str, image: Manifest | Layout, data: bytes, store: Store | None = None) -> None:
        self._what = file if store is None else f"{store.url}/{file}"
        self._image = image
        created: list[torch.UntypedStorage] = []
        sizes = iter([image.entries[index].nbytes for index in self._storage_entries()])
        sizes_are_right = _skipped_sizes_are_right()  # not in `on_storage`: the function calls torch.load

        def on_storage(storage: Any, _location: str) -> Any:
            if storage.nbytes() and not sizes_are_right:
                storage = _resized(storage, next(sizes, 0))
            created.append(storage)
            return storage

        if data[: len(_ZIP_MAGIC)] != _ZIP_MAGIC:
            raise DamageError(
                f"{self._what}: the file is not a zip file: it begins with {data[: len(_ZIP_MAGIC)]!r}, expected "
                f"{_ZIP_MAGIC!r}"
            )
        stream = _StructureFile(file, image, data, store)
        try:
            refuse_costly_pickle(cast(IO[bytes], stream), self._what)
            with torch.serialization.skip_data(), fill_disabled():
                self.tree: Any = torch.load(
                    cast(IO[bytes], stream), map_location=on_storage, weights_only=True
                )
        except pickle.UnpicklingError as error:
            raise StateError(
                f"{self._what}: torch.load(weights_only=True) refuses a type in the file, although the bytes are "
                f"those that were written; allow the type with torch.serialization.add_safe_globals: {error}"
            ) from error
        except NOT_READABLE as error:
            if stream.failure is not None:
                raise stream.failure from error
            raise DamageError(f"{self._what}: not a file that torch reads: {error}") from error
        self.storages = self._assign(created)
        self._check_paths()
        # Names of parameters that the tree numbers; paths of optimizer state on the host with a parameter on a device.
        self.names, self.on_host = self._recorded_names(data)

    @property
    def tensors(self) -> list[NamedTensor]:
        return tensor_paths(self.tree)

    @property
    def entry_of(self) -> dict[int, int]:
        return {storage.data_ptr(): index for index, storage in self.storages.items()}

    @property
    def entries(self) -> set[int]:
        """The entries that hold tensors of the tree."""
        entry_of = self.entry_of
        found = {entry_at(tensor, entry_of) for _, tensor in self.tensors if not is_split(tensor)}
        return {entry for entry in found if entry is not None}

    def adopt(self, live: Mapping[str, Any]) -> int:
        """Let tensors of the tree share the memory of the live tensors at the same paths, where possible.

        A storage is shared if all its tensors, saved and live, have the same paths, dtypes, shapes, strides and
        offsets, and the live storage is CPU memory of exactly the entry's size. Tensors that are tied on one side only
        therefore keep memory of their own. `live`: Names to trees, such as `{"model": model.state_dict()}`. Returns the
        number of bytes that will be read straight into live memory.
        """
        there, here = tensor_paths(live), self.tensors
        # Two tensors at one path (`{"a/b": …}` beside `{"a": {"b": …}}`) cannot be told apart.
        unambiguous = unique_paths(path for path, _ in there) & unique_paths(path for path, _ in here)
        groups = _without_overlaps(_by_storage(there))
        wanted = {frozenset(path for path, _ in group): dict(group) for group in groups}
        own = _by_storage(here)
        adopted_bytes = 0
        for index, storage in self.storages.items():
            group = own.get(storage.data_ptr(), [])
            paths = frozenset(path for path, _ in group)
            target = wanted.get(paths)
            if target is None or not paths <= unambiguous:
                continue
            if not _same_memory_use(group, target, storage.nbytes()):
                continue
            memory = target[group[0][0]].detach().untyped_storage()
            with torch.no_grad():
                for _, tensor in group:
                    tensor.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
            self.storages[index] = memory
            adopted_bytes += memory.nbytes()
        return adopted_bytes

    def _recorded_names(self, data: bytes) -> tuple[dict[str, list[list[Position]]], frozenset[str]]:
        """Return the names and host paths from the record behind the pickle."""
        for entry in self._image.entries:
            if entry.name.endswith("/data.pkl") and entry.offset + entry.nbytes <= ends_of(self._image)[0]:
                record = data[entry.offset : entry.offset + entry.nbytes]
                return from_record(record, source=self._what), read_on_host(record)
        return {}, frozenset()

    def _assign(self, created: list[torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
        """Return the storage of each entry.

        `torch.save` numbers storages in the order in which the pickle first names them, and `torch.load` makes them
        in that order. Empty storages are made once per mention, so they are left out on both sides.
        """
        filled, numbered = [storage for storage in created if storage.nbytes()], self._storage_entries()
        if len(numbered) != len(filled):
            raise DamageError(
                f"{self._what}: {len(filled)} storages in the file, {len(numbered)} in its manifest"
            )
        for index, storage in zip(numbered, filled, strict=True):
            entry = self._image.entries[index]
            if entry.nbytes != storage.nbytes():
                raise DamageError(
                    f"{self._what}: {entry.name}: {storage.nbytes()} bytes in the file, {entry.nbytes} in its manifest"
                )
        return dict(zip(numbered, filled, strict=True))

    def _storage_entries(self) -> list[int]:
        """Return the entries of storages that are not empty, in the order of their numbers."""
        entries: Sequence[Entry | EntryRecord] = self._image.entries
        filled = [index for index, one in enumerate(entries) if is_storage(one.name) and one.nbytes]
        return sorted(filled, key=lambda index: int(entries[index].name.rpartition("/")[2]))

    def _check_paths(self) -> None:
        """Check that each tensor lies in the entry that the manifest names, as torch does not promise any order."""
        entry_of = self.entry_of
        stated: dict[str, set[int]] = {}
        for record in self._image.tensors:
            stated.setdefault(record.path, set()).add(record.entry)
        for path, tensor in self.tensors:
            if tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
                continue
            found = entry_at(tensor, entry_of)
            if path in stated and found not in stated[path]:
                names = sorted(self._image.entries[index].name for index in stated[path])
                got = "no entry" if found is None else self._image.entries[found].name
                raise DamageError(f"{self._what}: {path} lies in {got}, the manifest says {', '.join(names)}")


class _StructureFile(RangedFile):
    """The whole file, with head and tail served from memory. Without a store, nothing may be read between them."""

    def __init__(self, file: str, image: Manifest | Layout, data: bytes, store: Store | None) -> None:
        super().__init__(cast(Store, store), file, image.image_bytes)
        self._has_store, self._data = store is not None, memoryview(data)
        self._head_bytes, self._tail_offset = ends_of(image)
        self._end = image.image_bytes
        # The store's error, which torch's reader replaces by others.
        self.failure: HoldfastError | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        begin = self.tell()
        end = min(begin + view.nbytes, self._end)
        if begin >= end:
            return 0
        # A small image consists of head and tail only.
        if end <= self._head_bytes or self._head_bytes == self._tail_offset:
            shift = 0
        elif begin >= self._tail_offset:
            shift = self._head_bytes - self._tail_offset
        else:
            try:
                if not self._has_store:
                    what = f"torch asks for {end - begin} bytes at byte {begin}, where only tensors may be"
                    raise DamageError(f"{self.name}: {what}")
                return super().readinto(buffer)
            except HoldfastError as error:
                self.failure = error
                raise
        view[: end - begin] = self._data[begin + shift : end + shift]
        self.seek(end - begin, io.SEEK_CUR)
        return end - begin


def entry_at(tensor: torch.Tensor, entry_of: Mapping[int, int]) -> int | None:
    """Return the entry that holds a tensor of the file; None for an empty or a sparse one."""
    if tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
        return None
    return entry_of.get(tensor.untyped_storage().data_ptr())


def unique_paths(paths: Iterable[str]) -> set[str]:
    """Return the paths that occur only once."""
    return {path for path, count in Counter(paths).items() if count == 1}


@functools.cache
def _skipped_sizes_are_right() -> bool:
    """Whether skipped storages have their size. torch before 2.11 counts bytes as elements and makes them too large."""
    saved = io.BytesIO()
    torch.save(torch.zeros(1, device="cpu"), saved)  # on the CPU, regardless of the script's default device
    saved.seek(0)
    with torch.serialization.skip_data():
        read = torch.load(saved, map_location="cpu", weights_only=True)
    return bool(read.untyped_storage().nbytes() == read.nbytes)


def _resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """Return a storage of the entry's size, `nbytes`, for one that is too large by a factor of the element's size.

    A tensor that reaches beyond its end makes the storage grow, and `_assign` then finds that the sizes differ.
    """
    if storage.nbytes() not in {nbytes * itemsize for itemsize in _ITEMSIZES}:
        return storage
    return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]


def _by_storage(tensors: list[NamedTensor]) -> dict[int, list[NamedTensor]]:
    """Group plain CPU tensors that have memory by the address of their storage."""
    groups: dict[int, list[NamedTensor]] = {}
    for named in tensors:
        tensor = named.tensor
        if tensor_refusal(tensor) is None and tensor.device.type == "cpu" and _nbytes(tensor):
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(named)
    return groups


def _without_overlaps(groups: dict[int, list[NamedTensor]]) -> list[list[NamedTensor]]:
    """Return the groups whose memory overlaps no other group's (two storages may be made over the same memory)."""
    spans = sorted((address, address + _nbytes(group[0].tensor)) for address, group in groups.items())
    result, reached = [], 0
    for (begin, end), (following, _) in itertools.pairwise([*spans, (2**64, 2**64)]):
        if reached <= begin and end <= following:
            result.append(groups[begin])
        reached = max(reached, end)
    return result


def _same_memory_use(group: list[NamedTensor], live: dict[str, torch.Tensor], nbytes: int) -> bool:
    return all(
        _geometry(live[path]) == _geometry(tensor)
        and _nbytes(live[path]) == nbytes
        and not live[path].is_conj()
        and not live[path].is_neg()
        and not live[path].is_inference()
        for path, tensor in group
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
