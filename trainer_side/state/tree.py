"""The user's state as a tree: what is in it, where, and who may change it.

    {"model": model, "optimizer": optimizer, "rng": PerRank(rng)}
        │ collect                    {"model": {"w": tensor}, "optimizer": {"state": …}, "rng": PerRank(rng)}
        │ tensor_paths               model/w, optimizer/state/0/exp_avg, …
        └ classify                   per storage: which rank sends it, and may its copy wait behind the gate?

Two rules decide whose bytes are saved. Parameters of modules and the tensors of an optimizer's state are the same on
every rank of a data-parallel run: any rank may send them. All else may differ (BatchNorm statistics, counters): rank 0
sends it. Of the replicated ones, those that only `optimizer.step()` changes are *gated*: they may be copied after
`save()` has returned, for the gate holds the optimizer back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from holdfast.errors import StateError
from holdfast.image.entries import REPLICATED
from trainer_side.state.arriving import scaler_state
from trainer_side.state.containers import children
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_kinds import is_quantised, subclass_refusal
from trainer_side.state.split_tensor import local_of

_DEPTH_MAX = 1000  # pickle itself goes no deeper; paths of endless depth would take memory without end

_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class Named(NamedTuple):
    """A tensor of the state and its path, such as `optimizer/state/0/exp_avg`."""

    path: str
    tensor: torch.Tensor


class Ownership(NamedTuple):
    """The rank that sends a storage (`REPLICATED`: any), and whether it is copied behind the gate."""

    owner: int
    gated: bool


def collect(state: Mapping[str, Any], *, may_arrive: bool = False) -> dict[str, Any]:
    """The tree that would be saved: each object's `state_dict()`; tensors, plain values and `PerRank` as they are.

    The tree holds the live tensors, not copies. Training thread.

    Args:
        state: The state.
        may_arrive: Numbers that a device still computes may be `Arriving`: `settle` them before they are looked at.
    """
    tree: dict[str, Any] = {}
    for name, value in state.items():
        own = not isinstance(value, PerRank | type) and callable(getattr(value, "state_dict", None))
        if may_arrive and isinstance(value, torch.amp.GradScaler):
            tree[name] = scaler_state(value)
        else:
            tree[name] = value.state_dict() if own else value
    return tree


def tensor_paths(tree: Any) -> list[Named]:
    """All tensors in dicts, lists and tuples of `tree`, in the order in which pickle meets them.

    The same tensor at two places is listed twice; a container at two places once.

    Raises:
        StateError: The tree holds a bare storage, or a `PerRank` below the top level, or is nested too deep.
    """
    found: list[Named] = []
    seen: set[int] = {id(tree)}
    pending = [("", children(tree))]
    while pending:
        prefix, siblings = pending[-1]
        for key, value in siblings:
            path = f"{prefix}{key}"
            if isinstance(value, torch.Tensor):
                found.append(Named(path, value))
            elif isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
                raise StateError(
                    f"{path} is a bare storage ({type(value).__name__}); put a tensor in its place"
                )
            elif isinstance(value, PerRank) and prefix:
                raise StateError(
                    f"{path} is a PerRank below the top level; give it a name of its own in the state"
                )
            elif isinstance(value, dict | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                if len(pending) >= _DEPTH_MAX:
                    raise StateError(
                        f"{path[:80]}… is nested deeper than {_DEPTH_MAX} levels; flatten this part of the state"
                    )
                pending.append((f"{path}/", children(value)))
                break  # depth first; the siblings go on where they are
        else:
            pending.pop()
    return found


def refusal(tensor: torch.Tensor) -> str | None:
    """Why `tensor` cannot be saved as bytes of a storage, and what to do; None if it can."""
    kind = type(tensor)
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "a parameter without a shape yet: run one batch through the lazy module first"
    if not (kind is torch.Tensor or _plain_parameter(kind)):
        return subclass_refusal(tensor)
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}): save int_repr(), scale and zero point instead"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout}): save its indices and values, or to_dense()"
    if tensor.is_nested:
        return "a nested tensor: save its values and offsets instead"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on device '{tensor.device}', which cannot be copied from: move it to the CPU or a CUDA device"
    return None


def _plain_parameter(kind: type) -> bool:
    # Not isinstance: torch lets a DTensor pass for a Parameter.
    if not issubclass(kind, Parameter) or kind.__reduce_ex__ is not Parameter.__reduce_ex__:
        return False
    return kind is Parameter or not is_quantised(kind)


def classify(state: Mapping[str, Any], tree: Any) -> dict[int, Ownership]:
    """The sender of each storage of `tree`, and whether its copy may wait behind the gate.

    A storage that several tensors share is replicated, or gated, only if all of them are. A DTensor has that
    of its local tensor.

    Args:
        state: The state from which `collect` made `tree`; its modules and optimizers tell the roles.
        tree: What `collect` gave.

    Returns:
        `UntypedStorage._cdata` of each storage to its ownership.
    """
    replicated, gated = _roles(state)
    owned: dict[int, Ownership] = {}
    for _, tensor in tensor_paths(tree):
        view = view_of(local_of(tensor))
        if view is None:
            continue  # refused with its path when the plan is made
        before = owned.get(view[0], Ownership(REPLICATED, gated=True))
        same = view in replicated and before.owner == REPLICATED
        owned[view[0]] = Ownership(REPLICATED if same else 0, gated=same and before.gated and view in gated)
    return owned


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """These, and the optimizers that they wrap, at any depth: an inner one is what changes the parameters."""
    found: list[torch.optim.Optimizer] = []
    pending = [*optimizers]
    while pending:
        optimizer = pending.pop(0)
        if not any(optimizer is other for other in found):
            found.append(optimizer)
            pending += _inner_of(optimizer)
    return found


def _inner_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers among the attributes of this one, and in lists, tuples and dicts that are attributes."""
    inner: list[torch.optim.Optimizer] = []
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer):
            inner.append(value)
        elif isinstance(value, list | tuple | dict):
            among = value.values() if isinstance(value, dict) else value
            inner += [one for one in among if isinstance(one, torch.optim.Optimizer)]
    return inner


def _roles(state: Mapping[str, Any]) -> tuple[set[_View], set[_View]]:
    """The views that are the same on every rank, and those that only an optimizer changes."""
    parameters: set[_View | None] = set()
    buffers: set[_View | None] = set()
    moments: set[_View | None] = set()
    stepped: set[_View | None] = set()
    for value in state.values():
        if isinstance(value, torch.nn.Module):
            parameters.update(view_of(local_of(parameter)) for parameter in value.parameters())
            buffers.update(view_of(local_of(buffer)) for buffer in value.buffers())
        elif isinstance(value, torch.optim.Optimizer):
            for optimizer in with_inner([value]):
                state_of = list(optimizer.state.values())
                moments.update(view_of(local_of(tensor)) for _, tensor in tensor_paths(state_of))
                groups = optimizer.param_groups
                stepped.update(
                    view_of(local_of(parameter)) for group in groups for parameter in group["params"]
                )
    replicated = (parameters | moments) - buffers
    gated = replicated & (stepped | moments)
    return {view for view in replicated if view}, {view for view in gated if view}


def view_of(tensor: torch.Tensor) -> _View | None:
    """A key that a tensor and its detached twin in a `state_dict()` share; None if it has no plain storage."""
    if refusal(tensor) is not None:
        return None
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
