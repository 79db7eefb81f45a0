"""Tells which objects torch loads without custom code, and where torch then puts each tensor.

    torch alone    a module or optimizer without overrides, hooks or extra state      its tensors are read in place
    own code       it may rename, convert, keep or refuse                             read elsewhere, then passed to it

An object is judged by the identity of its methods: one override, hook or tensor subclass in any submodule counts as own
code. Exceptions are torch's own overrides and hooks that treat a complete file as plain loading does.
"""

from __future__ import annotations

import enum
import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from trainer_side.state.optimizer_places import is_optimizer_dict
from trainer_side.state.split_tensor import is_dtensor

# Their loading only completes or refuses files of old versions, which lack names of the module.
_NORMS = (_NormBase, _InstanceNorm)
_CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
# These hooks keep the wrapper out of the names; see `tensors_by_key`.
_NAME_HOOKS = f"{_CHECKPOINT_WRAPPER}:ActivationWrapper."
_SHARDING_HOOKS = "torch.distributed.fsdp._fully_shard."  # reshard the parameters of FSDP2
_OLD_NAME_HOOKS = "torch.nn.utils.parametrizations:weight_norm."  # rename parameters of an old weight_norm


class Loading(enum.Enum):
    """How an object of the state is loaded."""

    TORCH = enum.auto()
    ADAPTED = enum.auto()  # by torch, which completes or renames the state of older versions of a layer
    OWN = enum.auto()


def loading_of(value: Any) -> Loading:
    if isinstance(value, nn.Module):
        return _loading_of_module(value)
    if isinstance(value, torch.optim.Optimizer):
        return Loading.TORCH if _is_plain_optimizer(value) else Loading.OWN
    return Loading.TORCH if isinstance(value, torch.Tensor) else Loading.OWN


def is_loaded_by_torch(value: Any, saved: Any) -> bool:
    """Whether torch copies `saved` into the value unchanged, without custom code that may refuse."""
    loading = loading_of(value)
    if loading is Loading.ADAPTED:
        return isinstance(saved, Mapping) and set(saved) == set(tensors_by_key(value))
    return loading is Loading.TORCH


