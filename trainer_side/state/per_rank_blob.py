"""The blob of one `PerRank` value: a length, that many bytes from `torch.save`, and the names of the value's parts.

    rank r: PerRank(value) ─► torch.save bytes ─► length │ bytes │ names (position_names.py) │ zeros up to the reserve
    file:   state["rng"] = [rank 0's blob, rank 1's blob, …]            one uint8 tensor each, all of one size

The ranks agree on one size for all blobs, so that the layout of the image does not depend on the values. On disk a blob
is an ordinary tensor: plain `torch.load` reads it, and `decode` turns it back into the value.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, cast

import torch

from holdfast.errors import DamageError, StateError
from trainer_side.state.pickle_bounds import (
    fill_disabled,
    refuse_costly_pickle,
    refuse_packed,
    unpickler_cause,
)
from trainer_side.state.pickling import REFUSED, ReadablePickler, builtins_in, kind_of
from trainer_side.state.tree import children

_LENGTH = struct.Struct("<Q")
_UNIT_BYTES = 4096
_SLACK_BYTES = 1024


def reserve_bytes(used_bytes: int) -> int:
    """Return the bytes to reserve for a blob that now takes `used_bytes`: a quarter and 1 KiB more, in whole pages."""
    return ((used_bytes * 5 // 4 + _SLACK_BYTES) // _UNIT_BYTES + 1) * _UNIT_BYTES


def encode(value: Any, *, name: str, trailer: bytes = b"") -> bytes:
    """Return the blob of a result of `PerRank.snapshot`, without padding.

    `name`: Name of the value in the state, for messages. `trailer`: `PerRank.names`; does not end with a zero.
    StateError: `torch.save` cannot save it, or `decode` could not read it back.
    """
    kinds: set[Any] = set()
    try:
        blob = _saved(value, kinds)
    except (pickle.PicklingError, RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        raise StateError(
            f"{name}: this PerRank value cannot be saved: {error}; use tensors, numbers, strings, lists and dicts"
        ) from error
    if not kinds <= _readable_kinds:
        if (refused := _find_unreadable(value)) is not None:
            path, why = refused
            raise StateError(
                f"{name}{path}: plain torch.load(weights_only=True) cannot read this part of the PerRank value back "
                f"({why}); use tensors, numbers, strings, lists and dicts"
            )
        _readable_kinds.update(kinds)
    return _LENGTH.pack(len(blob)) + blob + trailer


# Classes of values that weights_only is known to accept; they alone decide whether a blob can be read.
_readable_kinds: set[Any] = set()


class _KindsPickler(ReadablePickler):
    """Notes the class of each value, except plain ones."""

    kinds: set[Any]

    def reducer_override(self, value: Any) -> Any:
        self.kinds.add(kind_of(value))
        return super().reducer_override(value)

    def finalize(self, pickled: bytes) -> bytes:
        self.kinds.update(builtins_in(pickled))
        return pickled


def _saved(value: Any, kinds: set[Any]) -> bytes:
    """Return the bytes of `torch.save`, and add the classes in them to `kinds`."""
    out = io.BytesIO()
    pickler = type("Pickler", (_KindsPickler,), {"kinds": kinds})  # torch derives its own from it
    torch.save(value, out, pickle_module=SimpleNamespace(Pickler=pickler, __name__="pickle"))
    return out.getvalue()


def _find_unreadable(value: Any, above: AbstractSet[int] = frozenset()) -> tuple[str, str] | None:
    """Return the path of the smallest part that cannot be read back, and why; None if all can."""
    try:
        with fill_disabled():
            torch.load(io.BytesIO(_saved(value, set())), map_location="cpu", weights_only=True)
    except REFUSED as error:
        for key, one in children(value):
            found = None if id(one) in above else _find_unreadable(one, {*above, id(value)})
            if found is not None:
                return f"/{key}{found[0]}", found[1]
        return "", unpickler_cause(error).split(" was not an allowed", 1)[0][:200]
    return None


def decode(blob: torch.Tensor | bytes | bytearray | memoryview, *, name: str = "PerRank value") -> Any:
    """Read the value back from a blob, padded or not; its tensors are on the CPU. No code in the blob is ever run.

    `blob`: A 1-D uint8 tensor on the CPU, or its bytes. `name`: For messages. DamageError: it is not a blob.
    """
    raw = _raw(blob)
    if raw.itemsize != 1 or raw.ndim != 1 or raw.nbytes < _LENGTH.size:
        raise DamageError(
            f"{name}: expected a PerRank blob of at least {_LENGTH.size} bytes, got {raw.nbytes} bytes; "
            "take the checkpoint before this one"
        )
    (length,) = _LENGTH.unpack_from(raw)
    if not 0 < length <= raw.nbytes - _LENGTH.size:
        raise DamageError(
            f"{name}: the PerRank blob says that it holds {length} bytes, but it has {raw.nbytes - _LENGTH.size}; "
            "take the checkpoint before this one"
        )
    file = io.BytesIO(raw[_LENGTH.size : _LENGTH.size + length])
    try:
        refuse_packed(file, name)
        refuse_costly_pickle(file, name)
        with fill_disabled():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may make the unpickler raise anything
        raise DamageError(
            f"{name}: the PerRank blob cannot be read ({error}); take the checkpoint before this one"
        ) from error


def read_trailer(blob: torch.Tensor | bytes | bytearray | memoryview) -> bytes:
    """Return the trailer that `encode` put after the value; empty in blobs of earlier versions. Call `decode` first."""
    raw = _raw(blob)
    (length,) = _LENGTH.unpack_from(raw)
    return bytes(raw[_LENGTH.size + length :]).rstrip(b"\0")


def _raw(blob: torch.Tensor | bytes | bytearray | memoryview) -> memoryview:
    return memoryview(cast(Any, blob.contiguous().numpy()) if isinstance(blob, torch.Tensor) else blob)
