"""The last step that the script has finished, and whether the state is still that of this step.

    step(9) ─► note: how often tensors were changed, how many updates began, the small values as they are
    an exception, after a preemption notice ─► only small values differ (sampler, RNG): save their values of step 9
                                            └► a tensor has changed, or an update has begun: refuse, with the reason

SIGTERM to all processes of a job ends the workers of its data loaders first; the loader raises in the training thread,
anywhere in a step. Without a watch for notices no step is noted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import is_split, local_of
from trainer_side.state.tree import children, with_changes

_NOTE_SECONDS_MAX = 5e-3  # a value that takes longer at `_SLOW_STEPS` steps in a row is not noted again
_SLOW_STEPS = 10
_LISTED_AGAIN_STEPS = 64


class _StepSnapshot(NamedTuple):
    """A finished step. `values`: Small values as they were. `skipped`: Name → why the value could not be noted."""

    step: int
    updates: int
    versions: list[int]
    values: dict[str, Any]
    skipped: dict[str, str]


class _FrozenStateful:
    """Stands in for an object of the state, with the `state_dict()` that it had."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def state_dict(self) -> Any:
        return self._tree

    def load_state_dict(self, _: Any) -> None:
        """Never called: the job ends."""


class FinishedStep:
    """The last finished step. Training thread. `updates` counts steps of optimizers."""

    def __init__(self, state: MutableMapping[str, Any], updates: Callable[[], int]) -> None:
        self._state, self._updates = state, updates
        self._snapshot: _StepSnapshot | None = None
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._steps_to_relisting = 0
        self._slow: dict[str, int] = {}

    @property
    def step(self) -> int:
        """Number of the step; -1 before the first."""
        return -1 if self._snapshot is None else self._snapshot.step

    def note(self, step: int) -> None:
        if self._steps_to_relisting <= 0:
            self._tensors, self._steps_to_relisting = list(_tensors(self._state)), _LISTED_AGAIN_STEPS
        self._steps_to_relisting -= 1
        values: dict[str, Any] = {}
        skipped: dict[str, str] = {}
        for name, value in self._state.items():
            if _is_small(value) and (why := self._note_value(name, value, values)):
                skipped[name] = why
        versions = [_version(tensor) for _, tensor in self._tensors]
        self._snapshot = _StepSnapshot(step, self._updates(), versions, values, skipped)

    def stale_reason(self) -> str:
        """Return why the state is no longer that of the step; empty if at most small values differ."""
        noted = self._snapshot
        if noted is None:
            return "no step was finished"
        if self._updates() != noted.updates:
            return f"an update of step {noted.step + 1} had begun"
        now = list(_tensors(self._state))
        if [id(tensor) for _, tensor in now] != [id(tensor) for _, tensor in self._tensors]:
            return f"tensors of the state were replaced after step {noted.step}"
        for (path, tensor), version in zip(now, noted.versions, strict=True):
            if _version(tensor) != version:
                return f"{path} was changed after step {noted.step}"
        changed = next((path for path, live in _leaves(noted.values) if live.changed), "")
        if changed:
            return f"{changed} was changed after step {noted.step}"
        return next((f"{name} of that step is unknown: {why}" for name, why in noted.skipped.items()), "")

    def restore_values(self) -> None:
        """Replace the small values in the state by those of the step. The script's own objects are not touched."""
        assert self._snapshot is not None
        for name, tree in self._snapshot.values.items():
            value = self._state[name]
            found = _map_leaves(tree, _without_version)
            if isinstance(value, PerRank):
                self._state[name] = PerRank(_FrozenStateful(found), same_ranks=value.same_ranks)
            else:
                self._state[name] = _FrozenStateful(found) if hasattr(value, "state_dict") else found

    def _note_value(self, name: str, value: Any, values: dict[str, Any]) -> str:
        """Note a small value; return why if that fails."""
        if self._slow.get(name, 0) >= _SLOW_STEPS:
            return f"its state_dict() takes more than {_NOTE_SECONDS_MAX * 1000:g} ms"
        begun = time.perf_counter()
        try:
            inner = value.value if isinstance(value, PerRank) else value
            tree = inner.state_dict() if hasattr(inner, "state_dict") else inner
            values[name] = _map_leaves(tree, _with_version)
        except Exception as error:  # noqa: BLE001 - the script's own code; a save says what is wrong with it
            return f"its state_dict() raised {type(error).__name__}: {error}"
        took = time.perf_counter() - begun
        self._slow[name] = self._slow.get(name, 0) + 1 if took > _NOTE_SECONDS_MAX else 0
        return ""


class _VersionedTensor(NamedTuple):
    """A tensor among the small values, and its version counter at the step."""

    tensor: torch.Tensor
    version: int

    @property
    def changed(self) -> bool:
        return _version(self.tensor) != self.version


def _is_small(value: Any) -> bool:
    return not (isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor) or is_split(value))


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            for path, tensor in [*value.named_parameters(), *value.named_buffers()]:
                yield f"{name}/{path}", tensor
        elif isinstance(value, torch.Tensor):
            yield name, value


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else local_of(tensor)._version


def _with_version(leaf: Any) -> Any:
    return _VersionedTensor(leaf, _version(leaf)) if isinstance(leaf, torch.Tensor) else leaf


def _without_version(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, _VersionedTensor) else leaf


def _map_leaves(tree: Any, of_leaf: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict) or type(tree) in (list, tuple):
        return with_changes(tree, {key: _map_leaves(value, of_leaf) for key, value in children(tree)})
    return of_leaf(tree)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, _VersionedTensor]]:
    if isinstance(tree, _VersionedTensor):
        yield path, tree
        return
    for key, value in children(tree):
        yield from _leaves(value, f"{path}/{key}" if path else str(key))
