"""State of optimizers that lies on another device than its parameter, such as moments that wait in host memory.

    live    the optimizer has a state already: each tensor comes back to where the one in its place lies
    file    it has none: what lay in host memory while its parameter lay on a device, as the file says behind its
            names, comes back to host memory

torch's own loading moves all of it to the device of the parameter, which may have no room for it. Numbers (counters of
steps) are left to torch, which knows where its optimizers want them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from trainer_side.restore.structure import Structure
from trainer_side.state.optimizer_places import is_form
from trainer_side.state.tree import tensor_paths

_HOST = "cpu"
Elsewhere = Mapping[int, Mapping[str, torch.device]]
"""Number of a parameter in what was saved → path within its state → the device, where it is not the parameter's."""


def offloaded(structure: Structure) -> frozenset[int]:
    """`id()` of the tensors of the tree that lay in host memory while their parameter lay on a device."""
    return frozenset(id(tensor) for path, tensor in structure.tensors if path in structure.on_host)


def elsewhere(optimizer: torch.optim.Optimizer, saved: Any, on_host: Collection[int]) -> Elsewhere:
    """What of the saved state does not go to the device of its parameter.

    Args:
        optimizer: With the state that it has now.
        saved: What it will load.
        on_host: What `offloaded` gave.
    """
    if not is_form(saved):
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):
        return {}
    found: dict[int, Mapping[str, torch.device]] = {}
    for parameter, number in zip(parameters, numbers, strict=True):
        live = {path: one.device for path, one in tensor_paths(optimizer.state.get(parameter)) if one.dim()}
        places = {}
        for path, one in tensor_paths(saved["state"].get(number)):
            device = live.get(path, torch.device(_HOST) if id(one) in on_host else parameter.device)
            if one.dim() and device != parameter.device:
                places[path] = device
        if places:
            found[number] = places
    return found
