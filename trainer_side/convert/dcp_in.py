"""Opens a folder of torch.distributed.checkpoint, of any number of ranks, as a tree without reading its tensors.

    .metadata ─► check its claims ─► tree: plain values, and tensors whose memory is never touched
                                  └► where the bytes of each tensor lie (dcp_parts), to be read later
    holdfast-names.json              {"only": null, "names": {"optimizer": [["model/a.weight", …]]}}; DCP ignores it

DCP unpickles its `.metadata` and each plain value without restriction. This module allows only DCP's own records in the
metadata, and reads values with `weights_only=True`: no code in the folder is run.
"""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.futures import Future

from holdfast.errors import ConfigError, DamageError, HoldfastError, StateError
from holdfast.parse_cost import PLAIN_FACTOR, check_cost, json_cost
from holdfast.pickle_cost import check_pickle
from trainer_side.convert.dcp_claims import check_claims
from trainer_side.convert.dcp_parts import StoredTensor, pattern_of, stored_tensor
from trainer_side.state.pickle_bounds import NOT_READABLE, unpickler_cause
from trainer_side.state.position_names import Positions, from_rows

NAMES_FILE = "holdfast-names.json"
_NAMES_BYTES_MAX = 1 << 28
_METADATA = ".metadata"
_METADATA_BYTES_MAX = 1 << 28
_TUPLES_MAX = 16  # paths in the state are tuples, and so are sizes
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def read_dcp(folder: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Open the folder: a tree, whose tensors have undefined content, and where their bytes are stored.

    ConfigError: it is no DCP checkpoint. DamageError, StateError: it cannot be read.
    """
    if not (folder / _METADATA).is_file():
        raise ConfigError(
            f"{folder}: the folder has no {_METADATA}, so it is no checkpoint of torch.distributed.checkpoint; "
            "name a checkpoint folder, or a file"
        )
    state: dict[str, Any] = {}
    stored: list[StoredTensor] = []
    try:
        metadata = _metadata_of(folder)
        planner = _Planner()  # type: ignore[no-untyped-call]
        reader = _DcpReader(folder, metadata)
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        for name, tensor in planner.state_dict.items():
            record = metadata.state_dict_metadata[name]
            if isinstance(record, TensorStorageMetadata) and tensor.numel():
                pattern = pattern_of(record)
                stored.append(stored_tensor(folder, name, tensor, record, metadata.storage_data, pattern))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise _as_holdfast_error(folder, cause) from error
    except OSError:
        raise
    except (pickle.PickleError, *NOT_READABLE) as error:
        raise _as_holdfast_error(folder, error) from error
    _restore_numbers(state)
    return state, stored


def read_names(folder: Path) -> tuple[str | None, Positions]:
    """Read the names in a folder; none if only DCP wrote it. Raises OSError; DamageError: the file is damaged.

    Returns also the name of the part of the state that is in the folder; None: the whole state.
    """
    path = folder / NAMES_FILE
    if not path.is_file():
        return None, {}
    try:
        if path.stat().st_size > _NAMES_BYTES_MAX:
            raise ValueError(f"{path.stat().st_size} bytes, expected at most {_NAMES_BYTES_MAX}")
        raw = path.read_bytes()
        check_cost(json_cost(raw), len(raw), PLAIN_FACTOR)
        document = json.loads(raw)
        only = document["only"]
        return None if only is None else str(only), from_rows(document["names"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path}: the names of parameters cannot be read: {error!r:.200}") from error


def _as_holdfast_error(folder: Path, error: BaseException) -> BaseException:
    if isinstance(error, HoldfastError | OSError):
        return error
    if isinstance(error, pickle.UnpicklingError):
        return StateError(
            f"{folder}: cannot be read without running code in it ({unpickler_cause(error)}); if you trust it, "
            "dcp.load it, and save its tensors and plain values again"
        )
    return DamageError(f"{folder}: not a checkpoint that DCP reads: {error}")


class _RecordsUnpickler(pickle.Unpickler):
    """Unpickles records of DCP and dtypes; refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        known = name in _RECORDS.get(module, ())
        if not known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"{module}.{name} in {_METADATA}")
        return super().find_class(module, name)


def _member_of(of: object, name: str) -> Enum:
    """Replace `getattr` for its one allowed use: Python 3.11's first releases pickle enumeration members with it."""
    if not (isinstance(of, EnumType) and name in of.__members__):
        raise pickle.UnpicklingError(f"builtins.getattr in {_METADATA}")
    return cast("Enum", of[name])


def _metadata_of(folder: Path) -> Metadata:
    path = folder / _METADATA
    nbytes = path.stat().st_size
    if nbytes > _METADATA_BYTES_MAX:
        raise DamageError(
            f"{path}: {nbytes} bytes, expected at most {_METADATA_BYTES_MAX}, which is over a million chunks; not "
            "read: dcp.load it where it was written, and save it with torch.save"
        )
    pickled = path.read_bytes()
    if check_pickle(pickled, _TUPLES_MAX) > _TUPLES_MAX:
        raise ValueError(f"{_METADATA} holds a tuple that is nested deeper than {_TUPLES_MAX} levels")
    metadata = _RecordsUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{_METADATA} holds a {type(metadata).__name__}")
    check_claims(folder, metadata, len(pickled))
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


class _DcpReader(FileSystemReader):
    """DCP's own reader, with metadata that was already read; reads plain values only."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._read = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._read

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        return super().read_data(replace(plan, items=values), planner)


class _Planner(_EmptyStateDictLoadPlanner):
    """Makes the state from the metadata; reads values with weights_only."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _restore_numbers(tree: Any) -> None:
    """Restore the numbers of optimizer parameters: DCP turns every key into text."""
    if not isinstance(tree, dict):
        return
    state, groups = tree.get("state"), tree.get("param_groups")
    if isinstance(state, dict) and isinstance(groups, list):
        params = [one for group in groups if isinstance(group, dict) for one in group.get("params", ())]
        numbers = {str(one): one for one in params if isinstance(one, int)}
        tree["state"] = {numbers.get(key, key): value for key, value in state.items()}
    for value in tree.values():
        _restore_numbers(value)
