"""Watches which optimizers step, whether or not the state has them, and which gradients each step has used.

torch calls the global hooks for every optimizer of the process. They are set only while needed: a compiled step breaks
its graph at each hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainer_side.opaque import opaque


class OptimizerSteps:
    """The steps since `watch`. Hooks run in the thread that steps an optimizer; all else is for the training thread.

    `before_first` is called before the first step since `watch` changes anything.
    """

    def __init__(self, before_first: Callable[[], None]) -> None:
        self._before_first = before_first
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # By parameter: its gradient, and the version of that.
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._unwatch: weakref.finalize[[list[Any]], OptimizerSteps] | None = None

    def watch(self) -> None:
        """Set the hooks, unless they are set. They are removed with this object, too."""
        if self._unwatch is None or not self._unwatch.alive:
            before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
            hooks = [
                # Traced into a compiled step, they would see only its first call.
                register_optimizer_step_pre_hook(opaque(lambda *step: _call(before, *step))),
                register_optimizer_step_post_hook(opaque(lambda *step: _call(after, *step))),
            ]
            self._unwatch = weakref.finalize(self, _remove, hooks)

    def unwatch(self) -> None:
        if self._unwatch is not None:
            self._unwatch()

    @property
    def stepped(self) -> list[Optimizer]:
        return list(self._stepped)

    def unused_gradient(self, optimizer: Optimizer) -> tuple[int, int] | None:
        """Find a gradient that no step has used; return the numbers of its group and parameter. One on a device counts
        only if it is another tensor than at the last step: reading its value would wait for the device.
        """
        for number, place, parameter, gradient in _first_gradients(optimizer):
            if self._is_unused(parameter, gradient):
                return number, place
        return None

    def _is_unused(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        used = self._used.get(id(parameter))
        is_same = used is not None and used[0]() is gradient
        if is_same and used is not None and used[1] == gradient._version:
            return False
        if gradient.layout is not torch.strided or type(gradient) is not torch.Tensor:
            return False
        if gradient.device.type != "cpu":
            return not is_same
        return bool(gradient.any())

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if not self._stepped:
            self._before_first()
        self._stepped.add(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        for _, _, parameter, gradient in _first_gradients(optimizer):
            if not gradient.is_inference():
                self._used[id(parameter)] = weakref.ref(gradient), gradient._version


def _call(method: weakref.WeakMethod[Callable[..., None]], *step: Any) -> None:
    if (bound := method()) is not None:
        bound(*step)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _first_gradients(optimizer: Optimizer) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Yield group number, parameter number, parameter and gradient of each group's first one with a gradient."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if (gradient := parameter.grad) is not None:
                yield number, place, parameter, gradient
                break
