"""At which step this rank acts on a notice: what the stager has proposed, and where training is.

    link's thread      heard(proposed 40) ─► not passed: promised; answer: where we are
                       heard(appointed 40) ─► it holds          heard(called off) ─► forgotten
    training thread    reach(39) ─► None      reach(40) ─► waits until it holds, or is called off ─► Terms

A rank that has promised a step waits there for the stager's word, which is mostly there long before. What is appointed
holds whatever is proposed after it: another rank may have come there before, and declined it. Without a notice `reach`
notes two numbers and returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.notices.decider import Word
from holdfast.notices.notice import Notice, Terms
from holdfast.notices.sparing import NOBODY, Ability

_SMOOTHED = 0.25


class Answer(NamedTuple):
    """What is said to a proposal."""

    next_step: int
    step_seconds: float | None


class _Promise(NamedTuple):
    """Not to go past `step` without the stager's word. `number`: of the proposal."""

    step: int
    number: int


class Appointments:
    """See the module.

    Args:
        wait_seconds_max: How long a promised step is waited for; the stager is lost then.
        clock: Seconds that only go forward.

    Attributes:
        notice: What was said; set when the appointed step is reached, and so at the same step on every rank.
        sparing: Who is spared now; likewise.
        ability: What the stager is told of this rank. Replaced by the training thread.
    """

    def __init__(self, *, wait_seconds_max: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._wait_seconds_max, self._clock = wait_seconds_max, clock
        self._changed = threading.Condition()
        self._promise: _Promise | None = None
        self._held: list[tuple[int, Terms]] = []  # what is appointed: at the first step that is not below
        self._last_step = -1
        self._reached_at: float | None = None
        self._step_seconds: float | None = None
        self._factor, self._until_step = 1, -1
        self.notice: Notice | None = None
        self.sparing, self.ability = NOBODY, Ability()

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes; None: not known yet. Any thread."""
        return self._step_seconds

    def restored(self, step: int) -> None:
        """Training goes on after `step`."""
        with self._changed:
            self._last_step, self._reached_at = step, None

    def reach(self, step: int) -> Terms | None:
        """Training has done `step`; what is due now, if anything is. Training thread."""
        now = self._clock()
        with self._changed:
            if self._reached_at is not None and step > self._last_step:
                took = (now - self._reached_at) / (step - self._last_step)
                known = self._step_seconds
                self._step_seconds = took if known is None else known + _SMOOTHED * (took - known)
            self._last_step = max(self._last_step, step)
            terms = self._take(step) if self._promise is not None or self._held else None
            self._reached_at = now if terms is None else None  # a save is not a step's time
            return terms

    def every(self, every: int, step: int) -> int:
        """How many steps are between two checkpoints now: `every`, or fewer for a while after a rebalance."""
        return max(1, every // self._factor) if every and step <= self._until_step else every

    def heard(self, word: Word, step: int, number: int, body: Mapping[str, Any]) -> Answer | None:
        """The stager has said something of `step`. Link's thread.

        Returns:
            What to answer; None: nothing.

        Raises:
            ProtocolError: The body does not hold what it should.
        """
        if word is Word.APPOINTED:
            self._hold(step, number, body)
            return None
        with self._changed:
            if word is Word.PROPOSED:
                passed = step <= self._last_step
                self._promise = None if passed else _Promise(step, number)
            elif self._promise is not None and self._promise.number == number:
                self._promise = None
            self._changed.notify_all()
            return Answer(self._last_step + 1, self._step_seconds) if word is Word.PROPOSED else None

    def end(self) -> None:
        """Nothing more is heard: the stager is lost, or the job is over. What is appointed stays so. Any thread."""
        with self._changed:
            self._promise = None
            self._changed.notify_all()

    def _hold(self, step: int, number: int, body: Mapping[str, Any]) -> None:
        terms = Terms.from_json(body)
        with self._changed:
            if self._promise == (step, number):
                self._promise = None
                self._held.append((step, terms))
                self._changed.notify_all()
            else:  # this rank has given it up; the layout of later steps must be that of the others all the same
                self.sparing = terms.sparing

    def _take(self, step: int) -> Terms | None:
        """What is appointed for this step, once the promise is kept or withdrawn. The lock is held."""
        deadline = time.monotonic() + self._wait_seconds_max
        while self._promise is not None and step >= self._promise.step:
            left = deadline - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                self._promise = None
        due = [terms for at, terms in self._held if step >= at]
        if not due:
            return None
        self._held = [(at, terms) for at, terms in self._held if step < at]
        terms = due[-1]
        self.notice, self.sparing = terms.notice, terms.sparing
        if terms.factor > 1:
            self._factor, self._until_step = terms.factor, terms.until_step
        return terms
