"""A checkpoint to read from: its tree, and the bytes of its tensors, one storage at a time.

    manifest ─► structure: the tree, its tensors allocated and untouched
             └► stream(entry): windows of its bytes ─► sink, and their CRC-32 against the manifest's

Bytes are read on request only. The sink must not rely on them before `stream` has returned.
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
from trainer_side.state.tree import NamedTensor, tensor_paths

_READS_MAX = 2  # a wrong CRC may be a transfer error
_WINDOW_BYTES_MAX = 16 * 1024 * 1024

Sink = Callable[[int, memoryview], None]
"""Takes bytes of a storage: where they begin in it, and a view that is valid for this call only."""


class FlatTensor(NamedTuple):
    """A tensor by its flat name, as other tools use it: `model/layer.0.weight` is `model.layer.0.weight`."""

    name: str
    path: str
    tensor: torch.Tensor
    # Flat name of the first tensor at this place with this shape; empty for the first itself.
    tied_to: str = ""


class Contents:
    """One checkpoint. `stream` and `load` may be called from several threads.

    `only`: A name at the top of the state: only the tree under it is read. DamageError: the file is damaged.
    StateError: there is no such name. StoreError: the store failed.
    """

    def __init__(self, store: Store, manifest: Manifest, *, only: str | None = None) -> None:
        self.store, self.manifest = store, manifest
        data = read_structure_bytes(store, manifest)
        try:
            self._structure = Structure(manifest.file, manifest, data, store)
        except StateError:
            check_structure_chunks(store, manifest)  # raises if the file is damaged
            raise
        self.tree: Any = part_of(self._structure.tree, only, manifest.file)
        # Names of parameters that the tree only numbers; their paths begin at the top of the state.
        names = self._structure.names
        self.names = {at: names[at] for at in names if only is None or at.partition("/")[0] == only}
        is_tensor = isinstance(self.tree, torch.Tensor)
        self.tensors: list[NamedTensor] = (
            [NamedTensor("", self.tree)] if is_tensor else tensor_paths(self.tree)
        )
        storages = self._structure.storages
        self._entries = {storage.data_ptr(): index for index, storage in storages.items() if storage.nbytes()}
        self._windows = threading.local()

    def entry(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the entry that holds a tensor's storage; None for a tensor without bytes."""
        return self._entries.get(tensor.untyped_storage().data_ptr())

    def flat_tensors(self) -> list[FlatTensor]:
        """Return the tensors with flat names, in the order of the tree. StateError: two paths have one flat name."""
        paths: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        found: list[FlatTensor] = []
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
            found.append(FlatTensor(name, path, tensor, "" if same == name else same))
        return found

    def nbytes(self, entry: int) -> int:
        return self.manifest.entries[entry].nbytes

    def stream(self, entry: int, sink: Sink) -> None:
        """Pass all bytes of an entry to `sink`, in order; once more from the beginning if their CRC is wrong.

        DamageError: the bytes are damaged. StoreError: the store failed.
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
        """Read the storage of an entry into new memory."""
        nbytes = self.nbytes(entry)
        storage = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        memory = bytes_of(storage.data_ptr(), nbytes)

        def copy_in(offset: int, part: memoryview) -> None:
            memory[offset : offset + len(part)] = part

        self.stream(entry, copy_in)
        return storage

    def _window(self) -> memoryview:
        window: memoryview | None = getattr(self._windows, "view", None)
        if window is None:
            nbytes = min(_WINDOW_BYTES_MAX, max(1, self.manifest.image_bytes))
            window = self._windows.view = memoryview(mmap.mmap(-1, nbytes))  # page-aligned, for direct reads
        return window


def part_of(tree: Any, only: str | None, what: str) -> Any:
    """Return the value under the name `only`, or the whole state for None. StateError: there is no such name."""
    if only is None:
        return tree
    if not isinstance(tree, dict) or only not in tree:
        names = ", ".join(map(str, tree)) if isinstance(tree, dict) else f"a {type(tree).__name__}"
        raise StateError(f"{what}: --only {only}: there is no such name in it; it holds {names}")
    return tree[only]


def bytes_of(address: int, nbytes: int) -> memoryview:
    """Return memory as bytes; the caller must keep its owner alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def dense(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return `tensor` of the tree with these bytes as its storage, contiguous and without lazy conj or neg bits."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage, *place)
    if tensor.is_conj():
        found = found.conj()
    if tensor.is_neg():
        found = torch._neg_view(found)
    return found.resolve_conj().resolve_neg().contiguous()
