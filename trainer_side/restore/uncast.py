"""Undoes the casts in torch's own loading of an optimizer, so that its state keeps the saved dtypes.

saved    {"master": float32, "moment": {"codes": int8, "scales": [float32]}}      of a bfloat16 parameter
loaded   all of them bfloat16, at any depth
after    as saved, on the device that the optimizer chose, or on the one that `device_overrides` names
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer_side.restore.structure import Structure
from trainer_side.restore.two_values import same_bytes
from trainer_side.state.optimizer_places import match_parameters, numbers_of
from trainer_side.state.tree import children, tensor_paths, with_changes

_HOST = "cpu"
DeviceOverrides = Mapping[int, Mapping[str, torch.device]]
"""Saved number of a parameter → path within its state → the device, if it is not the parameter's."""


def offloaded(structure: Structure) -> frozenset[int]:
    """Return the `id()` of tensors of the tree that were in host memory while their parameter was on a device."""
    return frozenset(id(tensor) for path, tensor in structure.tensors if path in structure.on_host)


def device_overrides(
    optimizer: torch.optim.Optimizer, saved: Any, on_host: Collection[int]
) -> DeviceOverrides:
    """Return the saved tensors that do not belong on the device of their parameter, with their devices."""
    found: dict[int, Mapping[str, torch.device]] = {}
    for number, parameter in match_parameters(optimizer, saved):
        live = {path: one.device for path, one in tensor_paths(optimizer.state.get(parameter)) if one.dim()}
        places = {}
        for path, one in tensor_paths(saved["state"].get(number)):
            device = live.get(path, torch.device(_HOST) if id(one) in on_host else parameter.device)
            if one.dim() and device != parameter.device:
                places[path] = device
        if places:
            found[number] = places
    return found


# torch calls `str` on a generator of the letters of a text, and gets this.
_MANGLED_PREFIX = "<generator object"


class ShieldedValue:
    """Hides a value that torch's loading would refuse, or warn of: torch leaves objects of unknown classes alone."""

    __slots__ = ("device", "value")

    def __init__(self, value: Any, device: torch.device | None = None) -> None:
        self.value, self.device = value, device


@contextmanager
def uncasting(
    optimizers: Iterable[torch.optim.Optimizer], on_host: Collection[int] = ()
) -> Iterator[list[torch.optim.Optimizer]]:
    """Make these optimizers load their state with the saved dtypes and devices. Training thread.

    `on_host`: Saved tensors that they keep in host memory (`uncast.offloaded`), by `id()`. The repair runs before other
    post-hooks, and before code of a class that processes the loaded state. Yields the optimizers that have loaded state
    so far; one that overrides `load_state_dict` is never among them.
    """
    hooks: list[Any] = []
    done: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):  # missing if `__init__` was not called
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
        self._saved = dict(saved)  # a copy, since other hooks may change theirs
        numbers = {*numbers_of(saved)}
        others = device_overrides(optimizer, saved, self._on_host)
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
    """Restore the saved dtypes of each parameter's state. Training thread, after `load_state_dict`.

    `only_casts`: Change only tensors that are the saved ones in another dtype: own code has chosen all others.
    """
    for number, parameter in match_parameters(optimizer, saved):
        if number in saved["state"] and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            restored = _restored(loaded, saved["state"][number], parameter.device, only_casts=only_casts)
            if restored is not loaded:
                optimizer.state[parameter] = restored


def _shielded(value: Any, overrides: Mapping[str, torch.device], path: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        device = overrides.get(path)
        return ShieldedValue(value, device) if value.is_complex() or device is not None else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ShieldedValue(value)
    prefix = f"{path}/" if path else ""
    shields = {key: _shielded(one, overrides, f"{prefix}{key}") for key, one in children(value)}
    changed = {key: shield for key, shield in shields.items() if shield is not value[key]}
    return with_changes(value, changed) if changed else value


def _restored(loaded: Any, saved: Any, device: torch.device, *, only_casts: bool) -> Any:
    """Return `loaded` with the dtypes of `saved`, as far as both have the same form; itself if nothing changes."""
    recurse = functools.partial(_restored, device=device, only_casts=only_casts)
    if isinstance(loaded, ShieldedValue):
        return _moved(loaded.value, loaded.device or device)
    if isinstance(saved, torch.Tensor):
        if isinstance(loaded, torch.Tensor) and loaded.dtype != saved.dtype:
            return saved.to(loaded.device) if not only_casts or _is_cast(loaded, saved) else loaded
        return loaded
    if isinstance(saved, str):
        return saved if isinstance(loaded, str) and loaded.startswith(_MANGLED_PREFIX) else loaded
    if isinstance(saved, Mapping):
        if not isinstance(loaded, dict):
            return loaded
        if loaded.keys() != saved.keys():
            # Keys that the optimizer has added or removed stay as they are.
            loaded.update({key: recurse(loaded[key], saved[key]) for key in loaded.keys() & saved.keys()})
            return loaded
        return _in_container_of(saved, loaded, {key: recurse(loaded[key], saved[key]) for key in saved})
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(loaded) == len(saved):
        return _in_container_of(saved, loaded, {n: recurse(loaded[n], saved[n]) for n in range(len(saved))})
    return loaded


def _is_cast(loaded: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether `loaded` is nothing but `saved`, cast."""
    cast = saved.to(loaded.device, loaded.dtype)
    return cast.shape == loaded.shape and same_bytes(cast, loaded)


def _in_container_of(saved: Any, loaded: Any, values: Mapping[Any, Any]) -> Any:
    """Return these values in the loaded container, or in one of the saved kind if the kinds differ."""
    changed = {key: value for key, value in values.items() if value is not loaded[key]}
    if type(loaded) is type(saved) and isinstance(loaded, dict | list):
        for key, value in changed.items():
            loaded[key] = value
        return loaded
    if type(loaded) is type(saved):
        return with_changes(loaded, changed) if changed else loaded
    return with_changes(copy.copy(saved), values)


def _moved(value: Any, device: torch.device) -> Any:
    """Move the tensors of a value that was hidden from torch's loading to `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict | list | tuple):
        keys = value if isinstance(value, dict) else range(len(value))
        return with_changes(value, {key: _moved(value[key], device) for key in keys})
    return value
