"""The tree of a portable file, with tensors that are allocated but not yet read.

    file    │ data.pkl, small entries │ storages …………………………………………… │ serialization id, directory │
              head ───────┐                                             tail ───────┐
                          └► rank 0 reads both, broadcasts ► each rank: torch.load under skip_data ► tree
                                                                       storages, in the order of the pickle ► entries

Only head and tail are read for this; the bytes between are read by `trainer_side/reading.py`, straight to where they
belong. That is the tensors of the tree, or better, those of the live objects (`Structure.adopt`): then loading them
copies nothing.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from holdfast.crc import crc32
from holdfast.errors import DamageError, HoldfastError, StateError
from holdfast.manifest import EntryRecord, Manifest
from holdfast.storage.base import Store
from holdfast.storage.ranged import RangedFile
from trainer_side.state import Named, refusal, tensor_paths

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Structure", "once", "read_structure_bytes"]

# A zip reader looks for the end of the directory in this many bytes at the end of the file.
_TAIL_BYTES = 4096

_Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...], int]


def read_structure_bytes(store: Store, manifest: Manifest) -> bytes:
    """Head and tail of the file, back to back. Any thread.

    Raises:
        DamageError: The file is short, or its pickle is not what was written.
        StoreError: The store failed.
    """
    head_bytes, tail_offset = _bounds(manifest)
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


class Structure:
    """The tree, and which storage belongs to which entry.

    Args:
        store: Asked only for bytes that are in neither head nor tail.
        manifest: The file's manifest.
        data: What `read_structure_bytes` gave.

    Raises:
        DamageError: Not a file that torch reads, or it contradicts its manifest.
        StateError: It is whole, but holds what `torch.load(weights_only=True)` does not allow.
    """

    def __init__(self, store: Store, manifest: Manifest, data: bytes) -> None:
        self._what = f"{store.url}/{manifest.file}"
        self._manifest = manifest
        created: list[torch.UntypedStorage] = []

        def note(storage: Any, _location: str) -> Any:
            created.append(storage)
            return storage

        file = _StructureFile(store, manifest, data)
        try:
            with torch.serialization.skip_data():
                self.tree: Any = torch.load(cast(IO[bytes], file), map_location=note, weights_only=True)
        except pickle.UnpicklingError as error:
            raise StateError(
                f"{self._what}: torch.load(weights_only=True) does not take what is in it, though the "
                f"bytes are those that were written; allow the types with torch.serialization.add_safe_globals: {error}"
            ) from error
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            AssertionError,
            EOFError,
            OSError,
        ) as error:
            if file.failure is not None:
                raise file.failure from error
            raise DamageError(f"{self._what}: not a file that torch reads: {error}") from error
        self.storages = self._assign(created)
        self._check_paths()

    @property
    def tensors(self) -> list[Named]:
        """Path and tensor, in the order of the tree."""
        return tensor_paths(self.tree)

    def adopt(self, live: Mapping[str, Any]) -> int:
        """Make tensors of the tree share the memory of the live tensors at the same paths, where they may.

        They may if all tensors of a storage, here and there, are at the same paths with the same dtype, shape,
        strides and offset, and the live storage is CPU memory of exactly the entry's size. So what is tied here and
        not there (or the other way round) keeps memory of its own.

        Args:
            live: Names to trees, such as `{"model": model.state_dict()}`.

        Returns:
            Number of bytes that will be read straight into live memory.
        """
        there, here = tensor_paths(live), self.tensors
        # Two tensors at one path (`{"a/b": …}` beside `{"a": {"b": …}}`) cannot be told apart.
        clear = once(path for path, _ in there) & once(path for path, _ in here)
        wanted = {frozenset(path for path, _ in group): dict(group) for group in _apart(_by_storage(there))}
        own = _by_storage(here)
        adopted_bytes = 0
        for index, storage in self.storages.items():
            group = own.get(storage.data_ptr(), [])
            paths = frozenset(path for path, _ in group)
            target = wanted.get(paths)
            if target is None or not paths <= clear:
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

    def _assign(self, created: list[torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
        """Entry index → storage.

        `torch.save` numbers storages in the order in which the pickle first names them, and `torch.load` makes them
        in that order. Empty ones are made again each time they are named: they are left out on both sides.
        """
        filled = [storage for storage in created if storage.nbytes()]
        numbered = sorted(
            (int(entry.name.rpartition("/")[2]), index)
            for index, entry in enumerate(self._manifest.entries)
            if _is_storage(entry) and entry.nbytes
        )
        if len(numbered) != len(filled):
            raise DamageError(
                f"{self._what}: {len(filled)} storages in the file, {len(numbered)} in its manifest"
            )
        for (_, index), storage in zip(numbered, filled, strict=True):
            entry = self._manifest.entries[index]
            if entry.nbytes != storage.nbytes():
                raise DamageError(
                    f"{self._what}: {entry.name}: {storage.nbytes()} bytes in the file, {entry.nbytes} in its manifest"
                )
        return {index: storage for (_, index), storage in zip(numbered, filled, strict=True)}

    def _check_paths(self) -> None:
        """See that each tensor lies in the entry that the manifest names: the order above is torch's, not a promise."""
        entry_of = {storage.data_ptr(): index for index, storage in self.storages.items()}
        stated: dict[str, set[int]] = {}
        for record in self._manifest.tensors:
            stated.setdefault(record.path, set()).add(record.entry)
        for path, tensor in self.tensors:
            if (
                path not in stated
                or tensor.layout is not torch.strided
                or not tensor.untyped_storage().nbytes()
            ):
                continue
            found = entry_of.get(tensor.untyped_storage().data_ptr())
            if found not in stated[path]:
                names = sorted(self._manifest.entries[index].name for index in stated[path])
                got = "no entry" if found is None else self._manifest.entries[found].name
                raise DamageError(f"{self._what}: {path} lies in {got}, the manifest says {', '.join(names)}")


