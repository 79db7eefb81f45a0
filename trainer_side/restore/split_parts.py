"""Finds the parts of split tensors that this rank holds, and puts them into a restored tree in place of whole tensors.

    live     {"model": {"w": DTensor}}                  the parts: DTensors of modules and optimizers, `Split` anywhere
    saved    {"model": {"w": a whole tensor, untouched}}
    after    {"model": {"w": the DTensor}}              `load_state_dict` then copies it onto itself

The whole tensors are dropped before their memory is touched. An optimizer that has not stepped yet has no moments: the
saved ones are split like their parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from trainer_side.restore.structure import Structure, entry_at, unique_paths
from trainer_side.restore.targets import Claims, ScatterTarget
from trainer_side.state.optimizer_places import match_parameters, value_at
from trainer_side.state.split_tensor import HeldPart, held_part_at, is_dtensor, is_split
from trainer_side.state.tree import children, containers, tensor_paths, with_replacements


class SplitPart(NamedTuple):
    """A split tensor of this rank."""

    value: Any  # the DTensor or `Split` that its object takes back
    held: HeldPart  # the part on this rank
    live: bool = True  # the object holds it already


class PlacedParts(NamedTuple):
    """The result of `place_parts`."""

    regions: dict[int, ScatterTarget]  # entry → this rank's parts of it
    free: frozenset[int]  # entries from which this rank needs no whole tensor
    nbytes: int  # to be read straight into live memory


def split_parts(state: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, SplitPart]:
    """Return the split tensors of the state by path, without ambiguous paths.

    `live`: Result of `live_trees`, for which FSDP2 has resharded its parameters. StateError: one cannot be restored in
    place.
    """
    trees = {
        name: live.get(name, value)
        for name, value in state.items()
        if name in live or isinstance(value, dict | list | tuple) or is_split(value)
    }
    found = list(_leaves(trees))
    unambiguous = unique_paths(path for path, _ in found)
    parts: dict[str, SplitPart] = {}
    for path, value in found:
        here = held_part_at(path, value)
        if here is not None and path in unambiguous:
            parts[path] = SplitPart(value, here)
    return parts


def with_separate_memory(
    parts: Mapping[str, SplitPart], own: Mapping[str, Any], tree: Any
) -> dict[str, SplitPart]:
    """Return the parts, with new memory for the DTensors of objects with their own loading code.

    Such an object gets the whole tensor if the checkpoint has another shape. A `Split` is always filled in place, as
    its object has asked for that. `own`: Names to the live trees of those objects.
    """
    paths = {path for path, tensor in tensor_paths(own) if path in parts and is_dtensor(tensor)}
    shapes = {path: tensor.shape for path, tensor in tensor_paths(tree)} if paths else {}
    placed: dict[str, SplitPart] = {}
    for path, part in parts.items():
        if path not in paths:
            placed[path] = part
        elif shapes.get(path) == torch.Size(part.held.shape):
            placed[path] = _allocate_like(path, part.value, part.value.dtype)
    return placed


def allocate_split_moments(state: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, SplitPart]:
    """Allocate moments of split parameters that the checkpoint has and the optimizer lacks.

    They are as the optimizer itself would make them, in the saved dtype. StateError: names the parameter.
    """
    parts: dict[str, SplitPart] = {}
    for name, value in state.items():
        if not isinstance(value, torch.optim.Optimizer) or name not in tree:
            continue
        for number, parameter in match_parameters(value, tree[name]):
            moments = tree[name]["state"].get(number)
            if not is_split(parameter) or not isinstance(moments, Mapping):
                continue
            for own, saved in tensor_paths(moments):
                path, key = f"{name}/state/{number}/{own}", own.rpartition("/")[2]
                before = value_at(value.state.get(parameter, {}), own)
                # A moment that the optimizer has in the saved dtype is kept, as a whole tensor is.
                is_there = is_split(before) and before.dtype == saved.dtype
                if key != "step" and saved.shape == parameter.shape and not is_there:
                    parts[path] = _allocate_like(path, parameter, saved.dtype)
    return parts


def place_parts(
    structure: Structure,
    parts: Mapping[str, SplitPart],
    names: Collection[str],
    left_out: Collection[int] = (),
) -> PlacedParts:
    """Put the parts into the tree, and free memory that no tensor of the tree uses any more.

    `structure`: Its tensors have the shapes of the parts at their paths. `names`: Names of the state. If the state is
    split, the memory of all other names is freed as well: a rank may lack room for bytes that it does not need.
    `left_out`: Entries of tensors that other ranks need, already removed from the tree. StateError: a saved tensor does
    not lie in one piece.
    """
    if not parts and not left_out:
        return PlacedParts({}, frozenset(), 0)
    entry_of = structure.entry_of
    tensors = structure.tensors
    unambiguous = unique_paths(path for path, _ in tensors)
    regions: dict[int, ScatterTarget] = {}
    replacements: dict[str, Any] = {}
    touched = set(left_out)
    claims, fresh = Claims(live=True), Claims(live=False)
    for path, saved in tensors:
        entry = entry_at(saved, entry_of)
        part = parts.get(path) if path in unambiguous else None
        if part is None:
            continue
        replacements[path] = part.value
        if entry is not None:
            touched.add(entry)
            target = (claims if part.live else fresh).target(path, saved, entry, part.held)
            if target is not None:
                regions.setdefault(entry, ScatterTarget()).regions.append(target)
    for name in [name for name in structure.tree if name not in names]:
        for _, tensor in tensor_paths([structure.tree.pop(name)]):
            entry = entry_at(tensor, entry_of)
            touched |= set() if entry is None else {entry}
    structure.tree = with_replacements(
        structure.tree,
        lambda path, value: replacements.get(path, value) if isinstance(value, torch.Tensor) else value,
    )
    free = touched - structure.entries
    for entry in free:
        del structure.storages[entry]
    return PlacedParts(regions, frozenset(free), claims.nbytes)


def _allocate_like(path: str, tensor: torch.Tensor, dtype: torch.dtype) -> SplitPart:
    fresh = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    here = held_part_at(path, fresh)
    assert here is not None
    return SplitPart(fresh, here, live=False)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield all tensors and `Split`s of a tree, as `tensor_paths` names them."""
    yield from tensor_paths(tree)
    for prefix, node in containers(tree):
        for key, value in children(node):
            if is_split(value) and not isinstance(value, torch.Tensor):
                yield f"{prefix}{key}", value
