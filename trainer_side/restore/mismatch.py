"""Tells, before the first byte is read, why a saved value does not fit an object of the state.

    module      another kind of value, names that are missing or left over, no memory to load into
    optimizer   another optimizer, other numbers of groups or of parameters in them
    tensor      not a tensor, or in memory that cannot be written
    PerRank     not saved per rank, or by another number of ranks

Objects with their own loading code are not judged: they may accept a value that does not seem to fit.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_side.restore.torch_loading import Loading, describe_other_wrappers, loading_of, tensors_by_key
from trainer_side.state.optimizer_places import is_optimizer_dict
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import tensor_paths

# Schedulers write these into the groups of the optimizer that they drive.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
# The layers that torch adapts complete these themselves, from an older version's names.
_COMPLETED, _RENAMED = ("num_batches_tracked", "original0", "original1"), ("_g", "_v")
_NAMES_SHOWN = 4
_SIZES = 8  # up to this many groups, the message has the size of each

_MAPS = Path("/proc/self/maps")


def describe_mismatch(name: str, value: Any, saved: Any, *, ranks: int) -> str:
    """Return why the saved value cannot be loaded into `value`, and the remedy; empty if it can."""
    if isinstance(value, PerRank):
        return _ranks_mismatch(name, value, saved, ranks)
    loading = loading_of(value)
    if loading is Loading.OWN:
        return ""
    if isinstance(value, torch.nn.Module):
        if not isinstance(saved, Mapping):
            return _kind_mismatch(name, f"a {type(value).__name__}", saved)
        return _names_mismatch(name, value, saved, is_adapted=loading is Loading.ADAPTED)
    if isinstance(value, torch.optim.Optimizer):
        if not is_optimizer_dict(saved):
            return _kind_mismatch(name, f"the optimizer {type(value).__name__}", saved)
        return _optimizer_mismatch(name, value, saved["param_groups"]) or _groups_mismatch(name, value, saved)
    return "" if isinstance(saved, torch.Tensor) else _kind_mismatch(name, "a tensor", saved)


def _kind_mismatch(name: str, here: str, saved: Any) -> str:
    return f"{name}: it is {here} here, and the checkpoint has a {type(saved).__name__} of another kind under that name"


def _names_mismatch(name: str, module: torch.nn.Module, saved: Mapping[Any, Any], *, is_adapted: bool) -> str:
    here = tensors_by_key(module)
    missing = [key for key in here if key not in saved]
    unexpected = [str(key) for key in saved if key not in here]
    if is_adapted:
        missing = [key for key in missing if not key.endswith(_COMPLETED)]
        unexpected = [key for key in unexpected if not key.endswith(_RENAMED)]
    if missing or unexpected:
        texts = [f"{name}: the model has {len(here)} tensors, the checkpoint {len(saved)}"]
        if missing:
            texts.append(f"only the model has {_format_names(missing)}")
        if unexpected:
            texts.append(f"only the checkpoint has {_format_names(unexpected)}")
        wrappers = describe_other_wrappers([*map(str, saved)], here)
        if wrappers:
            texts.append(
                f"{wrappers}: wrap the model as it was when it was saved, or take the wrapper off both"
            )
        return "; ".join(texts)
    if on_meta := [key for key, tensor in here.items() if tensor.is_meta]:
        return (
            f"{name}: without memory (on the device meta): {_format_names(on_meta)}; give the model memory by "
            "to_empty() before restore()"
        )
    not_tensors = [key for key in here if key in saved and not isinstance(saved[key], torch.Tensor)]
    return f"{name}: no tensors in the checkpoint: {_format_names(not_tensors)}" if not_tensors else ""


def _optimizer_mismatch(name: str, value: torch.optim.Optimizer, groups: Any) -> str:
    """Refuse if both sides have settings that the other lacks: extra ones on one side may be from another torch."""
    known = {key for group in value.param_groups for key in group}
    there = {key for group in groups for key in group} - _OF_SCHEDULERS
    lacking, foreign = set(value.defaults) - there, there - known
    if not groups or not lacking or not foreign:
        return ""
    return (
        f"{name}: the checkpoint is of another optimizer, with {', '.join(sorted(foreign))}; this "
        f"{type(value).__name__} has {', '.join(sorted(lacking))}"
    )


def _groups_mismatch(name: str, value: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
    here = [len(group["params"]) for group in value.param_groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    if here == there:
        return ""
    sizes = enumerate(zip(here, there, strict=False))
    differing = (f" (group {number}: {own} and {other})" for number, (own, other) in sizes if own != other)
    first = next(differing, "")
    advice = "make it with the groups and parameters that were saved, frozen ones too"
    if len(here) < len(there) and here == there[: len(here)]:
        advice = f"add the groups before restore(): {_count(len(there) - len(here), 'group')} more by add_param_group()"
    elif len(here) > len(there) and there == here[: len(there)]:
        advice = f"call restore() before add_param_group(): {_count(len(here) - len(there), 'group')} less"
    kind = type(value).__name__
    return f"{name}: this {kind} has {_sizes(here)}, the checkpoint has {_sizes(there)}{first}; {advice}"


def _ranks_mismatch(name: str, value: PerRank, saved: Any, ranks: int) -> str:
    if not isinstance(saved, list) or not all(isinstance(blob, torch.Tensor) for blob in saved):
        return (
            f"{name}: is PerRank in the state, but was not when it was saved; a file from elsewhere is imported "
            f"without it (holdfast import --drop {name}), and restored with may_lack={[name]!r}"
        )
    if value.same_ranks and len(saved) != ranks:
        return (
            f"{name}: expected {len(saved)} ranks, as when it was saved, got {ranks}: what is shared out among them "
            f"would be repeated or left out; start {len(saved)} ranks, or do without same_ranks if that does not matter"
        )
    return ""


def _sizes(groups: list[int]) -> str:
    if len(groups) > _SIZES:
        return f"{len(groups)} groups of {sum(groups)} parameters in all"
    sizes = " and ".join(filter(None, [", ".join(map(str, groups[:-1])), *map(str, groups[-1:])]))
    return f"{_count(len(groups), 'group')} of {sizes} parameters" if groups else "no groups"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _format_names(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join([*names][:_NAMES_SHOWN]) + more


def differ(one: Any, other: Any) -> bool:
    """Whether two plain values differ."""
    try:
        return bool(one is not other and one != other)
    except Exception:  # noqa: BLE001 - tensors of several elements, or a class with an `!=` of its own
        return True


def find_read_only(live: Mapping[str, Any]) -> list[str]:
    """Return the paths of the tensors whose memory cannot be written; empty on systems without such a list.

    torch writes into them without a check, and the process gets SIGSEGV.
    """
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    begins, ends = [], []
    for line in lines:  # 7f10c000-7f10d000 r--p 00000000 …, ascending
        span, permissions = line.split(" ", 2)[:2]
        if "w" not in permissions:
            begin, end = span.split("-")
            begins.append(int(begin, 16))
            ends.append(int(end, 16))
    found = []
    for path, tensor in tensor_paths(live):
        local = local_of(tensor)
        if local.device.type != "cpu" or local.layout is not torch.strided or not local.numel():
            continue
        place = bisect.bisect_right(begins, address := local.data_ptr()) - 1
        if place >= 0 and address < ends[place]:
            found.append(path)
    return found
