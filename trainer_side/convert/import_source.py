"""Opens a file of another tool, and makes it a state that a `Checkpointer` can restore.

file ─► torch.save, in zip format     torch.load(weights_only=True, mmap=True): code in it is refused
     ├► safetensors                   safetensors_in
     └► folder of DCP                 dcp_in
tree ─► names: under, renamed, dropped ─► can it be saved? ─► ImportedState: skeleton, and chunks on request

Tensors may lie in a mapped file, or in files that are read for each chunk. Memory then holds only the publisher's parts
and the page cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.errors import ConfigError, DamageError, StateError
from holdfast.image.layout import CHUNK_BYTES, Layout
from holdfast.wire.state_messages import Agreement
from trainer_side.convert.contents import bytes_of
from trainer_side.convert.dcp_in import read_dcp, read_names
from trainer_side.convert.dcp_parts import StoredTensor
from trainer_side.convert.safetensors_in import read_safetensors
from trainer_side.state.pickle_bounds import (
    NOT_READABLE,
    refuse_costly_pickle,
    refuse_packed,
    unpickler_cause,
)
from trainer_side.state.position_names import Position, Positions, from_record, to_trailer
from trainer_side.state.skeleton import capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, tensor_paths

_ZIP_MAGIC = b"PK\x03\x04"
_NAMES_SHOWN = 8


class ImportedState:
    """An opened state as the image of a checkpoint of one rank: a `holdfast.command.converters.ImportSource`.

    Its tensors must not change. `stored`: Sources of the bytes of tensors that are not in memory. StateError: the state
    cannot be saved; names the path.
    """

    def __init__(
        self, kind: str, tree: Mapping[str, Any], stored: Sequence[StoredTensor], names: Positions
    ) -> None:
        self.kind, self._tree = kind, tree
        self._stored = {one.tensor.data_ptr(): one for one in stored}
        trailer = to_trailer(names)
        proposed = table(tree, tree, rank=0, ranks=1, trailer_bytes=len(trailer))
        self._skeleton = plan(
            tree,
            classify(tree, tree),
            rank=0,
            ranks=1,
            chunk_bytes=CHUNK_BYTES,
            agreed=Agreement(proposed.pickle_bytes, {}),
            trailer=trailer,
        )
        captured = capture(tree, self._skeleton, trailer=trailer)
        assert captured is not None, "the plan is of this tree"
        self._captured = captured

    @property
    def names(self) -> Sequence[str]:
        return list(self._tree)

    @property
    def tensors(self) -> int:
        return len(tensor_paths(self._tree))

    @property
    def layout(self) -> Layout:
        return self._skeleton.layout

    def write_chunk(self, chunk: int, memory: memoryview) -> None:
        extent = self.layout.chunk_extent(chunk)
        self._skeleton.write_literals(extent, memory)
        for segment in self.layout.segments(chunk):
            if segment.entry is not None:
                begin = segment.offset - extent.offset
                offset = segment.offset - self.layout.entries[segment.entry].offset
                self._write_part(segment.entry, offset, memory[begin : begin + segment.nbytes])

    def _write_part(self, entry: int, offset: int, out: memoryview) -> None:
        content = self._captured.contents.get(entry)
        if content is not None:
            out[:] = content[offset : offset + len(out)]
            return
        source = self._captured.sources[entry]
        assert source is not None, "one rank has every storage"
        stored = self._stored.get(source.data_ptr)
        if stored is not None:
            stored.read(offset, out)
        else:
            out[:] = bytes_of(source.data_ptr + offset, len(out))


def open_import_source(
    path: Path, *, under: str | None, renamed: Mapping[str, str], dropped: Sequence[str]
) -> ImportedState:
    """Open a file or folder; for `holdfast import`.

    `under`: Put the whole content under this name of the state. `renamed`: Names at the top to the names of the state.
    `dropped`: Names at the top to leave out. ConfigError: the file cannot be read, or there is no such name.
    DamageError: unknown format. StateError: `torch.load(weights_only=True)` refuses the file, or it has no names.
    """
    try:
        kind, tree, part, stored, names = read_source(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if kind == "safetensors" and under is None:
        under = part
    if under is not None:
        tree = {under: tree}
    named = _named(tree, str(path), renamed, dropped)
    if part is not None and under is None:
        names = {}  # they name a part of a state, whose content is at the top now
    return ImportedState(kind, named, stored, _moved(names, under, part, renamed))


def _moved(
    names: Positions, under: str | None, part: str | None, renamed: Mapping[str, str]
) -> dict[str, list[list[Position]]]:
    """Adapt the names to moved objects; a part of a state has names with paths of the whole state."""

    def moved(path: str) -> str:
        top, slash, rest = (path if under is None or part is not None else f"{under}/{path}").partition("/")
        if part is not None and under is not None and top == part:
            top = under
        return f"{renamed.get(top, top)}{slash}{rest}"

    return {
        moved(at): [[Position(tuple(map(moved, one.names)), one.shape) for one in group] for group in groups]
        for at, groups in names.items()
    }


class LoadedSource(NamedTuple):
    """An opened file: format, tree, name of the part of the state, sources of its bytes, parameter names."""

    kind: str
    tree: Any
    part: str | None
    stored: Sequence[StoredTensor]
    names: Positions


def read_source(path: Path) -> LoadedSource:
    """Open a file or folder; tensors of a file are mapped, not read. Raises as `open_import_source`, and `OSError`."""
    if path.is_dir():
        tree, stored = read_dcp(path)
        part, names = read_names(path)
        return LoadedSource("dcp", tree, part, stored, names)
    if not path.is_file():  # opening a FIFO would block until a writer opens it
        raise ConfigError(f"{path}: expected a file or a directory, it is a FIFO, a socket or a device")
    with path.open("rb") as file:
        magic = file.read(16)
    if magic[:4] == _ZIP_MAGIC:
        tree = _read_torch(path)
        with path.open("rb") as file:
            record = torch._C.PyTorchFileReader(file).get_record("data.pkl")
        return LoadedSource("torch", tree, None, (), from_record(record, source=str(path)))
    if magic[8:9] == b"{":
        tree, part, names = read_safetensors(path)
        return LoadedSource("safetensors", tree, part, (), names)
    raise DamageError(
        f"{path}: the file begins with {magic[:4]!r}, so it is neither a torch file in zip format nor a safetensors "
        "file; if it is an older torch file, load it with torch.load and save it with torch.save"
    )


def _read_torch(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            refuse_packed(file, str(path))
            refuse_costly_pickle(file, str(path))
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{path}: torch.load(weights_only=True) refuses the file ({unpickler_cause(error)}); if you trust the "
            "file, load it with weights_only=False, and save its state_dict()s, tensors and plain values in a new file"
        ) from error
    except OSError:
        raise
    except NOT_READABLE as error:
        raise DamageError(f"{path}: not a file that torch reads: {error}") from error


def _named(tree: Any, what: str, renamed: Mapping[str, str], dropped: Sequence[str]) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise StateError(
            f"{what}: holds a {type(tree).__name__}, expected a dict of names; --under model puts it under a name"
        )
    unknown = [name for name in (*renamed, *dropped) if name not in tree]
    if unknown:
        raise ConfigError(f"{what}: there is no {unknown[0]!r} in it; it has {_format_names(tree)}")
    kept = [name for name in tree if name not in dropped]
    named: dict[Any, Any] = {renamed.get(name, name): tree[name] for name in kept}
    if len(named) + len(dropped) < len(tree) or not named:
        raise ConfigError(
            f"{what}: after --rename and --drop, two names are the same or no name is left: {_format_names(named)}"
        )
    wrong = [name for name in named if not isinstance(name, str) or not name or "/" in name]
    if wrong:
        raise StateError(
            f"{what}: the name {wrong[0]!r} cannot stand at the top of a state (non-empty text without '/'); "
            "--under model puts all of it under one name"
        )
    return named


def _format_names(names: Mapping[Any, Any]) -> str:
    shown = ", ".join(map(repr, list(names)[:_NAMES_SHOWN]))
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
