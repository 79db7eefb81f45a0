"""The tree without its tensors as lossless JSON, for file formats that hold only tensors.

    1, 0.5, "a", true, null, [ ]         unchanged                  {"$tensor": name}      a tensor, by its flat name
    {"a": …}                             a dict with text as keys   {"$dict": [[k, v]]}    any other dict
    {"$float": "inf"}, {"$bytes": …}, {"$tuple": […]}, {"$size": […]}, {"$dtype": …}, {"$device": …}
    {"$ordered": [[k, v]], "$attributes": {…}}          an OrderedDict, with attributes that torch adds to a state_dict

People can read the plain values without holdfast; `decode` rebuilds the exact tree.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.errors import DamageError, StateError

_DEPTH_MAX = 200  # json itself fails at about a thousand; no real state is that deep


def encode(tree: Any, names: Mapping[str, str]) -> Any:
    """Encode a tree. `names`: Path of each tensor → its flat name. StateError: a value has no form; names its path."""
    return _encode(tree, "", names, 0)


def _encode(value: Any, path: str, names: Mapping[str, str], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise StateError(
            f"{path[:80]}… is nested deeper than {_DEPTH_MAX} levels; export with --to torch or dcp"
        )

    def inner(key: Any, one: Any) -> Any:
        return _encode(one, f"{path}/{key}" if path else str(key), names, depth + 1)

    kind = type(value)
    if isinstance(value, torch.Tensor):
        return {"$tensor": names[path]}
    if kind in (type(None), bool, int, str):
        return value
    if kind is list:
        return [inner(index, one) for index, one in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(key, one) for key, one in value.items()}
    if kind in (dict, OrderedDict):
        pairs = [[inner("key", key), inner(key, one)] for key, one in value.items()]
        if kind is dict:
            return {"$dict": pairs}
        attributes = {name: inner(name, one) for name, one in vars(value).items()}
        return {"$ordered": pairs, **({"$attributes": attributes} if attributes else {})}
    if kind in (tuple, torch.Size):
        return {
            "$tuple" if kind is tuple else "$size": [inner(index, one) for index, one in enumerate(value)]
        }
    return _scalar(value, path)


def _scalar(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    raise StateError(
        f"{path or 'the state'} is {kind.__module__}.{kind.__qualname__}, which neither a tensor nor JSON can hold; "
        "export with --to torch or dcp, or another part with --only"
    )


def decode(document: Any, tensors: Mapping[str, Any]) -> Any:
    """Decode an untrusted document into a tree. `tensors`: Flat name → tensor. DamageError: it is malformed."""
    try:
        return _decode(document, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamageError(
            f"the JSON of the values that are no tensors cannot be read: {error!r:.200}"
        ) from error


def _decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(one, tensors) for key, one in value.items()}
    content = value[tag]
    if tag == "$tensor":
        return tensors[content]
    if tag in ("$dict", "$ordered"):
        pairs = [(_decode(key, tensors), _decode(one, tensors)) for key, one in content]
        if tag == "$dict":
            return dict(pairs)
        ordered = OrderedDict(pairs)
        vars(ordered).update(_decode(value.get("$attributes", {}), tensors))
        return ordered
    return _SCALARS[tag](_decode(content, tensors))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$tuple": tuple,
    "$size": torch.Size,
    "$dtype": _dtype,
    "$device": torch.device,
}
