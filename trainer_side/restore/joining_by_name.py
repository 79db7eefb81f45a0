"""Matches the parameters of each optimizer with those in the checkpoint by name, if their order differs.

    saved      params [0, 1]   names  model/a.weight, model/b.weight     state {0: A, 1: B}
    script     AdamW([b.weight, a.weight])
    after      params [0, 1]                                             state {0: B, 1: A}

torch itself matches by position. Names are compared without wrappers (`module.`, `_orig_mod.`), and without the name of
their object in the state if the object was renamed. Parameters that no name matches keep their order, if shapes allow.
Settings move with their groups, and so do the lists of schedulers (`group_orders.py`).
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from trainer_side.restore.group_orders import GroupOrder, check_kinds, first_moved, reorder_schedulers
from trainer_side.restore.torch_loading import WRAPPERS
from trainer_side.state.optimizer_places import (
    group_sizes,
    is_optimizer_dict,
    numbers_of,
    parameters_of,
    value_at,
)
from trainer_side.state.position_names import Position, Positions, positions, tensor_lists
from trainer_side.state.tree import tensor_paths

_log = logging.getLogger("holdfast.restore")
# Moments to which torch's optimizers give the parameter's shape; other moments may be smaller.
LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}
)


class _Side(NamedTuple):
    """The parameters of an optimizer in the script, or in the checkpoint."""

    flat: list[Position]
    group_of: list[int]
    paths: frozenset[str]  # of the whole state on this side, without wrappers
    objects: frozenset[str]  # names at the top of the state

    @classmethod
    def of(cls, paths: frozenset[str], objects: Iterable[Any], groups: Sequence[Sequence[Position]]) -> _Side:
        flat = [position for group in groups for position in group]
        group_of = [number for number, group in enumerate(groups) for _ in group]
        return cls(flat, group_of, paths, frozenset(map(str, objects)))


def join_by_name(
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: Any,
    names: Positions,
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> None:
    """Put the parameters and groups of all optimizers of the tree into the order of the script.

    Optimizers with another number of parameters stay unchanged: other checks refuse them. `tree`: The saved tree;
    modified. `names`: Names of the parameters in it, as far as the file has them. `optimizers`: By the path of their
    dictionaries in `live`, the result of `live_trees`. StateError: parameters, or groups, of the script have no
    counterpart; names both.
    """
    if not isinstance(tree, dict):
        return
    here = positions(state, live, optimizers)
    shapes = {path: tuple(tensor.shape) for path, tensor in tensor_paths(tree)}
    paths_here = _bare(path for path, _ in tensor_paths(live)) | _bare(_names_of(here))
    side_of_script = functools.partial(_Side.of, paths_here, state)
    side_of_file = functools.partial(_Side.of, _bare(shapes) | _bare(_names_of(names)), tree)
    orders: dict[int, GroupOrder] = {}
    for path, optimizer in optimizers.items():
        saved = value_at(tree, path)
        if not is_optimizer_dict(saved):
            continue
        there = _saved_positions(saved, names.get(path))
        own, counts = here[path], group_sizes(saved["param_groups"])
        if sorted(map(len, own)) != sorted(counts) or list(map(len, there)) != counts:
            continue
        join = _ParameterMatcher(path, side_of_script(own), side_of_file(there), names)
        order = join.order()
        parameters = parameters_of(optimizer)
        join.check_shapes(order, parameters, saved, shapes)
        join.check_duplicates(order, parameters, saved)
        join.warn_unnamed(parameters)
        groups = join.groups(order, len(own))
        moved = order != sorted(order) or groups != sorted(groups)
        if moved or any(isinstance(key, str) for key in numbers_of(saved)):
            _renumber(saved, value_at(live, path), order, groups)
            orders[id(optimizer)] = GroupOrder(path, groups)
        if moved:
            _log.warning(
                "%s: its parameters are in another order than in the checkpoint, so their state is loaded by name",
                path,
            )
    for path in sorted((here.keys() - optimizers.keys()) & names.keys()):
        saved, own, there = value_at(tree, path), here[path], [list(group) for group in names[path]]
        if isinstance(saved, list) and len(saved) == sum(map(len, own)) == sum(map(len, there)):
            join = _ParameterMatcher(path, side_of_script(own), side_of_file(there), names)
            saved[:] = [saved[number] for number in join.order()]
    _check_lists(state, live, tree)
    reorder_schedulers(state, live, tree, orders)
    check_kinds(live, tree)


def _check_lists(state: Mapping[str, Any], live: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Refuse a list of tensors that has the saved shapes in another order."""
    for name, value in state.items():
        for path, tensors in tensor_lists(name, value, live.get(name)):
            saved = value_at(tree, path)
            if not isinstance(saved, list) or not all(isinstance(one, torch.Tensor) for one in saved):
                continue
            own, there = [one.shape for one in tensors], [one.shape for one in saved]
            if (number := first_moved(own, there)) is not None:
                raise StateError(
                    f"{path}/{number}: expected the shape {list(there[number])} of the checkpoint, it has "
                    f"{list(own[number])}, and the shapes of this list are those that were saved in another order; "
                    "make the list in the order in which it was saved; nothing was loaded"
                )


