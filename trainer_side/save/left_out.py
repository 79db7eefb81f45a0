"""Names trained values that no checkpoint has, or that a resume would not restore.

    Checkpointer()   restore()                 first step                  save() with a new layout, and the next one
    watch the steps  remember what was filled  is it still in the state?   optimizers, groups, schedulers, gradients

A finding never refuses a save, since it may be intended. Rank 0 logs each once, by path; every rank writes an event.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.telemetry.events import EventLog
from trainer_side.save.optimizer_steps import OptimizerSteps
from trainer_side.state.optimizer_places import module_parameters, parameters_of, reachable
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import containers, tensor_paths, unwrap_per_rank, with_inner_optimizers

_SAMPLE_BYTES = 64  # at each end of a tensor


class _RestoredParameter(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    sample: bytes


class RestoredTensors:
    """The parameters of the state's modules as `restore()` left them. Training thread."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._parameters: dict[str, _RestoredParameter] = {}

    def remember(self) -> None:
        """Note the parameters, at the end of `restore()`."""
        self._parameters = {
            path: _RestoredParameter(weakref.ref(tensor), _sample(tensor))
            for path, tensor in module_parameters(self._state)
        }

    def describe_strays(self) -> list[str]:
        """Return one sentence for each restored parameter that is no longer in the state, before the first step after
        `remember`. A parameter recreated from the restored one is recognised by its bytes, unless it is on a device or
        has become a DTensor.
        """
        now = dict(module_parameters(self._state))
        path_of = {id(tensor): path for path, tensor in reversed([*now.items()])}
        said = []
        for path, filled in self._parameters.items():
            tensor, current = filled.tensor(), now.get(path)
            if current is not None and current is tensor:
                continue
            if tensor is not None and id(tensor) in path_of:
                continue  # renamed by a wrapper or a parametrization
            if current is None:
                said.append(f"{path} is no longer part of the state")
            elif local_of(current) is not current or (filled.sample and _sample(current) == filled.sample):
                continue
            else:
                restored = (other for other, one in self._parameters.items() if one.tensor() is current)
                if (first := next(restored, path_of[id(current)])) != path:
                    said.append(f"{path} is now the same tensor as {first}")
                else:
                    said.append(f"{path} is another tensor now, with the script's own values")
        self._parameters.clear()
        return said


def _sample(tensor: torch.Tensor) -> bytes:
    """Return some bytes of a plain tensor in host memory; empty for others, whose bytes would take a wait."""
    ends = None if tensor.device.type != "cpu" else _copy_ends(tensor)
    if ends is None:
        return b""
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + ends.numpy().tobytes()


