"""Compares a peer's checkpoint, loaded from storage, with the saved state, bit for bit.

A peer that writes nothing, or half of it, would win every table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["IncompleteError", "leaves", "local_part", "require_same"]


class IncompleteError(Exception):
    """The checkpoint in storage differs from the state that was saved."""


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf in nested mappings and sequences, in order."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, tree


def require_same(expected: Any, got: Any, *, what: str) -> int:
    """Compare a loaded state with the one that was saved.

    Args:
        expected, got: Nested state dicts. Where `expected` is split among the ranks and `got` is whole, this rank's
            part is compared.
        what: Name of the peer, for the message.

    Returns:
        Bytes of tensors that were compared; tied ones count each time.

    Raises:
        IncompleteError: A value is missing, extra or different; the message names the first such path.
    """
    theirs = dict(leaves(got))
    nbytes = 0
    for path, value in leaves(expected):
        if path not in theirs:
            raise IncompleteError(f"{what}: {path} is missing")
        other = theirs.pop(path)
        if isinstance(value, torch.Tensor):
            if not (isinstance(other, torch.Tensor) and _equal(value, other)):
                raise IncompleteError(f"{what}: {path} is not the tensor that was saved")
            nbytes += local_part(value).nbytes
        elif value != other:
            raise IncompleteError(f"{what}: {path} is {other!r}, and {value!r} was saved")
    if theirs:
        raise IncompleteError(f"{what}: {next(iter(theirs))} was never saved")
    if not nbytes:
        raise IncompleteError(f"{what}: no tensor at all was compared")
    return nbytes


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this rank's part of a split one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    if not isinstance(value, DTensor) or isinstance(other, DTensor):
        return torch.equal(local_part(value), local_part(other))
    sizes, starts = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if value.shape != other.shape:
        return False
    for dimension, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        other = other.narrow(dimension, min(start, other.shape[dimension] - size), size)
    return torch.equal(value.to_local(), other)