def _saved_positions(
    saved: Mapping[str, Any], known: Sequence[Sequence[Position]] | None
) -> list[list[Position]]:
    """Return the names in the file, or else those that torch saved; without either, only the order is known.

    torch's `get_optimizer_state_dict` uses names in place of numbers.
    """
    if known is not None:
        return [list(group) for group in known]
    found: list[list[Position]] = []
    for group in saved["param_groups"]:
        own = group.get("param_names")
        if not isinstance(own, list) or len(own) != len(group["params"]):
            own = [None] * len(group["params"])
        named = [
            key if isinstance(key, str) else name for key, name in zip(group["params"], own, strict=True)
        ]
        found.append([Position(() if name is None else (str(name),)) for name in named])
    return found


def _names_of(found: Positions) -> Iterator[str]:
    return (name for groups in found.values() for group in groups for one in group for name in one.names)


def _without_wrappers(name: str) -> str:
    return "/".join(
        ".".join(part for part in one.split(".") if part not in WRAPPERS) for one in name.split("/")
    )


def _bare(names: Any) -> frozenset[str]:
    return frozenset(map(_without_wrappers, names))


def _name_in_object(name: str) -> str:
    """The name within its object of the state."""
    return _without_wrappers(name.partition("/")[2] or name)


def _name_in_module(name: str) -> str:
    """The name within its module, as torch's own functions use it."""
    return _without_wrappers(name.rpartition("/")[2])


_RENAMED = (_name_in_object, _name_in_module)


