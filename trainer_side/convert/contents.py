"""A checkpoint of a run to take things out of: its tree, and the bytes of its tensors, one storage after the other.

    manifest ─► structure: the tree, its tensors allocated and untouched
             └► stream(entry): windows of its bytes ─► sink, and their CRC-32 against the manifest's

Nothing is read that nobody asks for, and nothing that is given out counts before `stream` has returned.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from holdfast.crc import crc32
from holdfast.errors import DamageError, StateError
from holdfast.image.manifest import Manifest
from holdfast.store.base import Store
from trainer_side.restore.structure import Structure, check_structure_chunks, read_structure_bytes
from trainer_side.state.tree import Named, tensor_paths

_READS_MAX = 2  # bytes that came wrong may have changed on their way only
_WINDOW_BYTES_MAX = 16 * 1024 * 1024

Sink = Callable[[int, memoryview], None]
"""Takes bytes of a storage: where they begin in it, and a view that is good for this call only."""


class Flat(NamedTuple):
    """A tensor by its flat name, as other tools have it: `model/layer.0.weight` is `model.layer.0.weight`."""

    name: str
    path: str
    tensor: torch.Tensor
    # Flat name of the first tensor at this place with this shape; empty for the first itself.
    tied_to: str = ""


class Contents:
    """One checkpoint. `stream` and `load` may be called from several threads.

    `only`: A name at the top of the state: of the tree, nothing but what is under it. DamageError: the file is not as
    it was written. StateError: there is no such name. StoreError: the store failed.
    """

    def __init__(self, store: Store, manifest: Manifest, *, only: str | None = None) -> None:
        self.store, self.manifest = store, manifest
        data = read_structure_bytes(store, manifest)
        try:
            self._structure = Structure(manifest.file, manifest, data, store)
        except StateError:
            check_structure_chunks(store, manifest)  # it is the file, and not what is in it
            raise
        self.tree: Any = part_of(self._structure.tree, only, manifest.file)
        # Names of objects that the tree has by number only; their paths begin at the top of the state.
        self.names = {
            at: groups
            for at, groups in self._structure.names.items()
            if only is None or at.partition("/")[0] == only
        }
        alone = isinstance(self.tree, torch.Tensor)
        self.tensors: list[Named] = [Named("", self.tree)] if alone else tensor_paths(self.tree)
        self._entries = {
            storage.data_ptr(): index
            for index, storage in self._structure.storages.items()
            if storage.nbytes()
        }
        self._windows = threading.local()

    def entry(self, tensor: torch.Tensor) -> int | None:
        """Index of the entry that holds a tensor's storage; None for a tensor without bytes."""
        return self._entries.get(tensor.untyped_storage().data_ptr())

    def flat(self) -> list[Flat]:
        """The tensors with flat names, in the order of the tree. StateError: two paths come to the same name."""
        paths: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        found: list[Flat] = []
        for path, tensor in self.tensors:
            name = path.replace("/", ".") or "tensor"
            if name in paths:
                raise StateError(
                    f"{paths[name]} and {path} would both be named {name}; export with --to dcp or torch, or export "
                    "only one of them with --only"
                )
            paths[name] = path
            entry = self.entry(tensor)
            place = (entry, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            same = "" if entry is None else first.setdefault(place, name)
            found.append(Flat(name, path, tensor, "" if same == name else same))
        return found

    def nbytes(self, entry: int) -> int:
        return self.manifest.entries[entry].nbytes

    def stream(self, entry: int, sink: Sink) -> None:
        """Give all bytes of an entry to `sink`, in order; from the beginning again if they came damaged.

        DamageError: they are not what was written. StoreError: the store failed.
        """
        record = self.manifest.entries[entry]
        window = self._window()
        found = 0
        for _ in range(_READS_MAX):
            found, done = 0, 0
            while done < record.nbytes:
                part = window[: min(len(window), record.nbytes - done)]
                self.store.read_into(self.manifest.file, record.offset + done, part)
                found = crc32(part, found)
                sink(done, part)
                done += len(part)
            if found == record.crc32:
                return
        paths = [one.path for one in self.manifest.tensors if one.entry == entry][:8]
        raise DamageError(
            f"{self.store.url}/{self.manifest.file}: {record.name} ({', '.join(paths)}): CRC-32 expected "
            f"{record.crc32:08x}, got {found:08x}; `holdfast ls` shows other steps"
        )

    def load(self, entry: int) -> torch.UntypedStorage:
        """The storage of an entry, in memory of its own: it goes when nobody refers to it any more."""
        nbytes = self.nbytes(entry)
        storage = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        memory = bytes_of(storage.data_ptr(), nbytes)

        def lay(offset: int, part: memoryview) -> None:
            memory[offset : offset + len(part)] = part

        self.stream(entry, lay)
        return storage

    def _window(self) -> memoryview:
        window: memoryview | None = getattr(self._windows, "view", None)
        if window is None:
            nbytes = min(_WINDOW_BYTES_MAX, max(1, self.manifest.image_bytes))
            window = self._windows.view = memoryview(mmap.mmap(-1, nbytes))  # page-aligned, for direct reads
        return window


def part_of(tree: Any, only: str | None, what: str) -> Any:
    """The value under one name of a state, or without `only` the whole state. StateError: there is no such name."""
    if only is None:
        return tree
    if not isinstance(tree, dict) or only not in tree:
        names = ", ".join(map(str, tree)) if isinstance(tree, dict) else f"a {type(tree).__name__}"
        raise StateError(f"{what}: --only {only}: there is no such name in it; it holds {names}")
    return tree[only]


def bytes_of(address: int, nbytes: int) -> memoryview:
    """Memory as bytes; whoever owns it must keep it."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def dense(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """`tensor` of the tree, with these bytes as its storage: in row-major order, without gaps."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage, *place)
    if tensor.is_conj():
        found = found.conj()
    if tensor.is_neg():
        found = torch._neg_view(found)
    return found.resolve_conj().resolve_neg().contiguous()
