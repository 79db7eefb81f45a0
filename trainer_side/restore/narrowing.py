"""Reduces a restored tree to this rank's pipeline stage, and numbers the parameters as the rank's optimizer does.

    saved    {net: {layers.0, layers.1}, optimizer by name or by number}
    rank 0   has net/layers.0  ┐
    rank 1   has net/layers.1  ┴─ each says so ─► rank 1: {net: {layers.1}, optimizer of layers.1 by number}

Only values that another rank needs are removed. A value that no rank needs stays in the tree, and its object refuses
it, as in any other job. A file with numbered parameters (from a job without stages) also records their names. In older
files without names, parameters are assumed to be in the order of the model's state, group by group, if counts, shapes
and the order on every rank fit.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.joining_by_name import LIKE_PARAMETERS, renumbered_state
from trainer_side.state.optimizer_places import is_optimizer_dict, numbers_of, parameter_names
from trainer_side.state.position_names import Position, Positions

_Groups = Sequence[Sequence[Sequence[str]]]  # of an optimizer: group, parameter, its names


class StageNames(NamedTuple):
    modules: Mapping[str, Sequence[str]]  # keys of each module's state
    parameters: Mapping[str, _Groups]  # of each optimizer; empty if they have no names

    @classmethod
    def of(cls, state: Mapping[str, Any], live: Mapping[str, Any]) -> StageNames:
        """The names of this rank; `live`: result of `live_trees`."""
        modules = {name: [*live[name]] for name, value in state.items() if isinstance(value, torch.nn.Module)}
        try:
            return cls(modules, parameter_names(state))
        except StateError:
            return cls(modules, {})  # `narrow` raises it again if names are needed

    def gather_all(self, peers: Peers) -> list[StageNames]:
        """The names of each rank. Collective."""
        return [StageNames(*json.loads(message)) for message in gather(peers, json.dumps(self).encode())]


def needs_all_names(own: StageNames, state: Mapping[str, Any], tree: Any) -> bool:
    """Whether ranks must exchange names: the tree has more than this rank's modules, or optimizers keyed by name."""
    if not isinstance(tree, Mapping):
        return False
    more = any(set(_saved(tree, name)) - set(keys) for name, keys in own.modules.items())
    return more or any(_is_by_name(tree[name]) for name in _optimizers(state, tree))


def narrow(
    state: Mapping[str, Any],
    tree: dict[str, Any],
    ranks: Sequence[StageNames],
    rank: int,
    names: Positions = MappingProxyType({}),
) -> list[str]:
    """Remove values from the tree that only other ranks need.

    `tree`: The saved tree; modified. `ranks`: The names of each rank. `names`: Names of parameters that have numbers in
    the tree, as far as the file has them. Returns the optimizers whose parameters now have the numbers of the script.
    StateError: parameters of an optimizer do not fit the saved ones; names them.
    """
    own = ranks[rank]
    order = _file_places(own, tree)
    staged, numbered = False, []
    for name, keys in own.modules.items():
        saved = _saved(tree, name)
        used = {key for one in ranks for key in one.modules.get(name, ())} & set(saved)
        staged = staged or any(used - set(one.modules.get(name, ())) for one in ranks)
        left_out = used - set(keys)
        if left_out:
            tree[name] = copy.copy(saved)
            for key in left_out:
                del tree[name][key]
    for name in _optimizers(state, tree):
        named = _is_by_name(tree[name])
        if named or staged:
            if name not in own.parameters:
                parameter_names(state)  # raises what was wrong
            groups_by_rank = [one.parameters.get(name, ()) for one in ranks]
            known = None if named else _names_of(tree[name], names.get(name))
            if named or known is not None:
                keys_of = _keys_by_name(name, tree[name], groups_by_rank, known)
            else:
                keys_of = _keys_by_order(name, tree[name], groups_by_rank, order)
            tree[name] = _numbered(tree[name], keys_of[rank])
            numbered.append(name)
    return numbered


class _FilePlace(NamedTuple):
    """Place of a parameter in the model's saved state; tied names share the place of the first."""

    number: int
    shape: tuple[int, ...]
    first: str


def _file_places(own: StageNames, tree: Mapping[str, Any]) -> dict[str, _FilePlace]:
    places: dict[str, _FilePlace] = {}
    by_memory: dict[tuple[Any, ...], _FilePlace] = {}
    for module in own.modules:
        for name, tensor in _saved(tree, module).items():
            if isinstance(tensor, torch.Tensor):
                memory = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape)
                place = _FilePlace(len(by_memory), tuple(tensor.shape), str(name))
                place = by_memory.setdefault(memory if tensor.numel() else (name,), place)
                places.setdefault(str(name), place)
    return places


def _names_of(
    saved: Mapping[str, Any], groups: Sequence[Sequence[Position]] | None
) -> list[dict[str, Any]] | None:
    """Map, by group, each name within its module to its number; None if the file does not name all parameters."""
    if groups is None or [*map(len, groups)] != [len(group["params"]) for group in saved["param_groups"]]:
        return None
    found: list[dict[str, Any]] = []
    for group, positions in zip(saved["param_groups"], groups, strict=True):
        if not all(position.names for position in positions):
            return None
        numbered = zip(group["params"], positions, strict=True)
        pairs = [(name.partition("/")[2], number) for number, one in numbered for name in one.names]
        found.append(dict(pairs))
        if len(found[-1]) != len(pairs):
            return None  # two modules of the state have the same names
    return found


