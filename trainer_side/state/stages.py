"""Combines the trees of ranks with different tensors (pipeline stages) into one tree that all ranks share.

    outline   rank 1: {net: {layers.1: t}}  ─► PROPOSE ─► the union of all ranks (holdfast/wire/state_union.py)
    fill      rank 0: {net: {layers.0: a part, layers.1: a part that is not here}}      its own tree, and the rest
              rank 1: {net/layers.0: a part that is not here, net/layers.1: a part}     flat: rank 1 writes no pickle

On both ranks torch then finds the same tensors in the same order, so the layouts are equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import StateError
from holdfast.wire.state_union import DEPTH_MAX, StateUnion
from trainer_side.state.pickling import with_python_scalars
from trainer_side.state.split_tensor import StagePart, is_split
from trainer_side.state.tree import children, containers, with_changes

_VERSIONS = "_metadata"  # where torch.nn.Module keeps the versions of modules, beside its state


def outline(tree: Any) -> Any:
    """Return the containers of a tree of plain tensors as JSON, see `state_union`. A container counts once. StateError:
    a key is neither text nor a whole number, or the tree is too deep; names the place.
    """
    numbers = iter(range(1 << 62))
    seen: set[int] = set()

    def of(node: Any, where: str, depth: int) -> Any:
        if isinstance(node, torch.Tensor):
            return next(numbers)
        if not isinstance(node, dict | list | tuple) or id(node) in seen:
            return None
        seen.add(id(node))
        if depth >= DEPTH_MAX:
            raise StateError(
                f"{where[:80]}… is nested deeper than {DEPTH_MAX} levels, and the ranks hold different tensors"
            )
        if not isinstance(node, dict):
            below = [of(one, f"{where}/{key}", depth + 1) for key, one in enumerate(node)]
            return None if all(one is None for one in below) else ["l", below]
        pairs = []
        for given, one in node.items():
            key = with_python_scalars(given)
            if type(key) not in (str, int):
                raise StateError(
                    f"a key of {where or 'the state'}, {key!r}, is neither a text nor a whole number, and the ranks "
                    "hold different tensors: rank 0 has to name those of the others"
                )
            pairs.append([key, of(one, f"{where}/{key}" if where else str(key), depth + 1)])
        return ["d", pairs, _versions(node)]

    return of(tree, "", 0)


def _versions(node: Any) -> dict[str, Any]:
    """Return the version numbers that torch keeps beside the state of a module."""
    found = getattr(node, _VERSIONS, None)
    if not isinstance(found, dict):
        return {}
    return {
        str(module): {str(name): value for name, value in versions.items() if type(value) is int}
        for module, versions in found.items()
        if isinstance(versions, dict)
    }


class Stages:
    """Adds the tensors of other ranks to the trees of one rank. Training thread."""

    def __init__(self, union: StateUnion, rank: int) -> None:
        self._union, self._rank = union, rank
        self._paths = {str(row[0]): number for number, row in enumerate(union.table)}

    @property
    def paths(self) -> list[str]:
        """The paths of all tensors, in the order of the file."""
        return [*self._paths]

    def fill(self, tree: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the tree, which has blobs in place of `PerRank` values, with the tensors of all ranks; None if this
        rank's tensors are not those agreed on.
        """
        if self._rank == 0:
            done: dict[int, Any] = {}
            filled: dict[str, Any] = self._fill_node(tree, self._union.outline, done)
            return filled
        own = dict(_leaves(tree))
        if not own.keys() <= self._paths.keys():
            return None
        flat: dict[str, Any] = {}
        for path, row in self._paths.items():
            value = self._part(own.get(path), row)
            if value is None:
                return None
            flat[path] = value
        return flat

    def _part(self, value: Any, row: int) -> Any:
        """Return the value to put in place of a row's tensor."""
        if row not in self._union.staged:
            return value
        _, dtype, shape, _ = self._union.table[row]
        if value is None:
            value = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
            return StagePart(value, tuple(shape), is_present=False)
        return StagePart(value, tuple(shape), is_present=True)

    def _fill_node(self, node: Any, plan: Any, done: dict[int, Any]) -> Any:
        if type(plan) is int:
            return self._part(node, plan) if _is_leaf(node) else node
        if id(node) in done:
            return done[id(node)]
        if plan is None or not isinstance(node, dict | list | tuple):
            return node
        here, is_dict = dict(children(node)), isinstance(node, dict)
        changed: dict[Any, Any] = {}
        for key, below in plan[1] if is_dict else enumerate(plan[1]):
            if key in here:
                value = self._fill_node(here[key], below, done)
                if value is not here[key]:
                    changed[key] = value
            elif is_dict and _has_rows(below):
                changed[key] = self._build(below)
        filled = with_changes(node, changed) if changed else node
        if is_dict and changed and hasattr(filled, _VERSIONS):
            setattr(filled, _VERSIONS, OrderedDict({**plan[2], **getattr(node, _VERSIONS)}))
        done[id(node)] = filled
        return filled

    def _build(self, plan: Any) -> Any:
        """Build a part of the tree that rank 0 does not have."""
        if type(plan) is int:
            return self._part(None, plan)
        return {key: self._build(below) for key, below in plan[1] if _has_rows(below)}


def _has_rows(plan: Any) -> bool:
    if not isinstance(plan, list):
        return plan is not None
    return any(_has_rows(one if plan[0] == "l" else one[1]) for one in plan[1])


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_split(value)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield all tensors and split tensors, with paths as in `tensor_paths`."""
    for prefix, node in containers(tree):
        for key, value in children(node):
            if _is_leaf(value):
                yield f"{prefix}{key}", value


def is_sendable_in_place(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor that not every rank has can be sent as it lies in memory."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
