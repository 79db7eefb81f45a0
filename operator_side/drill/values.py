"""Reads the values of a checkpoint file other than tensors, by path and without torch, to compare two files.

    data.pkl ─► Unpickler that knows no class ─► tree of plain values and `InertObject`s ─► {"scheduler/…": "12", …}

No code named in the pickle is ever run: each class and function becomes an `InertObject`, which keeps its arguments.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

from holdfast.errors import DamageError
from holdfast.parse_cost import check_cost, json_cost
from holdfast.pickle_cost import PICKLE_FACTOR, check_pickle

_LENGTH_BYTES = 8  # before a `PerRank` value (docs/format.md, section 2)
_ZIP = b"PK\x03\x04"
_LEAF_BYTES = 200
_TUPLES_MAX = 1000


class InertObject:
    """Stands for an object in a pickle: the name of its class, and its arguments."""

    name = ""

    def __new__(cls, *arguments: Any, **named: Any) -> InertObject:
        made = super().__new__(cls)
        made.__dict__ = {"arguments": (*arguments, *named.items()), "state": [], "items": []}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> InertObject:
        # A pickle may call the result of another call.
        return InertObject(self, *arguments)

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"].append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["items"].append((key, value))

    def append(self, value: Any) -> None:
        self.__dict__["items"].append(value)

    def extend(self, values: Any) -> None:
        self.__dict__["items"].extend(values)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type("InertObject", (InertObject,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return ("storage", *(getattr(part, "name", part) for part in pid[1:]))


def read_values(pickled: bytes, *, source: str) -> dict[str, str]:
    """Return the values of a data.pkl by path; tensors without their bytes. Raises `DamageError`: it is no pickle."""
    try:
        return _collect_limited(_leaves("", _tree(pickled)), len(pickled))
    except Exception as error:  # a damaged pickle may raise anything
        raise DamageError(f"{source}: data.pkl cannot be read: {type(error).__name__}: {error}") from error


def read_per_rank_values(blob: bytes) -> dict[str, str] | None:
    """Return the values in a `PerRank` value, which a checkpoint keeps as a tensor of bytes; None if it is not one."""
    size = int.from_bytes(blob[:_LENGTH_BYTES], "little")
    body = blob[_LENGTH_BYTES : _LENGTH_BYTES + size]
    if not body.startswith(_ZIP) or len(body) != size:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            data = {name.partition("/")[2]: name for name in archive.namelist()}
            if archive.getinfo(data["data.pkl"]).file_size > size:
                return None  # compressed, which torch never does
            tree = _tree(archive.read(data["data.pkl"]))
            storages = {
                name.removeprefix("data/"): str(archive.getinfo(full).CRC)
                for name, full in data.items()
                if name.startswith("data/")
            }
            return _collect_limited(_leaves("", tree, storages), size)
    except Exception:  # noqa: BLE001 - not a PerRank value, so it is compared as bytes
        return None


def _tree(pickled: bytes) -> Any:
    if check_pickle(pickled, _TUPLES_MAX) > _TUPLES_MAX:
        raise ValueError(f"a tuple that is nested deeper than {_TUPLES_MAX} levels")
    return _Unpickler(io.BytesIO(pickled)).load()


def _parse_json(text: str) -> Any:
    """Parse a text that is a JSON dictionary, such as Trainer's state; otherwise return the text."""
    try:
        check_cost(json_cost(text.encode()), len(text), PICKLE_FACTOR)
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _collect_limited(leaves: Iterator[tuple[str, str]], received_bytes: int) -> dict[str, str]:
    """Collect the leaves, up to a limit that follows from the bytes: a shared value has its leaves at each place."""
    found: dict[str, str] = {}
    cost = 0
    for path, value in leaves:
        found[path] = value
        cost += _LEAF_BYTES + len(path) + len(value)
        check_cost(cost, received_bytes, PICKLE_FACTOR)
    return found


def _leaves(path: str, value: Any, storages: dict[str, str] | None = None) -> Iterator[tuple[str, str]]:
    if isinstance(value, tuple) and value[:1] == ("storage",) and storages is not None:
        yield path, f"storage of CRC {storages.get(str(value[2]))}"  # the path is that of its tensor
        return
    parts: list[tuple[str, Any]]
    if isinstance(value, str) and value[:1] == "{":
        value = _parse_json(value)
    if isinstance(value, dict):
        parts = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(index), one) for index, one in enumerate(value)]
    elif isinstance(value, InertObject):
        yield f"{path}()", value.name
        kept = value.__dict__
        if value.name.startswith("torch._utils._rebuild"):  # a tensor: one line for all its arguments
            yield path, "; ".join(text for _, text in _leaves("", list(kept["arguments"]), storages))
            return
        items = kept["items"]
        pairs = all(isinstance(item, tuple) and len(item) == 2 for item in items)
        parts = [(f"({index})", one) for index, one in enumerate(kept["arguments"])]
        parts += [(f".{index}", one) for index, one in enumerate(kept["state"])]
        parts += [(str(item[0]), item[1]) for item in items] if pairs else list(enumerate(items))  # type: ignore[arg-type]
    else:
        yield path, value.name if isinstance(value, type) and issubclass(value, InertObject) else repr(value)
        return
    if not parts:
        yield path, f"empty {type(value).__name__}"
    for name, one in parts:
        yield from _leaves(f"{path}/{name}" if path else str(name), one, storages)
