"""The optimizers of a state, and where their dictionaries lie in its tree: also those below objects of the script.

{"loop": Loop}, and Loop.state_dict() is {"optimizers": [a.state_dict(), b.state_dict()]}
    │ optimizers_of   a, b: found among the attributes of the objects
    │ telling         each of them says which dictionary it has given
    └ located         loop/optimizers/0 is a's, loop/optimizers/1 is b's
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from trainer_side.state.containers import children
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import tensor_paths

_DEPTH_MAX = 6
_OBJECTS_MAX = 20_000  # a data set may be a list of millions
_WITHIN_MAX = 1_000
_NEVER = (
    torch.Tensor,
    PerRank,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    str,
    bytes,
    int,
    float,
)
# The parts of these that hold tensors, and nothing that steps them.
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults"})
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})

Given = list[tuple[Any, torch.optim.Optimizer]]
"""The `param_groups` that optimizers have given, each with its optimizer."""


def optimizers_of(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """The optimizers in the state, and among the attributes of its objects, a few levels deep."""
    return [one for one in reachable(state) if isinstance(one, torch.optim.Optimizer)]


def reachable(state: Mapping[str, Any]) -> Iterator[Any]:
    """The objects of the state, and what they hold as attributes or in containers, each once."""
    return (value for _, value in with_paths(state))


def with_paths(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
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
            pending += [(f"{path}/{key}", one, depth + 1) for key, one in reversed(list(_below(value)))]


def _below(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict | list | tuple):
        return children(value) if len(value) <= _WITHIN_MAX else ()
    attributes = getattr(value, "__dict__", {})
    skipped: frozenset[str] = frozenset()
    if isinstance(value, torch.optim.Optimizer):
        skipped = _OF_OPTIMIZERS
    elif isinstance(value, torch.nn.Module):
        skipped = _OF_MODULES
    return [(name, one) for name, one in attributes.items() if name not in skipped]


@contextmanager
def telling(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Given]:
    """Within it, what the `state_dict()` of each optimizer gives is noted. Training thread."""
    given: Given = []

    def note(optimizer: torch.optim.Optimizer, said: Mapping[str, Any]) -> None:
        given.append((said.get("param_groups"), optimizer))

    hooks = [
        optimizer.register_state_dict_post_hook(note)
        for optimizer in optimizers
        if hasattr(optimizer, "_optimizer_state_dict_post_hooks")  # not where `__init__` was left out
    ]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def located(
    tree: Mapping[str, Any], state: Mapping[str, Any], given: Given
) -> dict[str, torch.optim.Optimizer]:
    """Path in the tree to the optimizer whose dictionary is there.

    Args:
        tree: What `collect` or `live_trees` gave, made within `telling`.
        state: The state that it was made of.
        given: What was noted meanwhile.
    """
    by_groups = {id(groups): optimizer for groups, optimizer in given}
    found: dict[str, torch.optim.Optimizer] = {}
    for path, node in forms(tree):
        optimizer = by_groups.get(id(node["param_groups"]))
        if optimizer is None:
            # It copies what its inner one gives, or makes all of it itself.
            value = state.get(path)
            if isinstance(value, torch.optim.Optimizer) and sizes(value.param_groups) == sizes(
                node["param_groups"]
            ):
                optimizer = value
        if optimizer is not None and sizes(optimizer.param_groups) == sizes(node["param_groups"]):
            found[path] = optimizer
    return dict(sorted(found.items()))


def forms(tree: Any) -> Iterator[tuple[str, Any]]:
    """All dictionaries that look like those of an optimizer, with their paths; one that is there twice comes once."""
    seen: set[int] = set()
    pending = [("", tree)]
    while pending:
        path, node = pending.pop()
        if is_form(node):
            yield path, node
            continue
        for key, value in children(node):
            if isinstance(value, dict | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                pending.append((f"{path}/{key}" if path else str(key), value))


def is_form(node: Any) -> bool:
    """Whether this is a dictionary as `Optimizer.state_dict()` gives it."""
    if not isinstance(node, dict) or not isinstance(node.get("state"), dict):
        return False
    groups = node.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def sizes(groups: Any) -> list[int]:
    """The number of parameters of each group."""
    return [len(group["params"]) for group in groups]


def at(tree: Any, path: str) -> Any:
    """What is at a path that `forms` gave for another tree of the same state; None if there is nothing."""
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


def on_host(tree: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> list[str]:
    """Paths of the tensors of optimizers' state that lie in host memory while their parameter lies on a device.

    Not those of numbers, which torch's optimizers keep there.

    Args:
        tree: What the state gave, with live tensors.
        optimizers: By the path of their dictionaries in it.
    """
    found: list[str] = []
    for path, optimizer in optimizers.items():
        saved = at(tree, path)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter.device.type != "cpu":
                state = {f"{path}/state/{number}": saved["state"].get(number)}
                found += [
                    one for one, tensor in tensor_paths(state) if tensor.dim() and tensor.device.type == "cpu"
                ]
    return found
