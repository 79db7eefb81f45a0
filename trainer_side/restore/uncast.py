"""Undoes what torch's own loading of an optimizer casts: its state comes back in the dtypes in which it was saved.

saved    {"master": float32, "moment": {"codes": int8, "scales": [float32]}}      of a bfloat16 parameter
loaded   all of them bfloat16, at any depth
after    as saved, on the device to which the optimizer has taken them, or on where `elsewhere` says that they belong
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer_side.restore.structure import Structure
from trainer_side.state.optimizer_places import matched, numbers_of
from trainer_side.state.tree import children, tensor_paths, with_changes

_HOST = "cpu"
Elsewhere = Mapping[int, Mapping[str, torch.device]]
"""Number of a parameter in what was saved → path within its state → the device, where it is not the parameter's."""


def offloaded(structure: Structure) -> frozenset[int]:
    """`id()` of the tensors of the tree that lay in host memory while their parameter lay on a device."""
    return frozenset(id(tensor) for path, tensor in structure.tensors if path in structure.on_host)


def elsewhere(optimizer: torch.optim.Optimizer, saved: Any, on_host: Collection[int]) -> Elsewhere:
    """The tensors of the saved state that do not go to the device of their parameter, with their devices."""
    found: dict[int, Mapping[str, torch.device]] = {}
    for number, parameter in matched(optimizer, saved):
        live = {path: one.device for path, one in tensor_paths(optimizer.state.get(parameter)) if one.dim()}
        places = {}
        for path, one in tensor_paths(saved["state"].get(number)):
            device = live.get(path, torch.device(_HOST) if id(one) in on_host else parameter.device)
            if one.dim() and device != parameter.device:
                places[path] = device
        if places:
            found[number] = places
    return found


_SPOILT = "<generator object"  # torch makes a new text from the letters of a text, and gets this


class Shielded:
    """A value that torch's loading would refuse, or warn of. It leaves objects of other classes as they are."""

    __slots__ = ("device", "value")

    def __init__(self, value: Any, device: torch.device | None = None) -> None:
        self.value, self.device = value, device


@contextmanager
def uncasting(
    optimizers: Iterable[torch.optim.Optimizer], on_host: Collection[int] = ()
) -> Iterator[list[torch.optim.Optimizer]]:
    """Inside the block, these optimizers load their state with the saved dtypes and devices. Training thread.

    `on_host`: Saved tensors that they keep in host memory (`uncast.offloaded`), by `id()`. The repair precedes hooks
    that run after the loading, and all that a class does with what torch has loaded. Yields the optimizers that have
    loaded state so far; one with a loading of its own is never among them.
    """
    hooks: list[Any] = []
    done: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):  # not where `__init__` was left out
            repair = _Repair(done, on_host)
            hooks.append(optimizer.register_load_state_dict_pre_hook(repair.shield))
            hooks.append(optimizer.register_load_state_dict_post_hook(repair.uncast, prepend=True))
    try:
        yield done
    finally:
        for hook in hooks:
            hook.remove()


class _Repair:
    def __init__(self, done: list[torch.optim.Optimizer], on_host: Collection[int]) -> None:
        self._saved: Any = None
        self._done, self._on_host = done, on_host

    def shield(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        self._saved = dict(saved)  # torch goes on with another one, and a hook may change what it is given
        numbers = {*numbers_of(saved)}
        others = elsewhere(optimizer, saved, self._on_host)
        state = {
            key: _shielded(one, others.get(key, {})) if key in numbers else one
            for key, one in saved["state"].items()
        }
        return {**saved, "state": state}

    def uncast(self, optimizer: torch.optim.Optimizer) -> None:
        saved, self._saved = self._saved, None
        uncast(optimizer, saved)
        self._done.append(optimizer)


def uncast(optimizer: torch.optim.Optimizer, saved: Any, *, only_casts: bool = False) -> None:
    """Give the state of each parameter its dtypes back. Training thread, after `load_state_dict`.

    `only_casts`: Leave alone what is not the saved value in another dtype: the optimizer's own code has decided it.
    """
    for number, parameter in matched(optimizer, saved):
        if number in saved["state"] and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            restored = _restored(loaded, saved["state"][number], parameter.device, only_casts=only_casts)
            if restored is not loaded:
                optimizer.state[parameter] = restored


def _shielded(value: Any, elsewhere: Mapping[str, torch.device], path: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        device = elsewhere.get(path)
        return Shielded(value, device) if value.is_complex() or device is not None else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Shielded(value)
    shields = {
        key: _shielded(one, elsewhere, f"{path}/{key}" if path else str(key)) for key, one in children(value)
    }
    changed = {key: shield for key, shield in shields.items() if shield is not value[key]}
    return with_changes(value, changed) if changed else value


def _restored(loaded: Any, saved: Any, device: torch.device, *, only_casts: bool) -> Any:
    """`loaded` with the dtypes of `saved`, wherever both have the same form; itself where it has them already."""
    again = functools.partial(_restored, device=device, only_casts=only_casts)
    if isinstance(loaded, Shielded):
        return _moved(loaded.value, loaded.device or device)
    if isinstance(saved, torch.Tensor):
        if isinstance(loaded, torch.Tensor) and loaded.dtype != saved.dtype:
            return saved.to(loaded.device) if not only_casts or _is_cast(loaded, saved) else loaded
        return loaded
    if isinstance(saved, str):
        return saved if isinstance(loaded, str) and loaded.startswith(_SPOILT) else loaded
    if isinstance(saved, Mapping):
        if not isinstance(loaded, dict) or loaded.keys() != saved.keys():
            # Keys that the optimizer has added or taken away are its own business.
            return loaded if not isinstance(loaded, dict) else _common(loaded, saved, again)
        return _like(saved, loaded, {key: again(loaded[key], saved[key]) for key in saved})
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(loaded) == len(saved):
        return _like(saved, loaded, {n: again(loaded[n], saved[n]) for n in range(len(saved))})
    return loaded


def _is_cast(loaded: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether torch has made the one of the other, and nothing else."""
    cast = saved.to(loaded.device, loaded.dtype)
    return cast.shape == loaded.shape and torch.equal(
        *(one.contiguous().reshape(-1).view(torch.uint8) for one in (cast, loaded))
    )


def _common(
    loaded: dict[Any, Any], saved: Mapping[Any, Any], again: Callable[[Any, Any], Any]
) -> dict[Any, Any]:
    for key in loaded.keys() & saved.keys():
        loaded[key] = again(loaded[key], saved[key])
    return loaded


def _like(saved: Any, loaded: Any, values: Mapping[Any, Any]) -> Any:
    """These values in the container that was loaded, or in one of the kind that was saved."""
    changed = {key: value for key, value in values.items() if value is not loaded[key]}
    if type(loaded) is type(saved) and isinstance(loaded, dict | list):
        for key, value in changed.items():
            loaded[key] = value
        return loaded
    if type(loaded) is type(saved):
        return with_changes(loaded, changed) if changed else loaded
    return with_changes(copy.copy(saved), values)


def _moved(value: Any, device: torch.device) -> Any:
    """A value that torch's loading has not seen, with its tensors where the parameter is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict | list | tuple):
        keys = value if isinstance(value, dict) else range(len(value))
        return with_changes(value, {key: _moved(value[key], device) for key in keys})
    return value
