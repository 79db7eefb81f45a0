"""The times of the optimizers' steps, measured where the gate sees them: between a hook before and one after each.

Only until the first checkpoint is due: from then on the gate has its hooks to itself. On a device it is the time that
the calls take, not the kernels: that is also what the gate holds back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_side.opaque import only_shapes, opaque


class Updates:
    """Sums the steps of all optimizers. Training thread.

    Args:
        optimizers: Those whose steps are timed; one whose class never calls `Optimizer.__init__` has no hooks.
        clock: Seconds that only go forward.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._seconds = 0.0
        self._hooks: list[RemovableHandle] = []
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_post_hooks"):
                continue
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after))

    def take(self) -> float:
        """The seconds since the last call; 0 if no optimizer has stepped."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def remove(self) -> None:
        """Take the hooks off the optimizers. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @opaque
    def _before(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if not only_shapes():
            self._begun[id(optimizer)] = self._clock()

    @opaque
    def _after(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        begun = self._begun.pop(id(optimizer), None)
        if begun is not None:
            self._seconds += self._clock() - begun
