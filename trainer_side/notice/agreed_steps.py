"""The steps that all ranks have agreed on after a preemption notice, as this rank knows them.

    link's or council's thread    handle(announcement) ─► the answer to a proposal: this rank's next step
    training thread               reach(step) ─► waits at a promised step ─► SaveInstruction, or nothing is due

Without a notice `reach` notes two numbers and returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.notices.messages import Announcement, AnnouncementKind, StepAnswer
from holdfast.notices.notice import Notice, SaveInstruction
from trainer_side.notice.promised_steps import PromisedSteps

_SMOOTHED = 0.25


class AgreedSteps:
    """The agreed steps. Training waits up to `wait_seconds_max` at a promised step, then takes the decider for lost."""

    def __init__(self, *, wait_seconds_max: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.promises: PromisedSteps[SaveInstruction] = PromisedSteps(wait_seconds_max)
        self._reached_at: float | None = None
        self.step_seconds: float | None = None  # smoothed duration of a step; None: not known yet
        self._factor, self._until_step = 1, -1
        # Set when an appointed step is reached, therefore at the same step on every rank.
        self.notice: Notice | None = None

    def on_restored(self, step: int) -> None:
        """Note that training continues after `step`."""
        with self.promises.lock:
            self.promises.last_step, self._reached_at = step, None

    def reach(self, step: int) -> SaveInstruction | None:
        """Note that training has done `step`; return the terms that are due now, if any. Training thread."""
        now = self._clock()
        with self.promises.lock:
            last_step = self.promises.last_step
            if self._reached_at is not None and step > last_step:
                elapsed = (now - self._reached_at) / (step - last_step)
                known = self.step_seconds
                self.step_seconds = elapsed if known is None else known + _SMOOTHED * (elapsed - known)
            due = self.promises.reach(step)
            self._reached_at = None if due else now  # the next step's time would include a save
            if not due:
                return None
            terms = due[-1]
            self.notice = terms.notice
            if terms.factor > 1:
                self._factor, self._until_step = terms.factor, terms.until_step
            return terms

    def current_interval(self, every: int, step: int) -> int:
        """Return the current interval in steps: `every`, or less for a while after a rebalance notice."""
        return max(1, every // self._factor) if every and step <= self._until_step else every

    def handle(self, announcement: Announcement) -> StepAnswer | None:
        """Take a SAVE_AT; return the answer to a proposal. Link's or council's thread. ProtocolError: malformed."""
        is_appointed = announcement.kind is AnnouncementKind.APPOINTED
        terms = SaveInstruction.from_json(announcement.body) if is_appointed else None
        with self.promises.lock:
            self.promises.handle(announcement, terms)
            if announcement.kind is not AnnouncementKind.PROPOSED:
                return None
            return StepAnswer(announcement.number, self.promises.last_step + 1, self.step_seconds)

    def end(self) -> None:
        """Expect no further announcement: the decider is lost, or the job is over. Appointed steps stay. Any thread."""
        with self.promises.lock:
            self.promises.end()
