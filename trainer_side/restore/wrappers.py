"""Gives the names of a checkpoint the wrappers of this job: a model may be saved compiled and restored in DDP.

    saved   module.encoder._orig_mod.weight      DDP around the model, one submodule compiled
    bare    encoder.weight                       without modules that are nothing but a wrapper
    here    _orig_mod.encoder.weight             the whole model compiled

A module counts as a wrapper where it is the only thing that its parent has, under a name that a wrapper of torch gives.
So a model may have a child called `module`. A checkpoint with both `x` and `module.x` is not guessed at: its names
stay, and are refused before the first byte where the model has others.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from trainer_side.restore.torch_loading import Loading, loading_of, places_of
from trainer_side.state.optimizer_places import has_groups

_log = logging.getLogger("holdfast.restore")
_LISTS = ("params", "param_names")
WRAPPERS = {
    "module": "DistributedDataParallel, DataParallel or AveragedModel",
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_fsdp_wrapped_module": "FSDP",
}


def rewrap(state: Mapping[str, Any], live: Mapping[str, Any], tree: dict[str, Any]) -> None:
    """Rename what was saved of modules, and of optimizers by name, as this job names it; changes `tree`.

    Args:
        state: As the script gave it.
        live: What `live_trees` gave for it.
        tree: What was saved.
    """
    moved: dict[str, str] = {}
    parameters: set[str] = set()
    for name, value in state.items():
        saved = tree.get(name)
        if isinstance(value, torch.nn.Module) and isinstance(saved, Mapping):
            here = live[name] if loading_of(value) is Loading.OWN else places_of(value)
            new = _module_names(name, saved, here)
            if new:
                tree[name] = _renamed(saved, here, new)
                moved.update(new)
            parameters.update(key for key, _ in value.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer) and name in tree:
            tree[name] = _rewrapped_optimizer(tree[name], parameters, moved)


def new_names(saved: Collection[str], here: Collection[str]) -> dict[str, str]:
    """Each saved name that has another one here, and that one.

    A name that is not here follows the module in which it would be.
    """
    if set(saved) <= set(here) or set(here) <= set(saved):
        return {}
    there, own = _Tree(saved), _Tree(here)
    found = {name: own.named(there.bare(name)) for name in saved}
    if len({*found.values()}) < len(found):
        return {}
    return {name: new for name, new in found.items() if new != name}


def other_wrappers(saved: Collection[str], here: Collection[str]) -> str:
    """Which wrappers only the saved names have, or only those here, for messages; empty where they have the same."""
    there, own = _wrappers_in(saved), _wrappers_in(here)
    said = [
        f"only the {where} has {', '.join(f'{name!r} ({WRAPPERS[name]})' for name in sorted(some))}"
        for where, some in (("checkpoint", there - own), ("model", own - there))
        if some
    ]
    return " and ".join(said)


class _Tree:
    """Modules by name, with what is a wrapper among them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._children: dict[tuple[str, ...], set[str]] = {(): set()}
        leaves = [tuple(name.split(".")) for name in names]
        for parts in leaves:
            for depth, part in enumerate(parts):
                self._children.setdefault(parts[:depth], set()).add(part)
        self._here: dict[tuple[str, ...], tuple[str, ...]] = {}
        for parts in sorted([*self._children, *leaves], key=len):
            self._here[self._bare(parts)] = parts  # of a wrapper and what is in it, the innermost

    def bare(self, name: str) -> tuple[str, ...]:
        """The parts of the name that are no wrappers; of the name of the root module, which is empty, nothing."""
        return self._bare(tuple(name.split("."))) if name else ()

    def named(self, bare: tuple[str, ...]) -> str:
        """The name that is here for it; if it is not here, that of the module in which it would be, and the rest."""
        depth = next(depth for depth in range(len(bare), -1, -1) if bare[:depth] in self._here)
        return ".".join((*self._here[bare[:depth]], *bare[depth:]))

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
    metadata = getattr(
        saved, "_metadata", None
    )  # by name of the module, with the version that its code asks for
    if isinstance(metadata, Mapping):
        there, own = _Tree(saved), _Tree(here)
        # A wrapper and what is in it have one bare name: the module inside comes later, and counts.
        moved = OrderedDict((own.named(there.bare(key)), value) for key, value in metadata.items())
        renamed._metadata = moved  # type: ignore[attr-defined]
    return renamed


def _rewrapped_optimizer(saved: Any, here: Collection[str], moved: Mapping[str, str]) -> Any:
    if not has_groups(saved):
        return saved
    listed = {
        name
        for group in saved["param_groups"]
        for key in _LISTS
        for name in group.get(key) or ()
        if isinstance(name, str)
    }
    by_model = {name: moved.get(name, name) for name in listed}
    by_name = {name: new_names(listed, here).get(name, name) for name in listed} if listed else {}
    new = max(by_model, by_name, key=lambda names: len({*names.values()} & {*here}))
    if all(name == other for name, other in new.items()):
        return saved
    groups = [
        {
            key: [new.get(one, one) for one in value] if key in _LISTS and isinstance(value, list) else value
            for key, value in group.items()
        }
        for group in saved["param_groups"]
    ]
    return {
        **saved,
        "state": {new.get(key, key): value for key, value in saved["state"].items()},
        "param_groups": groups,
    }
