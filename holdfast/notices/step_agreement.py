"""Lets all ranks act at the same step without a collective operation: the side of the process that decides.

    ask: where is every rank? ─► propose a step ── no rank has passed the step ──► appoint the step
                                  ▲     └─ a rank has passed it: propose a later one ─┐
                                  └───────────────────────────────────────────────────┘
    a rank does not answer, or the ranks have passed too many steps ─► call off, and no rank waits for anything

A rank promises a step by answering that it has not passed the step; it then waits at that step for the decider's answer
(trainer_side/notice/promised_steps.py is the ranks' side). Therefore either all ranks act at a step, or no rank does. A
rank's link answers, not its training: an answer takes milliseconds, and `answer_seconds_max` is for processes that are
stopped.

Two users: a preemption notice (preemption.py) and the interval (stager/interval_agreement.py). They say what the agreed
step means, and when an agreement begins or is given up. No clock, no transport: answers in, announcements out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.notices.messages import Announcement, StepAnswer, StepWord


@dataclass(frozen=True, slots=True)
class Margin:
    """How many steps ahead of the foremost rank a step is proposed, so that no rank passes it before it hears of it."""

    seconds: float  # time ahead, turned into steps of the quickest rank; doubled at each try
    steps_min: int  # steps_min, steps_max: bounds of the result
    steps_max: int
    steps_unmeasured: int  # steps ahead while no rank knows how long its steps take; doubled at each try

    def steps(self, quickest_seconds: float, doubled: int, wait_seconds: float) -> int:
        """Steps ahead. `wait_seconds` is added to the margin, and not doubled."""
        if quickest_seconds <= 0:
            return min(self.steps_max, self.steps_unmeasured << doubled)
        wanted = (self.seconds * (1 << doubled) + wait_seconds) / quickest_seconds
        return max(self.steps_min, math.ceil(min(self.steps_max, wanted)))


class Answers(Enum):
    """The ranks' answers to a proposal, together."""

    INCOMPLETE = "incomplete"
    PROMISED = "promised"  # by every rank
    PASSED = "passed"  # by a rank, or it was only asked where the ranks are: propose a later step
    EXHAUSTED = "exhausted"  # passed, and no further step may be proposed


class StepAgreement:
    """`now`: time of a clock that only goes forward. `margin`: how far ahead steps are proposed. `tries_max`: most
    proposals, the first question included. `open`: ranks may be waiting. `step`, `number`, `tries`: of the last
    proposal.
    """

    def __init__(self, ranks: int, margin: Margin, *, tries_max: int, answer_seconds_max: float) -> None:
        self._ranks, self._margin = ranks, margin
        self._tries_max, self._answer_seconds_max = tries_max, answer_seconds_max
        self.open = False
        self.step = self.number = self.tries = 0
        self._only_asks = False  # promises count for nothing: no decision stands behind the proposal
        self._asked_at = 0.0
        self._next_steps: dict[int, int] = {}
        self._step_seconds: dict[int, float] = {}

    def begin(self, now: float) -> Announcement:
        """Ask where every rank is, with step 0: a rank that has trained cannot promise it, so no rank waits."""
        self.tries = 0
        return self.ask(0, now)

    def ask(self, step: int, now: float) -> Announcement:
        """Ask as `begin` does, with a step that ranks are known to have reached; the tries go on counting."""
        self._only_asks = True
        return self._propose(step, now)

    def decide_again(self) -> None:
        """The reason for the proposal has changed: its answers now only tell the ranks' next steps."""
        self._only_asks = True

    def answered(self, rank: int, answer: StepAnswer) -> Answers:
        """Take a rank's answer; answers to other proposals than the open one are left out."""
        if not self.open or answer.number != self.number:
            return Answers.INCOMPLETE
        self._next_steps[rank] = answer.next_step
        if answer.step_seconds is not None:
            self._step_seconds[rank] = answer.step_seconds
        if len(self._next_steps) < self._ranks:
            return Answers.INCOMPLETE
        if self.foremost <= self.step and not self._only_asks:
            return Answers.PROMISED
        return Answers.PASSED if self.tries < self._tries_max else Answers.EXHAUSTED

    def propose_later(self, now: float, *, wait_seconds: float = 0.0, above: int = -1) -> Announcement:
        """Propose a step ahead of all ranks, `wait_seconds` further and above `above`."""
        quickest = min(self._step_seconds.values(), default=0.0)
        doubled = 0 if self._only_asks else self.tries - 1
        self._only_asks = False
        margin = self._margin.steps(quickest, doubled, wait_seconds)
        return self._propose(max(self.foremost + margin, above + 1), now)

    def appoint(self, body: Mapping[str, Any]) -> Announcement:
        """Appoint the proposed step, which every rank has promised; later proposals do not change it."""
        self.open = False
        return Announcement(StepWord.APPOINTED, self.step, self.number, body)

    def call_off(self) -> Announcement:
        self.open = False
        return Announcement(StepWord.CALLED_OFF, self.step, self.number)

    def overdue(self, now: float) -> str:
        """A sentence on the ranks that have not answered in time; empty if there are none."""
        if not self.open or now - self._asked_at <= self._answer_seconds_max:
            return ""
        missing = ", ".join(str(rank) for rank in range(self._ranks) if rank not in self._next_steps)
        return f"rank {missing} did not answer within {self._answer_seconds_max:g} s"

    @property
    def exhausted(self) -> str:
        """A sentence on why no further step is proposed."""
        return f"the ranks had passed each of {self.tries} steps that were proposed"

    @property
    def foremost(self) -> int:
        """The first step that no rank had passed when it answered."""
        return max(self._next_steps.values())

    @property
    def slowest_step_seconds(self) -> float | None:
        """Time of a step on the slowest rank; None: no rank has stated one."""
        return max(self._step_seconds.values(), default=None)

    def _propose(self, step: int, now: float) -> Announcement:
        self.open = True
        self.number += 1
        self.tries += 1
        self.step, self._asked_at, self._next_steps = step, now, {}
        return Announcement(StepWord.PROPOSED, step, self.number)
