"""One stretch of undisturbed training in closed form, for many lanes at once; times from the stretch's begin.

    iterations 1…k   save 1  stall  iterations k+1…2k   save 2           save j+1 waits while all N places are taken,
    ├──────────────►│b1────────────├──────────────────►│b2─────►         each for `durable` after its save began

With a = k × iteration + stall, saves come in groups of N, a apart, and groups come max(N × a, durable) apart: that is
what the rule "begin when k iterations are done and a place is free" gives, written without a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.simulate.traces import Integers

__all__ = ["Timeline"]


@dataclass(frozen=True)
class Timeline:
    """Lanes of any one shape.

    Attributes:
        every: Iterations between two saves (k).
        iteration_us, stall_us, durable_us: Of each lane.
        places: How many checkpoints may be under way at once (N).
    """

    every: Integers
    iteration_us: Integers
    stall_us: Integers
    durable_us: Integers
    places: Integers

    @property
    def _work(self) -> Integers:
        return self.every * self.iteration_us

    def begin(self, number: Integers) -> Integers:
        """When save `number`, from 1 on, begins."""
        apart = self._work + self.stall_us
        group = np.maximum(self.places * apart, self.durable_us)
        groups, within = np.divmod(number - 1, self.places)
        begin: Integers = self._work + groups * group + within * apart
        return begin

    def begun(self, time: Integers) -> Integers:
        """How many saves have begun by `time`."""
        apart = self._work + self.stall_us
        group = np.maximum(self.places * apart, self.durable_us)
        since = time - self._work
        groups, rest = np.divmod(np.maximum(since, 0), group)
        within = np.minimum(rest // apart, self.places - 1)
        begun: Integers = np.where(since < 0, 0, groups * self.places + within + 1)
        return begun

    def iterations(self, time: Integers) -> Integers:
        """How many iterations have ended by `time`."""
        saves = self.begun(time)
        after = time - np.where(saves > 0, self.begin(saves) + self.stall_us, 0)
        more = np.clip(after // self.iteration_us, 0, self.every)
        iterations: Integers = saves * self.every + more
        return iterations

    def end_of(self, iteration: Integers) -> Integers:
        """When `iteration`, from 1 on, ends."""
        saves = (iteration - 1) // self.every
        begin = np.where(saves > 0, self.begin(saves) + self.stall_us, 0)
        end: Integers = begin + (iteration - saves * self.every) * self.iteration_us
        return end

    def save_after(self, iteration: Integers) -> Integers:
        """When a save after `iteration`, from 1 on, can begin: a place must be free."""
        saves = (iteration - 1) // self.every
        oldest = saves + 1 - self.places
        free = np.where(oldest > 0, self.begin(np.maximum(oldest, 1)) + self.durable_us, 0)
        after: Integers = np.maximum(self.end_of(iteration), free)
        return after