class _StructureFile(RangedFile):
    """The whole file, of which head and tail need no request.

    Attributes:
        failure: What the store raised: torch's reader makes other errors of it.
    """

    def __init__(self, store: Store, manifest: Manifest, data: bytes) -> None:
        super().__init__(store, manifest.file, manifest.image_bytes)
        self._data = memoryview(data)
        self._head_bytes, self._tail_offset = _bounds(manifest)
        self._end = manifest.image_bytes
        self.failure: HoldfastError | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        begin = self.tell()
        end = min(begin + view.nbytes, self._end)
        if begin >= end:
            return 0
        if end <= self._head_bytes:
            shift = 0
        elif begin >= self._tail_offset:
            shift = self._head_bytes - self._tail_offset
        else:
            try:
                return super().readinto(buffer)
            except HoldfastError as error:
                self.failure = error
                raise
        view[: end - begin] = self._data[begin + shift : end + shift]
        self.seek(end - begin, io.SEEK_CUR)
        return end - begin


def _is_storage(entry: EntryRecord) -> bool:
    folder, _, key = entry.name.rpartition("/")
    return folder.endswith("/data") and key.isascii() and key.isdecimal()


def _bounds(manifest: Manifest) -> tuple[int, int]:
    """Where the head ends and the tail begins."""
    storages = [entry for entry in manifest.entries if _is_storage(entry) and entry.nbytes]
    if not storages:
        return manifest.image_bytes, manifest.image_bytes
    head_bytes = min(entry.offset for entry in storages)
    tail_offset = min(
        max(entry.offset + entry.nbytes for entry in storages), manifest.image_bytes - _TAIL_BYTES
    )
    return head_bytes, max(head_bytes, tail_offset)


def once(paths: Iterable[str]) -> set[str]:
    """The paths that stand for one tensor only."""
    return {path for path, count in Counter(paths).items() if count == 1}


def _by_storage(tensors: list[Named]) -> dict[int, list[Named]]:
    """Address of the memory → what lies in it. Only plain CPU tensors with memory."""
    groups: dict[int, list[Named]] = {}
    for named in tensors:
        if refusal(named.tensor) is None and named.tensor.device.type == "cpu" and _nbytes(named.tensor):
            groups.setdefault(named.tensor.untyped_storage().data_ptr(), []).append(named)
    return groups


def _apart(groups: dict[int, list[Named]]) -> list[list[Named]]:
    """Those whose memory no other one reaches into (two storages may be made over the same memory)."""
    spans = sorted((address, address + _nbytes(group[0].tensor)) for address, group in groups.items())
    result, reached = [], 0
    for (begin, end), (following, _) in itertools.pairwise([*spans, (2**64, 2**64)]):
        if reached <= begin and end <= following:
            result.append(groups[begin])
        reached = max(reached, end)
    return result


def _same_memory_use(group: list[Named], live: dict[str, torch.Tensor], nbytes: int) -> bool:
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


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