def _keys_by_name(
    at: str,
    saved: Mapping[str, Any],
    groups_by_rank: Sequence[_Groups],
    known: Sequence[Mapping[str, Any]] | None,
) -> list[list[list[Any]]]:
    """Return each parameter's key in the saved state, by rank and group; `known`: result of `_names_of`."""
    groups = _same_groups(at, saved, groups_by_rank)
    if known is None:
        known = [{name: name for name in names} for names in groups]
    used: list[set[Any]] = [set() for _ in groups]
    keys_of: list[list[list[Any]]] = []
    for rank, own in enumerate(groups_by_rank):
        keys_of.append([])
        for number, parameters in enumerate(own):
            keys_of[-1].append([])
            for names in parameters:
                found = [known[number][name] for name in names if name in known[number]]
                if not found:
                    raise StateError(
                        f"{at}: rank {rank} has the parameter {names[0]} in group {number}, in which the checkpoint "
                        "has none of that name; nothing was loaded"
                    )
                used[number].update(found)
                keys_of[-1][-1].append(found[0])
    of_groups = zip(known, used, strict=True)
    lost = [name for names, keys in of_groups for name, key in names.items() if key not in keys]
    if lost:
        raise StateError(
            f"{at}: the checkpoint has the parameters {', '.join(lost[:5])}, which no rank has ({len(lost)} in all); "
            "nothing was loaded"
        )
    return keys_of


def _keys_by_order(
    at: str, saved: Mapping[str, Any], groups_by_rank: Sequence[_Groups], order: Mapping[str, _FilePlace]
) -> list[list[list[Any]]]:
    groups = _same_groups(at, saved, groups_by_rank)
    keys_of: list[list[list[Any]]] = [[] for _ in groups_by_rank]
    for number, numbers in enumerate(groups):
        of_rank = [[_file_place(at, names, order) for names in own[number]] for own in groups_by_rank]
        places = sorted({place for own in of_rank for place in own})
        in_order = all(
            _is_in_file_order(own[number], found) for own, found in zip(groups_by_rank, of_rank, strict=True)
        )
        if len(places) != len(numbers) or not in_order:
            raise StateError(
                f"{at}: group {number} has {len(numbers)} parameters in the checkpoint and {len(places)} on all ranks, "
                "and the checkpoint does not name them: it cannot be told which is which. Give each rank the groups of "
                "the job that saved it, with parameters in the order of the model; nothing was loaded"
            )
        key_of = dict(zip(places, numbers, strict=True))
        for place, key in key_of.items():
            moments = saved["state"].get(key)
            for kind, tensor in moments.items() if isinstance(moments, Mapping) else ():
                if kind not in LIKE_PARAMETERS or not isinstance(tensor, torch.Tensor):
                    continue
                if tuple(tensor.shape) != place.shape:
                    raise StateError(
                        f"{at}: {kind} of parameter {key} has the shape {list(tensor.shape)}, and the parameter in its "
                        f"place {list(place.shape)}: the parameters were in another order; nothing was loaded"
                    )
        for rank, own in enumerate(of_rank):
            keys_of[rank].append([key_of[place] for place in own])
    return keys_of


def _is_in_file_order(parameters: Sequence[Sequence[str]], places: Sequence[_FilePlace]) -> bool:
    """Whether a rank's parameters are in the order of the file, except those tied to a parameter of another stage."""
    found = [place for names, place in zip(parameters, places, strict=True) if place.first in names]
    return len(set(places)) == len(places) and found == sorted(found)


def _file_place(at: str, names: Sequence[str], order: Mapping[str, _FilePlace]) -> _FilePlace:
    found = [order[name] for name in names if name in order]
    if not found:
        raise StateError(
            f"{at}: the checkpoint has no tensor of the parameter {names[0]}; nothing was loaded"
        )
    return min(found)


def _same_groups(at: str, saved: Mapping[str, Any], groups_by_rank: Sequence[_Groups]) -> list[list[Any]]:
    groups = [list(group["params"]) for group in saved["param_groups"]]
    for rank, own in enumerate(groups_by_rank):
        if len(own) != len(groups):
            raise StateError(
                f"{at}: rank {rank} has {len(own)} groups of parameters, the checkpoint {len(groups)}; give each rank "
                "the same groups, some of them without parameters; nothing was loaded"
            )
    return groups


def _numbered(saved: Mapping[str, Any], keys: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the saved state of these parameters only, numbered in this order."""
    numbers = itertools.count()
    groups = [
        {**group, "params": [next(numbers) for _ in own]}
        for group, own in zip(saved["param_groups"], keys, strict=True)
    ]
    state = renumbered_state(saved, enumerate(itertools.chain.from_iterable(keys)))
    return {**saved, "state": state, "param_groups": groups}


def _saved(tree: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    saved = tree.get(name)
    return saved if isinstance(saved, Mapping) else {}


def _optimizers(state: Mapping[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """Names of optimizers whose saved state has torch's form."""
    optimizers = (name for name, value in state.items() if isinstance(value, torch.optim.Optimizer))
    return [name for name in optimizers if is_optimizer_dict(tree.get(name))]


def _is_by_name(saved: Mapping[str, Any]) -> bool:
    return any(isinstance(key, str) for key in numbers_of(saved))
