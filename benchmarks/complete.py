"""Whether what a peer has written is all there: loaded from storage and compared to the state, to the last bit.

A peer that writes nothing, or half of it, would win every table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["IncompleteError", "leaves", "require_same"]


class IncompleteError(Exception):
    """What lies in storage is not the state that was saved."""


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in nested mappings and sequences, in order."""
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
        expected, got: Nested state dicts.
        what: Whose, for the message.

    Returns:
        Bytes of tensors that were compared, tied ones each time.

    Raises:
        IncompleteError: Something is missing, too much, or not the same; the first such path.
    """
    theirs = dict(leaves(got))
    nbytes = 0
    for path, value in leaves(expected):
        if path not in theirs:
            raise IncompleteError(f"{what}: {path} is missing")
        other = theirs.pop(path)
        if isinstance(value, torch.Tensor):
            if not (isinstance(other, torch.Tensor) and torch.equal(value, other)):
                raise IncompleteError(f"{what}: {path} is not the tensor that was saved")
            nbytes += value.nbytes
        elif value != other:
            raise IncompleteError(f"{what}: {path} is {other!r}, and {value!r} was saved")
    if theirs:
        raise IncompleteError(f"{what}: {next(iter(theirs))} was never saved")
    if not nbytes:
        raise IncompleteError(f"{what}: no tensor at all was compared")
    return nbytes