class _ParameterMatcher:
    """Matches the parameters of one optimizer in the script with those in the checkpoint.

    `path`: Path of its dictionary in the tree. `names`: Names in all optimizers of the checkpoint, for messages.
    """

    def __init__(self, path: str, here: _Side, there: _Side, names: Positions) -> None:
        self._path, self._here, self._there, self._names = path, here, there, names
        self._by_order: list[int] = []

    def order(self) -> list[int]:
        """Return each parameter's number in the checkpoint. StateError: one has no counterpart."""
        found: dict[int, int] = {}
        for level in (str, _without_wrappers, _name_in_object, _name_in_module):
            self._match(level, found)
        matched = set(found.values())
        rest_here = [number for number in range(len(self._here.flat)) if number not in found]
        rest_there = [number for number in range(len(self._there.flat)) if number not in matched]
        self._check_unmatched(rest_here, rest_there)
        found.update(zip(rest_here, rest_there, strict=True))
        self._by_order = rest_here
        return [found[number] for number in range(len(found))]

    def _match(self, level: Callable[[str], str], found: dict[int, int]) -> None:
        matched = set(found.values())
        here = _unique(self._here, level, found)
        there = _unique(self._there, level, matched)
        pairs: dict[int, int] = {}
        for name, own in here.items():
            other = there.get(name)
            if own is None or other is None or (level in _RENAMED and not self._is_renamed(own, other)):
                continue
            if pairs.setdefault(own, other) != other:
                raise StateError(
                    f"{self._path}: {self._describe(self._here, own)} is one parameter in the script, in the "
                    f"checkpoint it is two, {self._describe(self._there, pairs[own])} and "
                    f"{self._describe(self._there, other)}; tie them as they were when it was saved; nothing was loaded"
                )
        if len(set(pairs.values())) == len(pairs):
            found.update(pairs)

    def _is_renamed(self, own: int, other: int) -> bool:
        """Whether the other state lacks the object of one of the two, or one of them has no object in its name."""
        objects_here = {name.partition("/")[0] for name in self._here.flat[own].names if "/" in name}
        objects_there = {name.partition("/")[0] for name in self._there.flat[other].names if "/" in name}
        are_known = objects_here <= self._there.objects and objects_there <= self._here.objects
        return not (are_known and objects_here and objects_there)

    def _check_unmatched(self, rest_here: Sequence[int], rest_there: Sequence[int]) -> None:
        """Refuse unmatched parameters if both sides have names, and one of these names is known to the other side."""
        named_here = [number for number in rest_here if self._here.flat[number].names]
        named_there = [number for number in rest_there if self._there.flat[number].names]
        if not named_here or not named_there:
            return
        unexpected = [n for n in named_here if _bare(self._here.flat[n].names) & self._there.paths]
        missing = [n for n in named_there if _bare(self._there.flat[n].names) & self._here.paths]
        if not unexpected and not missing:
            return  # the model has other names now, and its own loading maps them
        own = self._first_unknown(unexpected or named_here, self._here, self._there)
        other = self._first_unknown(missing or named_there, self._there, self._here)
        other_path = self._other_optimizer_with(self._here.flat[own])
        raise StateError(
            f"{self._path}: expected the parameters that were saved, such as {self._describe(self._there, other)}, "
            f"got {self._describe(self._here, own)}, which was not among them"
            f"{f' (the checkpoint has it in {other_path})' if other_path else ''}; give it the parameters with "
            "which it was saved, in any order; nothing was loaded"
        )

    @staticmethod
    def _first_unknown(numbers: Sequence[int], side: _Side, other: _Side) -> int:
        """Return the first parameter whose names the other side lacks altogether, or else the first."""
        known = _bare(name for position in other.flat for name in position.names)
        return next((n for n in numbers if not _bare(side.flat[n].names) & known), numbers[0])

    def _other_optimizer_with(self, position: Position) -> str:
        wanted = _bare(position.names)
        for path, groups in self._names.items():
            if path != self._path and any(wanted & _bare(one.names) for group in groups for one in group):
                return path
        return ""

    def groups(self, order: Sequence[int], count: int) -> list[int]:
        """Return each group's number in the checkpoint. StateError: the grouping differs."""
        found: dict[int, int] = {}
        for number, other in enumerate(order):
            own, its = self._here.group_of[number], self._there.group_of[other]
            if found.setdefault(own, its) != its or sum(one == its for one in found.values()) > 1:
                split = next(n for n in range(len(order)) if self._clashes(order, n, number))
                raise StateError(
                    f"{self._path}: {self._describe(self._here, split)} and "
                    f"{self._describe(self._here, number)} are in groups {self._here.group_of[split]} and {own} of the "
                    f"script, in the checkpoint in groups {self._there.group_of[order[split]]} and {its}, and each "
                    "group has settings of its own; group the parameters as they were when it was "
                    "saved; nothing was loaded"
                )
        empty = iter(sorted(set(range(count)) - set(found.values())))
        return [found[number] if number in found else next(empty) for number in range(count)]

    def _clashes(self, order: Sequence[int], one: int, other: int) -> bool:
        here, there = self._here.group_of, self._there.group_of
        return (here[one] == here[other]) != (there[order[one]] == there[order[other]])

    def check_shapes(
        self,
        order: Sequence[int],
        parameters: Sequence[torch.Tensor],
        saved: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Check that parameters matched by order alone have the saved shapes. StateError: the order differs."""
        numbers = numbers_of(saved)
        expected: dict[int, tuple[int, ...]] = {}
        guessed: dict[int, tuple[int, ...]] = {}
        for number in self._by_order:
            position = self._there.flat[order[number]]
            known = position.shape or next((shapes[name] for name in position.names if name in shapes), None)
            moment = _moment_shape(saved["state"].get(numbers[order[number]]))
            if known is not None:
                expected[number] = known
            elif moment is not None:
                guessed[number] = moment
        # Some optimizers have smaller moments than their parameters: judge by moments only if each of their shapes is
        # the shape of a parameter.
        own = Counter(tuple(parameters[number].shape) for number in self._by_order)
        if not Counter(guessed.values()) - own:
            expected.update(guessed)
        for number, shape in expected.items():
            if tuple(parameters[number].shape) != shape:
                raise StateError(
                    f"{self._path}: expected {self._describe(self._here, number)} to have the shape {list(shape)} of "
                    f"the parameter in its place in the checkpoint, it has {list(parameters[number].shape)}: the "
                    "parameters were in another order, and no names say which is which; nothing was loaded"
                )

    def warn_unnamed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Warn of parameters of equal shape without names, whose order cannot be checked."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for number in self._by_order:
            by_shape.setdefault(tuple(parameters[number].shape), []).append(number)
        alike = [number for numbers in by_shape.values() if len(numbers) > 1 for number in numbers]
        if alike:
            _log.warning(
                "%s: %d parameters are loaded in the order in which they were saved, since no names join them, "
                "and their shapes do not tell them apart: %s and %s are the first; if the script makes it in another "
                "order now, their moments are exchanged",
                self._path,
                len(alike),
                self._describe(self._here, alike[0]),
                self._describe(self._here, alike[1]),
            )

    def check_duplicates(
        self, order: Sequence[int], parameters: Sequence[torch.Tensor], saved: Mapping[str, Any]
    ) -> None:
        """Check that a parameter that the optimizer has twice has only one saved state; else StateError."""
        numbers = numbers_of(saved)
        first: dict[int, int] = {}
        for number, parameter in enumerate(parameters):
            one = first.setdefault(id(parameter), number)
            both = numbers[order[one]], numbers[order[number]]
            if both[0] != both[1] and all(key in saved["state"] for key in both):
                raise StateError(
                    f"{self._path}: {self._describe(self._here, number)} is in this optimizer twice, and two "
                    f"parameters of the checkpoint are in its places, {self._describe(self._there, order[one])} and "
                    f"{self._describe(self._there, order[number])}; give it each parameter once; nothing was loaded"
                )

    @staticmethod
    def _describe(side: _Side, number: int) -> str:
        position = side.flat[number]
        if position.names:
            return position.names[0]
        place = number - side.group_of.index(side.group_of[number])
        return f"parameter {place} of group {side.group_of[number]}"


def _unique(side: _Side, level: Callable[[str], str], done: Any) -> dict[str, int | None]:
    """Map each name to the number of its parameter; to None if several parameters have it."""
    found: dict[str, int | None] = {}
    for number, position in enumerate(side.flat):
        if number not in done:
            for name in {level(one) for one in position.names}:
                found[name] = number if name not in found else None
    return found


def _moment_shape(moments: Any) -> tuple[int, ...] | None:
    named = moments.items() if isinstance(moments, Mapping) else ()
    like = (one for key, one in named if key in LIKE_PARAMETERS and isinstance(one, torch.Tensor))
    return next((tuple(one.shape) for one in like), None)


def renumbered_state(saved: Mapping[str, Any], keys: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the state of the parameters in `keys` (pairs of new and old key), and all that belongs to none."""
    state, of_parameters = saved["state"], {*numbers_of(saved)}
    others = {key: value for key, value in state.items() if key not in of_parameters}
    return others | {new: state[old] for new, old in keys if old in state}


def _renumber(
    saved: dict[str, Any], live: Mapping[str, Any], order: Sequence[int], groups: Sequence[int]
) -> None:
    """Renumber the saved state as the script's optimizer numbers its parameters."""
    there = numbers_of(saved)
    texts: list[Any] = []
    for group in saved["param_groups"]:
        texts += group.get("param_names") or [None] * len(group["params"])
    old_keys = [there[other] for other in order]
    state = renumbered_state(saved, zip(numbers_of(live), old_keys, strict=True))
    arranged, begin = [], 0
    for own, number in zip(live["param_groups"], groups, strict=True):
        group, end = dict(saved["param_groups"][number]), begin + len(own["params"])
        group["params"] = list(own["params"])
        if "param_names" in group:
            group["param_names"] = [texts[other] for other in order[begin:end]]
        arranged.append(group)
        begin = end
    saved["state"], saved["param_groups"] = state, arranged