def _copy_ends(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy some bytes of a plain tensor on its device, without waiting; None for tensors of another kind."""
    if tensor.layout is not torch.strided or local_of(tensor) is not tensor or tensor.is_meta:
        return None
    if not tensor.is_contiguous() or not tensor.numel() or tensor.is_quantized:
        return None
    count = -(-_SAMPLE_BYTES // tensor.itemsize)
    flat = tensor.detach().view(-1)
    return torch.cat([flat[:count], flat[-count:]]).view(torch.uint8)


_log = logging.getLogger("holdfast.trainer")

_LOOKS = 2  # inspected saves of each layout
_OF_SCHEDULERS = {"last_epoch", "_last_lr", "base_lrs"}  # keys in the state of torch's schedulers
_T = TypeVar("_T")


class LeftOutCheck:
    """Searches the state of one rank for values that no checkpoint has. Training thread."""

    def __init__(self, state: Mapping[str, Any], *, rank: int, events: EventLog) -> None:
        self._state, self._rank, self._events = state, rank, events
        self._restored = RestoredTensors(state)
        self._steps = OptimizerSteps(self._check_restored)
        self._reported: set[str] = set()
        self.inspections_left = 0  # how many more saves of this layout call `inspect`, which costs time
        self._unused_gradients = 0
        self._unsaved_buffers: dict[str, _Buffer] = {}  # as the inspection before has found them
        self._steps.watch()

    def mark_restored(self) -> None:
        self._restored.remember()
        self._report(_frozen_with_moments(self._state))

    def inspect(self, tree: Mapping[str, Any], *, new_layout: bool = False) -> None:
        """Search the `tree` that a save has collected. Called only while `inspections_left`, or for a new layout."""
        if new_layout:
            self.inspections_left = _LOOKS
            self._unsaved_buffers.clear()
            self._steps.watch()
        self.inspections_left -= 1
        self._check_restored()
        try:
            self._report(self._findings(tree))
        except Exception:  # noqa: BLE001 - attributes of any object may raise; no checkpoint may fail for a warning
            _log.debug("the state could not be compared with what is trained", exc_info=True)
        if not self.inspections_left:
            self._unsaved_buffers.clear()
            self._steps.unwatch()

    def close(self) -> None:
        self._steps.unwatch()

    def _check_restored(self) -> None:
        self._report(
            f"{stray}; the value that restore() has filled in is not used. Build and tie the model before restore()"
            for stray in self._restored.describe_strays()
        )

    def _findings(self, tree: Mapping[str, Any]) -> Iterator[str]:
        held = _SavedTensors(self._state, tree)
        named = dict(_optimizers(self._state))
        mine = list(named)
        others = [one for one in self._steps.stepped if not any(one is other for other in mine)]
        for optimizer in others:
            if held.has_moments(optimizer):  # an object of the script saves it
                named[optimizer] = type(optimizer).__name__
            else:
                yield from self._unsaved_optimizer(optimizer, mine, held)
        for optimizer, name in named.items():
            yield from _parameters_left_out(name, optimizer, held)
        yield from self._gradients_left_over(named)
        yield from _diverged_wrapper_groups(self._state)
        yield from _schedulers(self._state, tree, mine)
        yield from self._changing_buffers()

    def _changing_buffers(self) -> Iterator[str]:
        before = self._unsaved_buffers
        self._unsaved_buffers = now = {
            path: _Buffer.of(buffer) for path, buffer in _non_persistent_buffers(self._state)
        }
        for path in before.keys() & now.keys():
            if now[path].differs_from(before[path]):
                yield (
                    f"{path} is a buffer that is not persistent, and training changes it: no checkpoint has its value. "
                    "Register it with persistent=True if a resume needs the value"
                )

    def _unsaved_optimizer(
        self, optimizer: Optimizer, mine: list[Optimizer], held: _SavedTensors
    ) -> Iterator[str]:
        trained = next((path for _, _, one in _trained(optimizer) if (path := held.path(one))), None)
        if trained is None:
            return  # it trains something else
        idle = [one for one in mine if one not in self._steps.stepped and _share_parameters(one, optimizer)]
        if not idle and not any(_moments(optimizer)):
            return  # nothing of it is worth saving
        again = " The optimizer in the state does not step: was it made again?" if idle else ""
        yield (
            f"{type(optimizer).__name__} steps {trained}, and the state does not have this optimizer: no checkpoint "
            f"has its moments.{again} Hand the optimizer that steps to the Checkpointer, before restore()"
        )

    def _gradients_left_over(self, named: Mapping[Optimizer, str]) -> Iterator[str]:
        unused = [(one, found) for one in named if (found := self._steps.unused_gradient(one)) is not None]
        if not unused:
            return
        self._unused_gradients += 1
        objects = reachable(unwrap_per_rank(self._state))
        if self._unused_gradients == 1 and any(isinstance(one, torch.amp.GradScaler) for one in objects):
            return  # the scaler may have skipped this step, which it does not do at each save
        optimizer, (group, place) = unused[0]
        yield (
            f"{named[optimizer]}: {_parameter_name(optimizer, group, place)} has a gradient that no step has used yet, "
            "and no checkpoint has gradients. Save after a step of the optimizer, not between two that accumulate"
        )

    def _report(self, findings: Iterable[str]) -> None:
        for finding in findings:
            if finding in self._reported:
                continue
            self._reported.add(finding)
            self._events.emit("left_out", {"what": finding})
            if self._rank == 0:
                _log.warning("%s", finding)


class _Buffer(NamedTuple):
    """A buffer that no checkpoint has, as it was at one save."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    form: tuple[Any, ...]
    ends: torch.Tensor | None  # some of its bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Buffer:
        version = 0 if tensor.is_inference() else tensor._version
        form = tensor.device, tensor.dtype, tensor.shape
        return cls(weakref.ref(tensor), version, form, _copy_ends(tensor))

    def differs_from(self, before: _Buffer) -> bool:
        """Whether the value is another one. Waits for a device only if torch has counted a change."""
        if self.tensor() is before.tensor() and self.version == before.version:
            return False
        if self.form != before.form or self.ends is None or before.ends is None:
            return False  # a cache that has grown
        # DistributedDataParallel writes all buffers in each forward pass, also those that stay the same.
        return not torch.equal(self.ends, before.ends)


def _non_persistent_buffers(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            for prefix, module in value.named_modules():
                for key in sorted(module._non_persistent_buffers_set):
                    if (buffer := module._buffers.get(key)) is not None:
                        yield f"{name}/{prefix}.{key}" if prefix else f"{name}/{key}", buffer


class _SavedTensors:
    def __init__(self, state: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
        whole = {name: _inner_tree(value) for name, value in tree.items()}
        self._named = [(path, tensor) for path, tensor in tensor_paths(whole) if _is_plain(tensor)]
        self._paths: dict[int, str] = {}
        for path, tensor in self._named:
            self._paths.setdefault(_storage(tensor), path)
        modules = {name for name, value in state.items() if isinstance(value, torch.nn.Module)}
        self._copies = [(path, one) for path, one in self._named if path.partition("/")[0] not in modules]

    def path(self, tensor: torch.Tensor) -> str | None:
        """Return the tensor's path in the checkpoint; None if no tensor there shares its storage."""
        return self._paths.get(_storage(tensor)) if _is_plain(tensor) else ""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, or a copy of it that an object's `state_dict()` made, is in the checkpoint."""
        return self.path(tensor) is not None or any(
            one.shape == tensor.shape
            and one.dtype == tensor.dtype
            and one.device == tensor.device
            # A copy has the same bytes. This waits for a device, but only where a warning would follow.
            and torch.equal(one, tensor)
            for _, one in self._copies
        )

    def has_moments(self, optimizer: Optimizer) -> bool:
        moments = [one for one in _moments(optimizer) if one.dim()]
        return bool(moments) and self.has(moments[0])

    def same_shape_path(self, tensor: torch.Tensor) -> str | None:
        found = (path for path, one in self._named if one.shape == tensor.shape and one.dtype != tensor.dtype)
        return next(found, None)


def _parameters_left_out(name: str, optimizer: Optimizer, held: _SavedTensors) -> Iterator[str]:
    missing = [(group, place) for group, place, one in _trained(optimizer) if not held.has(one)]
    if not missing:
        return
    first = optimizer.param_groups[missing[0][0]]["params"][missing[0][1]]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    same_shape = held.same_shape_path(first) if first.dtype == torch.float32 else None
    masters = (
        f" If it is the fp32 master copy of {same_shape}, the next step after a resume writes the script's own value "
        "over the restored weight: put the master copies into the state, or make them after restore()."
        if same_shape
        else ""
    )
    yield (
        f"{name} steps {_parameter_name(optimizer, *missing[0])}{more}, and no part of the state has its value: a "
        f"resume would go on from the script's own.{masters} Put the module or the tensor into the state"
    )


def _diverged_wrapper_groups(state: Mapping[str, Any]) -> Iterator[str]:
    """Warn of optimizer wrappers that hold other groups than the optimizer inside."""
    for name, value in state.items():
        groups = _groups(value)
        if groups is None:
            continue
        for one in _reachable(value, Optimizer):
            theirs = one.param_groups
            if theirs is groups or len(theirs) != len(groups):
                continue
            pairs = [*zip(groups, theirs, strict=True)]
            same_parameters = all(
                [*map(id, a.get("params", ()))] == [*map(id, b["params"])] for a, b in pairs
            )
            if same_parameters and any(a is not b for a, b in pairs):
                yield (
                    f"{name}: param_groups of {type(value).__name__} and of the {type(one).__name__} inside it are two "
                    "lists: a learning rate that is set in one does not reach the other. After load_state_dict() of "
                    "the inner optimizer, let the wrapper take its param_groups again"
                )


def _schedulers(
    state: Mapping[str, Any], tree: Mapping[str, Any], optimizers: list[Optimizer]
) -> Iterator[str]:
    for name, value in state.items():
        own = getattr(value, "optimizer", None) if isinstance(value, LRScheduler) else None
        if isinstance(own, Optimizer) and optimizers and not any(own is one for one in optimizers):
            yield (
                f"{name}: {type(value).__name__} drives a {type(own).__name__} that is not in the state. Make the "
                "scheduler for the optimizer that is"
            )
    if any(isinstance(node, dict) and not _OF_SCHEDULERS.isdisjoint(node) for _, node in containers(tree)):
        return
    # The state of other schedulers, such as timm's, has no key that identifies them.
    others = [value for value in state.values() if not hasattr(value, "param_groups")]
    driven = {id(getattr(value, "optimizer", None)) for value in others}
    for optimizer in optimizers:
        if id(optimizer) not in driven and any("initial_lr" in group for group in optimizer.param_groups):
            name = next(name for one, name in _optimizers(state) if one is optimizer)
            yield (
                f"{name}: its groups have initial_lr, as a learning rate scheduler leaves it, "
                "and the state has no scheduler: a resume would begin its schedule from the start. Put the "
                "scheduler into the state"
            )
            return


def _frozen_with_moments(state: Mapping[str, Any]) -> Iterator[str]:
    """Warn of parameters that were trained when they were saved, and are frozen now."""
    for name, value in state.items():
        if not isinstance(value, Optimizer):
            continue
        found = [
            (group, place)
            for group, place, parameter in _all_parameters(value)
            if not parameter.requires_grad and value.state.get(parameter)
        ]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            group, place = found[0]
            parameter = value.param_groups[group]["params"][place]
            path = next((path for path, one in module_parameters(state) if one is parameter), None)
            what = path or _parameter_name(value, group, place)
            yield (
                f"{what}{more}: the checkpoint has moments of {name} for it, and requires_grad is False now: it was "
                "trained when it was saved, and is frozen. If that is not meant, set requires_grad before restore()"
            )


def _optimizers(state: Mapping[str, Any]) -> Iterator[tuple[Optimizer, str]]:
    """The optimizers that the state saves, those that they wrap, and those inside of the script's own objects."""
    for name, value in state.items():
        has_none = isinstance(value, torch.nn.Module | torch.Tensor | LRScheduler | PerRank)
        if hasattr(value, "state_dict") and not has_none:
            for optimizer in with_inner_optimizers(_reachable(value, Optimizer)):
                yield optimizer, name


def _trained(optimizer: Optimizer) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield group, place and parameter of each parameter that a step may change."""
    for group, place, parameter in _all_parameters(optimizer):
        if parameter.numel() and (parameter.requires_grad or optimizer.state.get(parameter)):
            yield group, place, parameter


def _all_parameters(optimizer: Optimizer) -> Iterator[tuple[int, int, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield number, place, parameter


def _moments(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensor_paths(list(optimizer.state.values())) if _is_plain(tensor)]


def _share_parameters(one: Optimizer, other: Optimizer) -> bool:
    return not {*map(id, parameters_of(one))}.isdisjoint(map(id, parameters_of(other)))


def _parameter_name(optimizer: Optimizer, group: int, place: int) -> str:
    names = optimizer.param_groups[group].get("param_names")
    if names:
        return str(names[place])
    shape = list(optimizer.param_groups[group]["params"][place].shape)
    return f"parameter {place} of group {group} (shape {shape})"


def _groups(value: Any) -> list[dict[str, Any]] | None:
    groups = getattr(value, "param_groups", None)
    return groups if isinstance(groups, list) and all(isinstance(one, dict) for one in groups) else None


def _inner_tree(value: Any) -> Any:
    """Return the tree inside a `PerRank` value, None if it has no tree; other values unchanged."""
    if not isinstance(value, PerRank):
        return value
    inner = value.value
    if isinstance(inner, torch.nn.Module | Optimizer):
        return inner.state_dict()
    return inner if isinstance(inner, dict | list | tuple | torch.Tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return local_of(tensor).layout is torch.strided and not local_of(tensor).is_meta


def _storage(tensor: torch.Tensor) -> int:
    return int(local_of(tensor).untyped_storage()._cdata)


def _reachable(value: Any, kind: type[_T]) -> list[_T]:
    """The objects of a kind among the attributes of an object, and in its lists, tuples and dictionaries."""
    return [one for one in reachable({"": value}) if isinstance(one, kind)]
