"""The optimizers of a state, also inside the script's own objects, and the paths of their dictionaries in its tree.

{"loop": Loop}, and Loop.state_dict() is {"optimizers": [a.state_dict(), b.state_dict()]}
    │ optimizers_of         a, b: found among the attributes of the objects
    │ record_param_groups   records which dictionary each of them returns
    └ locate_optimizers     loop/optimizers/0 is a's, loop/optimizers/1 is b's
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from holdfast.errors import StateError
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import ReturnedGroups, children, containers, tensor_paths

_DEPTH_MAX = 6
_OBJECTS_MAX = 20_000  # a data set may be a list of millions
_WITHIN_MAX = 1_000
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_NEVER = (torch.Tensor, PerRank, type, ModuleType, *_FUNCTIONS, str, bytes, int, float)
# Attributes of optimizers and modules that hold tensors but no optimizer.
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults"})
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})


def optimizers_of(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers in the state, and among the attributes of its objects, a few levels deep."""
    return [one for one in reachable(state) if isinstance(one, torch.optim.Optimizer)]


def reachable(state: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the objects of the state, and those in their attributes and containers, each once."""
    return (value for _, value in reachable_with_paths(state))


def reachable_with_paths(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """As `reachable`, each with the names and keys that lead to it, such as `loop/nets/0`."""
    seen: set[int] = set()
    pending: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in reversed(list(state.items()))]
    while pending and len(seen) < _OBJECTS_MAX:
        path, value, depth = pending.pop()
        if value is None or isinstance(value, _NEVER) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if depth < _DEPTH_MAX:
            pending += [
                (f"{path}/{key}", one, depth + 1) for key, one in reversed(list(_inner_values(value)))
            ]


def _inner_values(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict | list | tuple):
        return children(value) if len(value) <= _WITHIN_MAX else ()
    attributes = getattr(value, "__dict__", {})
    skipped: frozenset[str] = frozenset()
    if isinstance(value, torch.optim.Optimizer):
        skipped = _OF_OPTIMIZERS
    elif isinstance(value, torch.nn.Module):
        skipped = _OF_MODULES
    return [(name, one) for name, one in attributes.items() if name not in skipped]


def locate_optimizers(
    tree: Mapping[str, Any], state: Mapping[str, Any], given: ReturnedGroups
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a state by the path of their dictionary in its tree: a result of `collect` or
    `live_trees`, made inside `record_param_groups`, which recorded `given`.
    """
    by_groups = {id(groups): optimizer for groups, optimizer in given}
    found: dict[str, torch.optim.Optimizer] = {}
    for path, node in optimizer_dicts(tree):
        optimizer = by_groups.get(id(node["param_groups"]))
        if optimizer is None and isinstance(state.get(path), torch.optim.Optimizer):
            optimizer = state[path]  # a wrapper that copies the inner dictionary, or builds its own
        if optimizer is not None and group_sizes(optimizer.param_groups) == group_sizes(node["param_groups"]):
            found[path] = optimizer
    return dict(sorted(found.items()))


def optimizer_dicts(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield all dictionaries that look like an optimizer's, with their paths; a shared one comes once."""
    for prefix, node in containers(tree, is_leaf=is_optimizer_dict):
        if is_optimizer_dict(node):
            yield prefix.removesuffix("/"), node


def is_optimizer_dict(node: Any) -> bool:
    """Whether this looks like a result of `Optimizer.state_dict()`."""
    if not isinstance(node, dict) or not isinstance(node.get("state"), dict):
        return False
    groups = node.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def numbers_of(saved: Mapping[str, Any]) -> list[Any]:
    """Return the numbers (or names) of the parameters in a saved state, in the order of the groups."""
    return [number for group in saved["param_groups"] for number in group["params"]]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def match_parameters(optimizer: torch.optim.Optimizer, saved: Any) -> list[tuple[Any, torch.Tensor]]:
    """Pair each parameter with its number (or name) in a saved state, by position, as torch does. Empty if their
    numbers differ: loading refuses such a state, or is the optimizer's own code.
    """
    if not is_optimizer_dict(saved):
        return []
    numbers, parameters = numbers_of(saved), parameters_of(optimizer)
    return [*zip(numbers, parameters, strict=True)] if len(numbers) == len(parameters) else []


def group_sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]


def value_at(tree: Any, path: str) -> Any:
    """Return the value at a path that `optimizer_dicts` found in another tree of the same state; None: it has none."""
    pending = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        for key, value in children(node):
            own = f"{prefix}{key}"
            if own == path:
                return value
            if path.startswith(f"{own}/"):
                pending.append((f"{own}/", value))
    return None


def host_tensor_paths(tree: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> list[str]:
    """Return the paths of optimizer tensors in host memory whose parameter lies on a device, except scalars, which
    torch keeps in host memory. `tree`: Has live tensors. `optimizers`: By the path of their dictionaries in the tree.
    """
    found: list[str] = []
    for path, optimizer in optimizers.items():
        saved = value_at(tree, path)
        for number, parameter in match_parameters(optimizer, saved):
            if parameter.device.type != "cpu":
                state = {f"{path}/state/{number}": saved["state"].get(number)}
                found += [
                    one for one, tensor in tensor_paths(state) if tensor.dim() and tensor.device.type == "cpu"
                ]
    return found


def module_parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the modules in the state, by path; a tied parameter comes under each of its names."""
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            for path, parameter in value.named_parameters(remove_duplicate=False):
                yield f"{name}/{path}", parameter


_LISTED = ("params", "param_names")


def parameter_names(state: Mapping[str, Any]) -> dict[str, list[list[list[str]]]]:
    """Return the names of each parameter, by optimizer and group; the first name is the one used.

    StateError: a parameter is in no module of the state, or two of one optimizer have the same name.
    """
    names: dict[int, list[str]] = {}
    for path, parameter in module_parameters(state):
        names.setdefault(id(parameter), []).append(path.partition("/")[2])
    found: dict[str, list[list[list[str]]]] = {}
    for at, value in state.items():
        if not isinstance(value, torch.optim.Optimizer):
            continue
        firsts: set[str] = set()
        found[at] = []
        for number, group in enumerate(value.param_groups):
            found[at].append([])
            for place, parameter in enumerate(group["params"]):
                own = names.get(id(parameter))
                if own is None:
                    raise StateError(
                        f"{at}: parameter {place} of group {number}, of shape {list(parameter.shape)}, is in no module "
                        "of the state; the ranks have different parameters, so their names are needed: hand over the "
                        "module, too"
                    )
                if own[0] in firsts:
                    raise StateError(
                        f"{at}: two of its parameters are named {own[0]} in modules of the state; the ranks have "
                        "different parameters, so each needs a name of its own: hand over one module in which both are"
                    )
                firsts.add(own[0])
                found[at][-1].append(own)
    return found


def first_names(names: Mapping[str, Sequence[Sequence[Sequence[str]]]]) -> dict[str, list[list[str]]]:
    return {at: [[own[0] for own in group] for group in groups] for at, groups in names.items()}


def keyed_by_name(
    tree: Mapping[str, Any],
    names: Mapping[str, Sequence[Sequence[str]]],
    united: Mapping[str, Sequence[Sequence[str]]],
) -> dict[str, Any]:
    """Return the tree with optimizers keyed by name; tensors keep their order, and an optimizer with other parameters
    stays unchanged. `names`: This rank's, by optimizer and group. `united`: All ranks', which the groups then list.
    """
    return {
        at: _keyed_by_name(value, names[at], united[at]) if at in names else value
        for at, value in tree.items()
    }


def settings(tree: Mapping[str, Any], at: str) -> list[str]:
    """Return the other settings of each group of an optimizer, as text; without tensors and objects."""
    return [
        repr(sorted((str(key), one) for key, one in group.items() if _is_setting(key, one)))
        for group in tree[at]["param_groups"]
    ]


def _is_setting(key: Any, value: Any) -> bool:
    return key not in _LISTED and (value is None or isinstance(value, bool | int | float | str | tuple))


def _keyed_by_name(saved: Any, names: Sequence[Sequence[str]], united: Sequence[Sequence[str]]) -> Any:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or group_sizes(groups) != list(map(len, names)):
        return saved
    name_of = dict(zip(numbers_of(saved), itertools.chain(*names), strict=True))
    return {
        **saved,
        "state": {name_of.get(key, key): of for key, of in children(saved["state"])},
        "param_groups": [
            {**{key: value for key, value in group.items() if key not in _LISTED}, "params": list(all_names)}
            for group, all_names in zip(groups, united, strict=True)
        ],
    }
