"""Recognises a checkpoint of another object than the one that the script hands over, and names the difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WRAPPERS = {"module.": "DistributedDataParallel or DataParallel", "_orig_mod.": "torch.compile"}
# Schedulers write these into the groups of the optimizer that they drive.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}


def of_another_object(name: str, value: Any, live: Any, saved: Any) -> str:
    """Why what was saved belongs to another object than `value`, where that can be seen; else empty.

    Args:
        name: Of both in the state.
        value: The module or optimizer of the script.
        live: Its `state_dict()`.
        saved: The checkpoint's.
    """
    if not isinstance(saved, Mapping):
        return ""
    if isinstance(value, torch.nn.Module):
        return _other_wrapper(name, set(live), set(saved))
    if isinstance(value, torch.optim.Optimizer):
        return _other_optimizer(name, value, saved.get("param_groups") or [])
    return ""


def _other_wrapper(name: str, here: set[str], there: set[str]) -> str:
    for prefix, wrapper in _WRAPPERS.items():
        begin = f"their names begin with {prefix!r}"
        if here and {prefix + key for key in here} == there:
            return f"{name}: the tensors were saved from inside {wrapper} ({begin}), and the model is given without it"
        if there and {prefix + key for key in there} == here:
            return f"{name}: the tensors were saved without {wrapper}, and the model is given inside it ({begin})"
    return ""


def _other_optimizer(name: str, value: torch.optim.Optimizer, groups: Any) -> str:
    """Both must have settings that the other lacks: a version of torch may add some to the same optimizer."""
    known = {key for group in value.param_groups for key in group}
    there = {key for group in groups for key in group} - _OF_SCHEDULERS
    lacking, foreign = set(value.defaults) - there, there - known
    if not groups or not lacking or not foreign:
        return ""
    return (
        f"{name}: the checkpoint is of another optimizer, with {', '.join(sorted(foreign))}; this "
        f"{type(value).__name__} has {', '.join(sorted(lacking))}"
    )
