"""One stretch of undisturbed training in closed form, for many lanes at once; times count from its start.

    iterations 1…k   save 1  stall  iterations k+1…2k   save 2           save j+1 waits while all N places are taken,
    ├──────────────►│b1────────────├──────────────────►│b2─────►         each for `durable` after its save began

With a = k × iteration + stall, saves come in groups of N, a apart, and groups come max(N × a, durable) apart. This is
the rule "begin when k iterations are done and a place is free", written without a loop.
"""

from __future__ import annotations

import numpy as np

from operator_side.simulate.traces import Integers


class Timeline:
    """Stretches of training, one for each lane of an array; `places`: how many checkpoints may be in flight (N)."""

    def __init__(
        self,
        every: Integers,
        iteration_us: Integers,
        stall_us: Integers,
        durable_us: Integers,
        places: Integers,
    ) -> None:
        self._every, self._iteration, self._stall, self._durable = every, iteration_us, stall_us, durable_us
        self._places = places
        self._work: Integers = every * iteration_us
        self._apart: Integers = self._work + stall_us
        self._group: Integers = np.maximum(places * self._apart, durable_us)

    def save_begin(self, number: Integers) -> Integers:
        """Return when save `number` begins, counted from 1; other numbers give no meaningful result."""
        groups = (number - 1) // self._places
        within = number - 1 - groups * self._places
        begin: Integers = self._work + groups * self._group + within * self._apart
        return begin

    def saves_begun(self, time: Integers) -> Integers:
        """Return how many saves have begun by `time`."""
        since = time - self._work
        groups = since // self._group
        within = np.minimum((since - groups * self._group) // self._apart, self._places - 1)
        begun: Integers = np.where(since < 0, 0, groups * self._places + within + 1)
        return begun

    def iterations(self, time: Integers) -> Integers:
        """Return how many iterations have ended by `time`; 0 before the start."""
        saves = self.saves_begun(time)
        after = time - np.where(saves > 0, self.save_begin(saves) + self._stall, 0)
        more = np.minimum(np.maximum(after // self._iteration, 0), self._every)
        iterations: Integers = saves * self._every + more
        return iterations

    def iteration_end(self, iteration: Integers) -> Integers:
        """Return when `iteration`, counted from 1, ends."""
        saves = (iteration - 1) // self._every
        begin = np.where(saves > 0, self.save_begin(saves) + self._stall, 0)
        end: Integers = begin + (iteration - saves * self._every) * self._iteration
        return end

    def save_after(self, iteration: Integers) -> Integers:
        """Return when a save after `iteration`, counted from 1, can begin: fewer than N must be in flight."""
        oldest = (iteration - 1) // self._every + 1 - self._places
        free = np.where(oldest > 0, self.save_begin(oldest) + self._durable, 0)
        after: Integers = np.maximum(self.iteration_end(iteration), free)
        return after
