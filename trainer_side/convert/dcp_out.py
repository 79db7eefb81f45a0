"""Writes a checkpoint as a folder of torch.distributed.checkpoint with its own writer: one storage in memory at a time.

The planner is DCP's own, except that it reads a tensor's bytes, and checks their CRC-32, when the writer needs them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.command.converters import ExportResult
from holdfast.command.output import progress_bar
from holdfast.command.place import write_folder
from holdfast.errors import HoldfastError, StateError
from holdfast.image.manifest import Manifest
from holdfast.store.base import Store
from trainer_side.convert.contents import Contents, dense
from trainer_side.convert.dcp_in import NAMES_FILE
from trainer_side.state.position_names import to_rows


def write_dcp(store: Store, manifest: Manifest, path: Path, *, only: str | None, quiet: bool) -> ExportResult:
    """Write the folder at `path`, whole or not at all; for `holdfast export`.

    `only`: A name at the top of the state: export only the tree under it. DamageError: bytes are damaged; names the
    tensors. StateError: two values would have one name. StoreError: the store or the folder failed.
    """
    contents = Contents(store, manifest, only=only)
    if not isinstance(contents.tree, dict):
        raise StateError(
            f"--only {only}: DCP saves dicts, and this is a {type(contents.tree).__name__}; leave --only out"
        )
    flat = contents.flat_tensors()
    entries = [contents.entry(tensor) for _, tensor in contents.tensors]
    read_bytes = sum(contents.nbytes(entry) for entry in entries if entry is not None)

    def fill(folder: Path, advance: Callable[[int], None]) -> None:
        _save(contents, folder, advance)
        if contents.names:
            document = {"only": only, "names": to_rows(contents.names)}
            (folder / NAMES_FILE).write_text(json.dumps(document), encoding="ascii")

    with progress_bar(path.name, read_bytes, hidden=quiet) as advance:
        write_folder(path, read_bytes, lambda folder: fill(folder, advance))
    return ExportResult(read_bytes, len(flat), {one.name: one.tied_to for one in flat if one.tied_to})


def _save(contents: Contents, folder: Path, advance: Callable[[int], None]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
            save(
                contents.tree,
                storage_writer=FileSystemWriter(folder),
                planner=_ReadingPlanner(contents, advance),
                no_dist=True,
            )
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, HoldfastError | OSError):
                raise cause from error
        raise StateError(f"DCP does not save this state: {error}") from error
    except ValueError as error:
        raise StateError(f"DCP does not save this state: {error}") from error


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when it is written."""

    def __init__(self, contents: Contents, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._contents, self._advance = contents, advance

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a tensor of the tree with its bytes read; other values unchanged."""
        value = super().lookup_object(index)
        entry = self._contents.entry(value) if isinstance(value, torch.Tensor) else None
        if entry is None:
            return value
        found = dense(value, self._contents.load(entry))
        self._advance(self._contents.nbytes(entry))
        return found
