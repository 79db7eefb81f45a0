"""The governor: decides when to change the interval, and ignores fluctuations of the measurements.

    Cost of the last checkpoints ─► advise ─► a quarter longer, twice in a row      ─► change
                                              a quarter shorter, three times in a row ─► change
                                              in between                             ─► nothing, and the count restarts

The interval grows sooner than it shrinks: checkpoints that are too frequent slow training at once, those that are too
rare cost something only at a loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.policy.advice import Advice, advice_at, advise
from holdfast.policy.cost import Cost
from holdfast.policy.hazard import Hazard

_LONGER, _SHORTER = 1.25, 0.75  # two measurements that are each wrong by a tenth stay within
_LONGER_TIMES, _SHORTER_TIMES = 2, 3
_ROUNDED_FROM = 8  # steps: from here on, rounding to whole steps does not count as a change
_EVERY_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Change:
    """An interval to change to. `problem`: says that the bound cannot be kept and which can; otherwise empty."""

    advice: Advice
    problem: str = ""

    def describe(self) -> str:
        return f"{self.advice.describe()}; {self.problem}" if self.problem else self.advice.describe()


class Governor:
    """Decides after each checkpoint. The owner may replace the attribute `hazard` at any time.

    `overhead_max`: Largest share of training time that checkpoints may cost, above 0; 0.03 means 3 %.
    `every_seconds_max`: The longest interval to accept, above 0. If no interval up to this one keeps `overhead_max`,
    this one is used, and `Change.problem` says so.
    """

    def __init__(self, hazard: Hazard, *, overhead_max: float, every_seconds_max: float) -> None:
        self.hazard, self._overhead_max, self._every_seconds_max = hazard, overhead_max, every_seconds_max
        self._longer_streak = self._shorter_streak = 0

    def consider(self, cost: Cost, current: int | None) -> Change | None:
        """Return the change to make after one more checkpoint with this cost, if any. `current`: the interval that was
        chosen before; None: no interval was chosen yet.
        """
        change = self._compute_change(cost)
        every = change.advice.every
        if current is not None:
            rounding = 1 if current >= _ROUNDED_FROM else 0
            longer = every >= max(current + 1, _LONGER * current + rounding)
            shorter = every <= min(current - 1, _SHORTER * current - rounding)
            self._longer_streak = self._longer_streak + 1 if longer else 0
            self._shorter_streak = self._shorter_streak + 1 if shorter else 0
            if self._longer_streak < _LONGER_TIMES and self._shorter_streak < _SHORTER_TIMES:
                return None
        self._longer_streak = self._shorter_streak = 0
        return change

    def _compute_change(self, cost: Cost) -> Change:
        every_max = max(1, min(_EVERY_MAX, math.floor(self._every_seconds_max / cost.iteration_seconds)))
        try:
            return Change(advise(cost, self.hazard, overhead_max=self._overhead_max, every_max=every_max))
        except ConfigError as error:
            return Change(advice_at(cost, self.hazard, every_max), str(error))
