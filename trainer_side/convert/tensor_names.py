"""Flat names for the tensors of a tree, as other tools have them: `model/layer.0.weight` is `model.layer.0.weight`.

Two tensors at one place of memory, with one shape, are *tied*: the second is told to be the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.errors import StateError
from trainer_side.convert.contents import Contents
from trainer_side.state.tree import Named


@dataclass(frozen=True)
class Flat:
    """One tensor.

    Attributes:
        tied_to: The flat name of the first tensor that is the same; empty for the first itself.
    """

    name: str
    path: str
    tensor: torch.Tensor
    tied_to: str = ""


def flatten(contents: Contents, tensors: Sequence[Named]) -> list[Flat]:
    """The flat names, in the order of the tree.

    Raises:
        StateError: Two paths come to the same name.
    """
    paths: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    found: list[Flat] = []
    for path, tensor in tensors:
        name = path.replace("/", ".") or "tensor"
        if name in paths:
            raise StateError(
                f"{paths[name]} and {path} would both be named {name}; export with --to dcp or torch, or export only "
                "one of them with --only"
            )
        paths[name] = path
        entry = contents.entry(tensor)
        place = (entry, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        same = "" if entry is None else first.setdefault(place, name)
        found.append(Flat(name, path, tensor, "" if same == name else same))
    return found
