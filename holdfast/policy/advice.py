"""Advice: an interval with its reason, in one line.

`every 41 steps: 0.9 % stall, expected loss 38 s or $0.12 per preemption`
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.policy.cost import Cost
from holdfast.policy.hazard import Hazard
from holdfast.policy.interval import best_interval, least_interval

_OVERHEAD_MAX = 0.03  # the target of PCcheck and CheckFreq
_EVERY_MAX = 1_000_000
_HOUR_SECONDS = 3600.0
_TENTHS_BELOW_SECONDS = 10.0  # in the line: `3.4 s`, `38 s`


@dataclass(frozen=True, slots=True)
class Advice:
    """An interval with its reasons."""

    every: int
    overhead: float  # share of training time that checkpoints cost without interruptions; 0.03 means 3 %
    # Time whose work an interruption destroys, on average: half a cycle, plus the time until a checkpoint is safe.
    # Restart and restore are not included: they do not depend on the interval.
    lost_seconds: float
    lost_dollars: float | None  # price of that time; None: no price is known

    def describe(self) -> str:
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        loss = f"{self.lost_seconds:.{0 if self.lost_seconds >= _TENTHS_BELOW_SECONDS else 1}f} s"
        if self.lost_dollars is not None:
            loss += f" or ${self.lost_dollars:.2f}"
        return f"{steps}: {100 * self.overhead:.1f} % stall, expected loss {loss} per preemption"


def advise(
    cost: Cost, hazard: Hazard, *, overhead_max: float = _OVERHEAD_MAX, every_max: int = _EVERY_MAX
) -> Advice:
    """Return the interval with the smallest expected loss within the bound; without known losses, the shortest within
    it. `overhead_max`: the bound, as a share of training time; 0.03 means 3 %. ConfigError: it cannot be kept; says
    which bound can.
    """
    every = least_interval(cost, overhead_max, every_max=every_max)
    if hazard.per_hour > 0:
        mtbf_seconds = _HOUR_SECONDS / hazard.per_hour
        every = best_interval(cost, mtbf_seconds, at_least=every, every_max=every_max)
    return advice_at(cost, hazard, every)


def advice_at(cost: Cost, hazard: Hazard, every: int) -> Advice:
    """Return the reasons for a given interval."""
    lost_seconds = cost.cycle_seconds(every) / 2 + cost.staged_seconds
    price = hazard.dollars_per_hour
    lost_dollars = None if price is None else lost_seconds * price / _HOUR_SECONDS
    return Advice(every, cost.overhead(every), lost_seconds, lost_dollars)
