"""Lets all ranks act at the same step without a collective operation: the deciding process's side.

    ask: where is every rank? ─► propose a step ── no rank has passed the step ──► appoint the step
                                  ▲     └─ a rank has passed it: propose a later one ─┐
                                  └───────────────────────────────────────────────────┘
    a rank does not answer, or the ranks have passed too many steps ─► call off, and no rank waits for anything

A rank promises a step by answering that it has not passed the step; it then waits at that step for the decider's answer
(trainer_side/notice/promised_steps.py is the ranks' side). Therefore either all ranks act at a step, or no rank does. A
rank's link thread answers, not its training thread, so an answer takes milliseconds; `answer_seconds_max` is for
suspended processes.

Two users, a preemption notice (preemption.py) and the interval (stager/interval_agreement.py), decide what the agreed
step means, and when to start or cancel an agreement. No clock, no transport: answers in, announcements out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.notices.messages import Announcement, AnnouncementKind, StepAnswer


@dataclass(frozen=True, slots=True)
class Margin:
    """Distance of a proposed step from the foremost rank, so that the proposal reaches all ranks before that step."""

    seconds: float  # time ahead, converted into steps of the fastest rank; doubled at each try
    steps_min: int  # steps_min, steps_max: bounds of the result
    steps_max: int
    steps_unmeasured: int  # steps ahead while no rank knows the time of its steps; doubled at each try

    def steps(self, quickest_seconds: float, doubled: int, wait_seconds: float) -> int:
        """Return the number of steps ahead. `wait_seconds`: added to the margin, not doubled."""
        if quickest_seconds <= 0:
            return min(self.steps_max, self.steps_unmeasured << doubled)
        wanted = (self.seconds * (1 << doubled) + wait_seconds) / quickest_seconds
        return max(self.steps_min, math.ceil(min(self.steps_max, wanted)))


class ProposalState(Enum):
    """The ranks' answers to a proposal, together."""

    INCOMPLETE = "incomplete"
    PROMISED = "promised"  # by every rank
    PASSED = "passed"  # by a rank, or this was only a question for the ranks' steps: propose a later step
    EXHAUSTED = "exhausted"  # passed, and no tries are left


class StepAgreement:
    """State of one agreement. `now`: monotonic time. `margin`: how far ahead to propose steps. `tries_max`: number of
    proposals, the first question included. `open`: ranks may be waiting. `step`, `number`, `tries`: of the last
    proposal.
    """

    def __init__(self, ranks: int, margin: Margin, *, tries_max: int, answer_seconds_max: float) -> None:
        self._ranks, self._margin = ranks, margin
        self._tries_max, self._answer_seconds_max = tries_max, answer_seconds_max
        self.open = False
        self.step = self.number = self.tries = 0
        self._is_query = False  # ignore promises: the proposal only asks for the ranks' next steps
        self._asked_at = 0.0
        self._next_steps: dict[int, int] = {}
        self._step_seconds: dict[int, float] = {}

    def begin(self, now: float) -> Announcement:
        """Ask every rank for its next step, by proposing step 0: no rank that has trained can promise it and wait."""
        self.tries = 0
        return self.ask(0, now)

    def ask(self, step: int, now: float) -> Announcement:
        """Ask like `begin`, with a step that ranks are known to have reached, and keep counting tries."""
        self._is_query = True
        return self._propose(step, now)

    def ignore_promises(self) -> None:
        """Use the answers to the open proposal only to learn the ranks' next steps: its reason has changed."""
        self._is_query = True

    def add_answer(self, rank: int, answer: StepAnswer) -> ProposalState:
        """Add a rank's answer, unless it is for another proposal than the open one."""
        if not self.open or answer.number != self.number:
            return ProposalState.INCOMPLETE
        self._next_steps[rank] = answer.next_step
        if answer.step_seconds is not None:
            self._step_seconds[rank] = answer.step_seconds
        if len(self._next_steps) < self._ranks:
            return ProposalState.INCOMPLETE
        if self.foremost_step <= self.step and not self._is_query:
            return ProposalState.PROMISED
        return ProposalState.PASSED if self.tries < self._tries_max else ProposalState.EXHAUSTED

    def propose_later(self, now: float, *, wait_seconds: float = 0.0, above: int = -1) -> Announcement:
        """Propose a step ahead of all ranks, at least `wait_seconds` later, and after step `above`."""
        fastest_seconds = min(self._step_seconds.values(), default=0.0)
        doubled = 0 if self._is_query else self.tries - 1
        self._is_query = False
        margin = self._margin.steps(fastest_seconds, doubled, wait_seconds)
        return self._propose(max(self.foremost_step + margin, above + 1), now)

    def appoint(self, body: Mapping[str, Any]) -> Announcement:
        """Appoint the proposed step, which every rank has promised; later proposals do not change it."""
        self.open = False
        return Announcement(AnnouncementKind.APPOINTED, self.step, self.number, body)

    def call_off(self) -> Announcement:
        self.open = False
        return Announcement(AnnouncementKind.CALLED_OFF, self.step, self.number)

    def overdue_text(self, now: float) -> str:
        """Return a sentence about the ranks that have not answered in time; empty if all have."""
        if not self.open or now - self._asked_at <= self._answer_seconds_max:
            return ""
        missing = ", ".join(str(rank) for rank in range(self._ranks) if rank not in self._next_steps)
        return f"rank {missing} did not answer within {self._answer_seconds_max:g} s"

    @property
    def exhausted_reason(self) -> str:
        """The reason for proposing no further step, as a sentence."""
        return f"the ranks had passed each of {self.tries} steps that were proposed"

    @property
    def foremost_step(self) -> int:
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
        return Announcement(AnnouncementKind.PROPOSED, step, self.number)
