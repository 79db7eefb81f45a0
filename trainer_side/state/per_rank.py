"""Values that differ from rank to rank, such as random number generators: every rank's own is in the checkpoint.

    rank r: PerRank(value) ─► torch.save bytes ─► length │ bytes │ zeros up to the reserve
    file:   state["rng"] = [rank 0's blob, rank 1's blob, …]            one uint8 tensor each, all of one size

The blobs have a size agreed among the ranks, so that the layout of the image does not depend on what is in them. On
disk they are ordinary tensors: plain `torch.load` reads them, and `decode` turns one back into the value.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, cast

import torch

from holdfast.errors import DamageError, StateError
from trainer_side.state.nesting import refuse_deep_tuples

_LENGTH = struct.Struct("<Q")
_UNIT_BYTES = 4096
_SLACK_BYTES = 1024


class PerRank:
    """Marks a value in the state that each rank keeps for itself. For the top level of the state.

    Args:
        value: An object with `state_dict()` and `load_state_dict()`, or tensors and plain values.
        same_ranks: Refuse a checkpoint of another number of ranks: for what is shared out among them, such as shards of
            data, where a rank more or less would repeat some or leave some out.
    """

    def __init__(self, value: Any, *, same_ranks: bool = False) -> None:
        self.value, self.same_ranks = value, same_ranks

    def snapshot(self) -> Any:
        """What is saved: the value's `state_dict()`, or the value itself."""
        return self.value.state_dict() if hasattr(self.value, "state_dict") else self.value

    def load(self, saved: Any) -> None:
        """Bring back what `snapshot` gave. A tensor is filled in place, a plain value is replaced (see `value`)."""
        if hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(saved)
        elif isinstance(self.value, torch.Tensor) and isinstance(saved, torch.Tensor):
            with torch.no_grad():
                self.value.copy_(saved)
        else:
            self.value = saved

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def reserve_bytes(used_bytes: int) -> int:
    """Room to set aside for a blob that now takes `used_bytes`: a quarter more, and 1 KiB, in whole pages."""
    return ((used_bytes * 5 // 4 + _SLACK_BYTES) // _UNIT_BYTES + 1) * _UNIT_BYTES


def encode(value: Any, *, name: str) -> bytes:
    """The blob of `value`, without padding.

    Args:
        value: What `PerRank.snapshot` gave.
        name: Its name in the state, for messages.

    Raises:
        StateError: `torch.save` cannot save it.
    """
    out = io.BytesIO()
    out.write(bytes(_LENGTH.size))
    try:
        torch.save(value, out)
    except (pickle.PicklingError, RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        raise StateError(
            f"{name}: this PerRank value cannot be saved: {error}; use tensors, numbers, strings, lists and dicts"
        ) from error
    blob = out.getvalue()
    return _LENGTH.pack(len(blob) - _LENGTH.size) + blob[_LENGTH.size :]


def decode(blob: torch.Tensor | bytes | bytearray | memoryview, *, name: str = "PerRank value") -> Any:
    """The value in a blob, padded or not; its tensors on the CPU. Never runs code from the blob.

    Args:
        blob: A 1-D uint8 tensor on the CPU, or its bytes.
        name: Where it was, for messages.

    Raises:
        DamageError: It is not what `encode` wrote.
    """
    raw = memoryview(cast(Any, blob.contiguous().numpy()) if isinstance(blob, torch.Tensor) else blob)
    if raw.itemsize != 1 or raw.ndim != 1 or raw.nbytes < _LENGTH.size:
        raise DamageError(f"{name}: a PerRank blob is at least {_LENGTH.size} bytes, got {raw.nbytes} bytes")
    (length,) = _LENGTH.unpack_from(raw)
    if not 0 < length <= raw.nbytes - _LENGTH.size:
        raise DamageError(
            f"{name}: the PerRank blob says it holds {length} bytes, it has {raw.nbytes - _LENGTH.size}; "
            "take the checkpoint before"
        )
    file = io.BytesIO(raw[_LENGTH.size : _LENGTH.size + length])
    try:
        refuse_deep_tuples(file, name)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may make the unpickler raise anything
        raise DamageError(
            f"{name}: the PerRank blob cannot be read ({error}); take the checkpoint before"
        ) from error
