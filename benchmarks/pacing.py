"""A training run whose interval the checkpointer chooses (`every="auto"`), or that has a fixed one, or saves never.

Each iteration: compute ─► ranks meet ─► optimizer step ─► step() or save()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.workload import Workload
from holdfast import Checkpointer

__all__ = ["AUTO", "NEVER", "Paced", "pace"]

AUTO, NEVER = -1, 0
_POLL_SECONDS = 0.01
_DONE_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Paced:
    """A run as one rank saw it: seconds of each iteration, and the iterations that saved."""

    iteration_seconds: list[float]
    saved: list[int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pace(
    checkpointer: Checkpointer,
    workload: Workload,
    *,
    first_step: int,
    iterations: int,
    every: int,
    compute: Callable[[], None],
    meet: Callable[[], None],
) -> Paced:
    """Train, and wait until the last checkpoint is durable.

    Args:
        every: `AUTO`, `NEVER`, or a number of iterations.

    Raises:
        TimeoutError: The last checkpoint was not durable within five minutes.
    """
    meet()
    seconds, saved = [], []
    before = time.monotonic()
    for step in range(first_step, first_step + iterations):
        compute()
        meet()
        workload.update()
        if every == AUTO:
            taken = checkpointer.step(step)
        else:
            taken = bool(every and (step - first_step) % every == 0) and checkpointer.save(step)
        if taken:
            saved.append(step)
        now = time.monotonic()
        seconds.append(now - before)
        before = now
    while saved and checkpointer.durable_step < saved[-1]:
        if time.monotonic() - before > _DONE_SECONDS_MAX:
            raise TimeoutError(f"step {saved[-1]} was not durable after {_DONE_SECONDS_MAX:.0f} s")
        time.sleep(_POLL_SECONDS)
    return Paced(seconds, saved)
