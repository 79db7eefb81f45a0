"""Optimizers keyed by the names of parameters, as torch's `get_optimizer_state_dict` has them.

    by number   {"state": {0: {…}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    by name     {"state": {"layers.4.weight": {…}}, "param_groups": [{"lr": 0.1, "params": ["layers.4.weight"]}]}

Where the ranks have different parameters (pipeline stages), parameter 0 is another one on each of them; its name, which
is that of the module in the state, is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import StateError
from trainer_side.state.containers import children

_LISTED = ("params", "param_names")


def parameter_names(state: Mapping[str, Any]) -> dict[str, list[list[list[str]]]]:
    """Of each optimizer, per group, the names of each parameter: the first is the one that stands for it.

    Raises:
        StateError: A parameter is in no module of the state, or two of one optimizer have the same name.
    """
    names: dict[int, list[str]] = {}
    for value in state.values():
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
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


def by_name(
    tree: Mapping[str, Any],
    names: Mapping[str, Sequence[Sequence[str]]],
    united: Mapping[str, Sequence[Sequence[str]]],
) -> dict[str, Any]:
    """The tree with optimizers keyed by name; tensors keep their order. One that has other parameters stays as it is.

    Args:
        tree: What `collect` gave.
        names: Of this rank's parameters, by optimizer and group.
        united: Those of all ranks, which the groups then list.
    """
    return {at: _named(value, names[at], united[at]) if at in names else value for at, value in tree.items()}


def has_groups(saved: Any) -> bool:
    """Whether what was saved has the form of an optimizer's state."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    return (
        isinstance(groups, list)
        and isinstance(saved.get("state"), dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    )


def settings(tree: Mapping[str, Any], at: str) -> list[str]:
    """What else each group of an optimizer says, as a text; tensors are compared as such, objects not at all."""
    return [
        repr(sorted((str(key), one) for key, one in group.items() if _is_setting(key, one)))
        for group in tree[at]["param_groups"]
    ]


def _is_setting(key: Any, value: Any) -> bool:
    return key not in _LISTED and (value is None or isinstance(value, bool | int | float | str | tuple))


def _named(saved: Any, names: Sequence[Sequence[str]], united: Sequence[Sequence[str]]) -> Any:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or [len(group["params"]) for group in groups] != list(map(len, names)):
        return saved
    name_of = {
        number: name
        for group, own in zip(groups, names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    return {
        **saved,
        "state": {name_of.get(key, key): of for key, of in children(saved["state"])},
        "param_groups": [
            {**{key: value for key, value in group.items() if key not in _LISTED}, "params": list(all_names)}
            for group, all_names in zip(groups, united, strict=True)
        ],
    }
