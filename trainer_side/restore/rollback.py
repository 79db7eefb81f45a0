"""Keeps what an object holds while its own `load_state_dict` runs, and brings it back if that raises.

torch copies layer after layer, and an object may refuse at the last one. The copy is in the memory of the host, of one
object at a time, and only of objects whose own code may refuse: all others are checked before the first byte is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import tensor_paths


@contextmanager
def rolled_back_on_error(value: Any, live: Any) -> Iterator[None]:
    """Give the tensors of `value` their bytes back if the block raises. Training thread.

    Args:
        value: A module, an optimizer, or any other object with `load_state_dict`.
        live: What its `state_dict()` gave: of another object these tensors are kept.
    """
    held = [local_of(tensor).detach() for tensor in _tensors(value, live)]
    kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in held if not tensor.is_meta]
    members = [(of, dict(of)) for of in _members(value)]
    optimizer = {name: vars(value)[name] for name in _OPTIMIZER} if _is_optimizer(value) else {}
    try:
        yield
    except BaseException:
        if optimizer:
            vars(value).update(optimizer)
        for of, before in members:
            of.clear()
            of.update(before)
        with torch.no_grad():
            for tensor, copied in kept:
                tensor.copy_(copied)
        raise


_OPTIMIZER = ("state", "param_groups")


def _tensors(value: Any, live: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        own = [*value.parameters(), *value.buffers()]
        return [tensor for tensor in own if not is_lazy(tensor)]
    if _is_optimizer(value):
        live = [*value.state.values()]
    return [tensor for _, tensor in tensor_paths(live)]


def _members(value: Any) -> list[dict[Any, Any]]:
    """The dictionaries in which the object keeps tensors: it may put others into them."""
    if isinstance(value, torch.nn.Module):
        return [of for module in value.modules() for of in (module._parameters, module._buffers)]
    if _is_optimizer(value):
        return [
            of for of in (value.state, *value.state.values(), *value.param_groups) if isinstance(of, dict)
        ]
    return []


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)