def tensors_by_key(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter and buffer under the key that torch's own `load_state_dict` looks up in a checkpoint."""
    places: dict[str, torch.Tensor] = {}

    def visit(node: nn.Module, prefix: str) -> None:
        for key, tensor in node._parameters.items():
            if tensor is not None:
                places[prefix + key] = tensor
        for key, buffer in node._buffers.items():
            if buffer is not None and key not in node._non_persistent_buffers_set:
                places[prefix + key] = buffer
        for key, child in node._modules.items():
            if child is not None:
                is_hidden = key == "_checkpoint_wrapped_module" and _is_activation_wrapper(node)
                visit(child, prefix if is_hidden else f"{prefix}{key}.")

    visit(module, "")
    return places


def in_place_tensors(
    state: Mapping[str, Any], live: Mapping[str, Any], tree: Mapping[str, Any]
) -> dict[str, Any]:
    """Return, by name, the tensors that may be read into, at the checkpoint's paths. `live`: from `live_trees`."""
    return {
        name: tensors_by_key(state[name]) if isinstance(state[name], nn.Module) else live[name]
        for name in live
        if name in tree and is_loaded_by_torch(state[name], tree[name])
    }


def _loading_of_module(root: nn.Module) -> Loading:
    if not _is_inherited(root, "load_state_dict", nn.Module):
        return Loading.OWN
    adapted = False
    for module in root.modules():
        bases = [
            base for base in (nn.Module, *_NORMS) if _is_inherited(module, "_load_from_state_dict", base)
        ]
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if (
            not bases
            or isinstance(module, torch.jit.ScriptModule)
            or not _is_inherited(module, "set_extra_state", nn.Module)
            or not all(tensor is None or _has_plain_copy(tensor) for tensor in tensors)
        ):
            return Loading.OWN
        before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
        for hook in [*before.values(), *after.values()]:
            if not _is_from(hook, _SHARDING_HOOKS, _NAME_HOOKS, _OLD_NAME_HOOKS):
                return Loading.OWN
            adapted = adapted or _is_from(hook, _OLD_NAME_HOOKS)
        adapted = adapted or nn.Module not in bases
    return Loading.ADAPTED if adapted else Loading.TORCH


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    base = torch.optim.Optimizer
    owner = next(kind for kind in type(optimizer).__mro__ if "__setstate__" in vars(kind))
    hooks = ("state_dict_pre_hooks", "state_dict_post_hooks")
    return (
        _is_inherited(optimizer, "load_state_dict", base)
        and _is_inherited(optimizer, "state_dict", base)
        and owner.__module__.startswith("torch.optim.")
        and not any(value for name, value in vars(optimizer).items() if name.endswith(hooks))
    )


def _is_inherited(value: Any, method: str, base: type) -> bool:
    """Whether the method is that of `base`, neither overridden by a class nor by an attribute of the object."""
    return getattr(type(value), method) is getattr(base, method) and method not in vars(value)


def _is_from(hook: Callable[..., Any], *places: str) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps the hooks that it calls before loading
    where = f"{function.__module__}:{function.__qualname__}" if inspect.isfunction(function) else ""
    return any(where.startswith(place) for place in places)


def _is_activation_wrapper(module: nn.Module) -> bool:
    file = sys.modules.get(_CHECKPOINT_WRAPPER)  # imported if a wrapper exists
    return file is not None and isinstance(module, file.ActivationWrapper)


def _has_plain_copy(tensor: torch.Tensor) -> bool:
    """Whether `copy_` into the tensor copies bytes without running code of a subclass."""
    kind = type(tensor)
    if is_lazy(tensor):  # a hook of torch gives it a shape
        return False
    if is_dtensor(tensor):
        return True
    own = torch.Tensor
    return (
        getattr(kind, "copy_", None) is own.copy_
        and getattr(kind, "module_load", None) is own.module_load
        and getattr(kind, "__torch_dispatch__", None) is own.__torch_dispatch__
        and _function(kind) in (_function(own), _function(nn.Parameter))
    )


def _function(kind: type) -> Any:
    method = getattr(kind, "__torch_function__", None)
    return getattr(method, "__func__", method)


_log = logging.getLogger("holdfast.restore")
_LISTS = ("params", "param_names")
WRAPPERS = {
    "module": "DistributedDataParallel, DataParallel or AveragedModel",
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_fsdp_wrapped_module": "FSDP",
}


def rewrap(state: Mapping[str, Any], live: Mapping[str, Any], tree: dict[str, Any]) -> None:
    """Rename the saved state of modules, and of optimizers keyed by name, in `tree` to the names of this job."""
    moved: dict[str, str] = {}
    parameters: set[str] = set()
    for name, value in state.items():
        saved = tree.get(name)
        if isinstance(value, torch.nn.Module) and isinstance(saved, Mapping):
            here = live[name] if loading_of(value) is Loading.OWN else tensors_by_key(value)
            new = _module_names(name, saved, here)
            if new:
                tree[name] = _renamed(saved, here, new)
                moved.update(new)
            parameters.update(key for key, _ in value.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer) and name in tree:
            tree[name] = _rewrapped_optimizer(tree[name], parameters, moved)


def new_names(saved: Collection[str], here: Collection[str]) -> dict[str, str]:
    """Map saved names to their names here, if these differ. Names that do not exist here follow their module."""
    if set(saved) <= set(here) or set(here) <= set(saved):
        return {}
    there, own = _Tree(saved), _Tree(here)
    found = {name: own.full_name(there.bare(name)) for name in saved}
    if len({*found.values()}) < len(found):
        return {}
    return {name: new for name, new in found.items() if new != name}


def describe_other_wrappers(saved: Collection[str], here: Collection[str]) -> str:
    """Name the wrappers that only one of the two sides has, for messages; empty if there are none."""
    there, own = _wrappers_in(saved), _wrappers_in(here)
    texts = [
        f"only the {where} has {', '.join(f'{name!r} ({WRAPPERS[name]})' for name in sorted(some))}"
        for where, some in (("checkpoint", there - own), ("model", own - there))
        if some
    ]
    return " and ".join(texts)


class _Tree:
    """Modules by name, some of which are wrappers."""

    def __init__(self, names: Iterable[str]) -> None:
        self._children: dict[tuple[str, ...], set[str]] = {(): set()}
        leaves = [tuple(name.split(".")) for name in names]
        for parts in leaves:
            for depth, part in enumerate(parts):
                self._children.setdefault(parts[:depth], set()).add(part)
        self._full_names: dict[tuple[str, ...], tuple[str, ...]] = {}
        for parts in sorted([*self._children, *leaves], key=len):
            self._full_names[self._bare(parts)] = parts  # the innermost of nested wrappers

    def bare(self, name: str) -> tuple[str, ...]:
        """Return the parts of the name that are no wrappers; none for the root module, whose name is empty."""
        return self._bare(tuple(name.split("."))) if name else ()

    def full_name(self, bare: tuple[str, ...]) -> str:
        """Return the full name here; for an unknown name, that of its innermost known module, and the rest."""
        depth = next(depth for depth in range(len(bare), -1, -1) if bare[:depth] in self._full_names)
        return ".".join((*self._full_names[bare[:depth]], *bare[depth:]))

    def _bare(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(part for depth, part in enumerate(parts) if not self._is_wrapper(parts[: depth + 1]))

    def _is_wrapper(self, module: tuple[str, ...]) -> bool:
        *parent, name = module
        return name in WRAPPERS and module in self._children and self._children[tuple(parent)] == {name}


def _wrappers_in(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in name.split(".")[:-1] if part in WRAPPERS}


def _module_names(at: str, saved: Mapping[Any, Any], here: Any) -> dict[str, str]:
    if not isinstance(here, Mapping) or not all(isinstance(key, str) for key in [*saved, *here]):
        return {}
    new = new_names(saved, here)
    if new:
        one = next(iter(new))
        _log.info("%s: saved in other wrappers: %s is loaded as %s (%d names)", at, one, new[one], len(new))
    return new


def _renamed(saved: Mapping[str, Any], here: Mapping[str, Any], new: Mapping[str, str]) -> Mapping[str, Any]:
    pairs = [(new.get(key, key), value) for key, value in saved.items()]
    if not isinstance(saved, OrderedDict):
        return dict(pairs)
    renamed = OrderedDict(pairs)
    # Versions of layers, by name of the module; torch's loading code asks for them.
    metadata = getattr(saved, "_metadata", None)
    if isinstance(metadata, Mapping):
        there, own = _Tree(saved), _Tree(here)
        # A wrapper and its content have one bare name: the inner module comes later, and wins.
        moved = OrderedDict((own.full_name(there.bare(key)), value) for key, value in metadata.items())
        renamed._metadata = moved  # type: ignore[attr-defined]
    return renamed


def _rewrapped_optimizer(saved: Any, here: Collection[str], moved: Mapping[str, str]) -> Any:
    if not is_optimizer_dict(saved):
        return saved
    lists = [group.get(key) or () for group in saved["param_groups"] for key in _LISTS]
    listed = {name for names in lists for name in names if isinstance(name, str)}
    by_model = {name: moved.get(name, name) for name in listed}
    by_name = {name: new_names(listed, here).get(name, name) for name in listed} if listed else {}
    new = max(by_model, by_name, key=lambda names: len({*names.values()} & {*here}))
    if all(name == other for name, other in new.items()):
        return saved
    groups = [dict(group) for group in saved["param_groups"]]
    for group in groups:
        for key in group.keys() & set(_LISTS):
            if isinstance(group[key], list):
                group[key] = [new.get(one, one) for one in group[key]]
    state = {new.get(key, key): value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}
