"""The user's state: the dictionary from the script, the tree of its contents, and who may change which tensor.

    {"model": model, "optimizer": optimizer, "rng": PerRank(rng)}
        │ collect                    {"model": {"w": tensor}, "optimizer": {"state": …}, "rng": PerRank(rng)}
        │ tensor_paths               model/w, optimizer/state/0/exp_avg, …
        └ classify                   per storage: which rank sends it, and may its copy wait behind the gate?

Two rules decide whose bytes are saved. Parameters of modules and the tensors of an optimizer's state are the same on
every rank of a data-parallel run: any rank may send them. All other values may differ (BatchNorm statistics, counters):
rank 0 sends them. Replicated tensors that only `optimizer.step()` changes are *gated*: they may be copied after
`save()` has returned, because the gate holds the optimizer back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from holdfast.errors import StateError
from holdfast.image.entries import REPLICATED
from trainer_side.state.accelerator import copy_to_host
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_kinds import is_quantised, subclass_refusal
from trainer_side.state.split_tensor import local_of


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict, list or tuple (or a subclass of these); nothing for other values."""
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def containers(tree: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[str, Any]]:
    """Yield each container of a tree once, with the prefix of the paths inside it, such as `loop/nets/`; nothing in
    those that are `is_leaf`.
    """
    seen: set[int] = set()
    pending = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        yield prefix, node
        if is_leaf(node):
            continue
        for key, value in children(node):
            if isinstance(value, dict | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                pending.append((f"{prefix}{key}/", value))


def with_changes(node: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of the container with other values at these keys."""
    if type(node) is dict:
        return {**node, **changed}
    if isinstance(node, tuple):
        values = [changed.get(index, value) for index, value in enumerate(node)]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    other = copy.copy(node)  # with the attributes of an OrderedDict, which torch pickles
    for key, value in changed.items():
        other[key] = value
    return other


def with_replacements(tree: Any, replace: Callable[[str, Any], Any]) -> Any:
    """Return `tree` with the results of `replace(path, value)`; containers in which nothing changes are kept."""
    done: dict[int, Any] = {}

    def of(node: Any, prefix: str) -> Any:
        if id(node) in done:
            return done[id(node)]
        done[id(node)] = node  # a container that holds itself is refused elsewhere
        changed: dict[Any, Any] = {}
        for key, value in children(node):
            other = replace(f"{prefix}{key}", value)
            if other is value and isinstance(value, dict | list | tuple):
                other = of(value, f"{prefix}{key}/")
            if other is not value:
                changed[key] = other
        if changed:
            done[id(node)] = with_changes(node, changed)
        return done[id(node)]

    return of(tree, "")


class PendingNumber:
    """A number in flight from a device, as of this point of the current stream; the copy thread reads it before it
    pickles the tree. `GradScaler.state_dict()` would wait for all work queued on the device to read two numbers.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here, self._event = copy_to_host(tensor.detach())

    def value(self) -> Any:
        """Wait for the number and return it. Any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.item()


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return `scaler.state_dict()`, with `PendingNumber` values where that would wait for a device. Training thread."""
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    # A subclass may save something else; before the first batch there are no tensors.
    known = scaler.is_enabled() and type(scaler).state_dict is torch.amp.GradScaler.state_dict
    if (
        known
        and isinstance(scale, torch.Tensor)
        and isinstance(tracker, torch.Tensor)
        and scale.device.type != "cpu"
    ):
        return {
            "scale": PendingNumber(scale),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": PendingNumber(tracker),
        }
    return dict(scaler.state_dict())


def resolve_pending(tree: Mapping[str, Any]) -> None:
    """Wait for each `PendingNumber` in a dict at the tree's top level, and replace it. In place; any thread."""
    for below in tree.values():
        if type(below) is dict:
            for key, value in below.items():
                if type(value) is PendingNumber:
                    below[key] = value.value()


class UserState:
    """Keeps the state to save in step with the script's dictionary, which the script may still change.

    Training thread. StateError: a name is empty, is not a string, or has a slash.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._user_dict = given
        for name in list[object](given):
            _refuse_name(name)
        self.current: dict[str, Any] = dict(given)  # content of the next checkpoint; always the same object
        # Others may put a stand-in into `current`, so the script's changes are found by comparison with `_last_given`.
        self._last_given: dict[str, Any] = dict(given)

    def try_refresh(self) -> StateError | None:
        """Call `refresh` and return its error, which the other ranks must learn."""
        try:
            self.refresh()
        except StateError as error:
            return error
        return None

    def refresh(self) -> None:
        """Take the values that the script has put into its dictionary since the last call.

        Tensors, plain values and `PerRank` values are taken. An object with a `state_dict()` is refused: `restore()`
        did not load it, and the gate does not know its optimizer. StateError: names the object, and says what to do.
        """
        for name, value in self._user_dict.items():
            before = self._last_given.get(name, self)
            if before is value:
                continue
            _refuse_name(name)
            if _is_object(value) or _is_object(before):
                what = "is another object now" if name in self._last_given else "was added"
                raise StateError(
                    f"{name}: expected the objects that the Checkpointer was made with, got a {type(value).__name__} "
                    f"that {what}; no checkpoint would have its state. Put every object with a state_dict() into the "
                    "dictionary first, and make the Checkpointer then"
                )
            self.current[name] = self._last_given[name] = value


def _refuse_name(name: object) -> None:
    if not (isinstance(name, str) and name and "/" not in name):
        raise StateError(f"names in the state are non-empty strings without '/', got {name!r}")


def _is_object(value: Any) -> bool:
    return not isinstance(value, PerRank | type) and callable(getattr(value, "state_dict", None))


_DEPTH_MAX = 1000  # pickle itself goes no deeper; endless paths would exhaust the memory

_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


ReturnedGroups = list[tuple[Any, torch.optim.Optimizer]]
"""The `param_groups` that optimizers have returned, each with its optimizer."""


class NamedTensor(NamedTuple):
    """A tensor of the state and its path, such as `optimizer/state/0/exp_avg`."""

    path: str
    tensor: torch.Tensor


class Ownership(NamedTuple):
    """The rank that sends a storage (`REPLICATED`: any), and whether it is copied behind the gate."""

    owner: int
    gated: bool


def unwrap_per_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with each `PerRank` replaced by the value in it."""
    return {name: value.value if isinstance(value, PerRank) else value for name, value in state.items()}


def collect(state: Mapping[str, Any], *, allow_pending: bool = False) -> dict[str, Any]:
    """Return the tree to save, of live tensors: each object's `state_dict()`; tensors, plain values and `PerRank` as
    they are. Training thread.

    `allow_pending`: Numbers that a device still computes may be `PendingNumber`; call `resolve_pending` before use.
    """
    tree: dict[str, Any] = {}
    for name, value in state.items():
        if allow_pending and isinstance(value, torch.amp.GradScaler):
            tree[name] = scaler_state(value)
        else:
            tree[name] = value.state_dict() if _is_object(value) else value
    return tree


@contextmanager
def record_param_groups(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[ReturnedGroups]:
    """Context that records which `param_groups` each optimizer's `state_dict()` returns. Training thread."""
    given: ReturnedGroups = []

    def note(optimizer: torch.optim.Optimizer, said: Mapping[str, Any]) -> None:
        given.append((said.get("param_groups"), optimizer))

    hooks = [
        optimizer.register_state_dict_post_hook(note)
        for optimizer in optimizers
        if hasattr(optimizer, "_optimizer_state_dict_post_hooks")  # missing if `__init__` was left out
    ]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def tensor_paths(tree: Any) -> list[NamedTensor]:
    """Return all tensors in dicts, lists and tuples of `tree`, in pickle's order.

    A tensor at two places is listed twice; a container at two places, once. StateError: the tree holds a bare
    storage, or a `PerRank` below the top level, or is nested too deep.
    """
    found: list[NamedTensor] = []
    seen: set[int] = {id(tree)}
    pending = [("", children(tree))]
    while pending:
        prefix, siblings = pending[-1]
        for key, value in siblings:
            path = f"{prefix}{key}"
            if isinstance(value, torch.Tensor):
                found.append(NamedTensor(path, value))
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
                break  # depth first; the siblings continue afterwards
        else:
            pending.pop()
    return found


def tensor_refusal(tensor: torch.Tensor) -> str | None:
    """Return why `tensor` cannot be saved as bytes of a storage, and the remedy; None if it can."""
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
    """Return, by `UntypedStorage._cdata`, who sends each storage of `tree`, and whether it is copied behind the gate.

    A storage that several tensors share is replicated, or gated, only if all of them are. A DTensor counts as its local
    tensor. `state`: The argument of `collect` for this tree; its modules and optimizers define the roles.
    """
    replicated, gated = _roles(state)
    owned: dict[int, Ownership] = {}
    for _, tensor in tensor_paths(tree):
        view = view_key(local_of(tensor))
        if view is None:
            continue  # refused with its path when the plan is made
        before = owned.get(view[0], Ownership(REPLICATED, gated=True))
        same = view in replicated and before.owner == REPLICATED
        owned[view[0]] = Ownership(REPLICATED if same else 0, gated=same and before.gated and view in gated)
    return owned


def with_inner_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return these and the optimizers that they wrap, at any depth: the inner optimizer changes the parameters."""
    found: list[torch.optim.Optimizer] = []
    pending = [*optimizers]
    while pending:
        optimizer = pending.pop(0)
        if not any(optimizer is other for other in found):
            found.append(optimizer)
            # Among its attributes, and in lists, tuples and dicts that are attributes.
            for value in vars(optimizer).values():
                among = [value, *(one for _, one in children(value))]
                pending += [one for one in among if isinstance(one, torch.optim.Optimizer)]
    return found


def _roles(state: Mapping[str, Any]) -> tuple[set[_View], set[_View]]:
    """Return the views that are the same on every rank, and those that only an optimizer changes."""
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    parameters = _views(one for module in modules for one in module.parameters())
    buffers = _views(one for module in modules for one in module.buffers())
    given = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    optimizers = with_inner_optimizers(given)
    stepped = _views(one for of in optimizers for group in of.param_groups for one in group["params"])
    moments = _views(one for of in optimizers for _, one in tensor_paths([*of.state.values()]))
    replicated = (parameters | moments) - buffers
    return replicated, replicated & (stepped | moments)


def _views(tensors: Iterable[torch.Tensor]) -> set[_View]:
    return {view for tensor in tensors if (view := view_key(local_of(tensor))) is not None}


def view_key(tensor: torch.Tensor) -> _View | None:
    """Return a key that a tensor shares with its detached twin in a `state_dict()`; None without a plain storage."""
    if tensor_refusal(tensor) is not None:
        return None
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
