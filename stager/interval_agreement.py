"""Changes all ranks' save interval at the same step: rank 0 requests, the stager proposes, every rank answers.

    WISH ─► agreeing (holdfast/notices/step_agreement.py) ── every rank has promised the step ──► from that step on
    a rank refuses, is lost, does not answer, or too many tries ─► called off: the interval stays as it was
    a rank is lost, silent, or does not keep its promise ────────► loose: trainer_side/pace/schedule.py

A change of interval is not urgent. The stager therefore proposes a step far enough ahead that no rank waits for it, and
gives up at any doubt: rank 0 asks again at the next checkpoint. An appointed pace is never called off, only followed
by another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from holdfast.errors import ProtocolError
from holdfast.notices.messages import (
    Announcement,
    AnnouncementKind,
    Effect,
    EventLine,
    StepAnswer,
    apply_effects,
)
from holdfast.notices.step_agreement import Margin, ProposalState, StepAgreement
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.pace import Pace, PaceRequest
from stager.trainers import Trainers

_log = logging.getLogger("holdfast.stager")

_TRIES_MAX = 10
_MARGIN = Margin(seconds=0.5, steps_min=2, steps_max=10_000, steps_unmeasured=8)
_REASON_CHARACTERS = 300


class IntervalAgreement:
    """Pure state machine: events in, effects out. `now`: seconds of a monotonic clock."""

    def __init__(self, ranks: int, *, answer_seconds_max: float = 10.0) -> None:
        self._agreement = StepAgreement(
            ranks, _MARGIN, tries_max=_TRIES_MAX, answer_seconds_max=answer_seconds_max
        )
        self._request = PaceRequest(1, -1, "")  # valid while the agreement is open
        self._pace: Pace | None = None  # the pace that all ranks have promised, by proposal `_appointed`
        self._appointed, self._appointed_step = 0, -1
        self._refusal = ""  # why no interval can be agreed on in this job

    @property
    def open(self) -> bool:
        """Whether ranks may wait for a decision."""
        return self._agreement.open

    def on_request(self, request: PaceRequest, now: float) -> list[Effect]:
        """Rank 0 has computed another interval."""
        if self._refusal or (self._pace is not None and self._pace.every == request.every and not self.open):
            return []  # rank 0 has not reached the appointed step
        self._request = request  # even if a step is proposed already: proposals do not name the interval
        return [] if self.open else [self._agreement.begin(now)]

    def on_answer(self, rank: int, answer: StepAnswer, now: float) -> list[Effect]:
        """A rank has answered a proposal without a refusal."""
        match self._agreement.add_answer(rank, answer):
            case ProposalState.INCOMPLETE:
                return []
            case ProposalState.PROMISED:
                return self._appoint(self._request)
            case ProposalState.EXHAUSTED:
                return self._call_off(self._agreement.exhausted_reason)
            case ProposalState.PASSED:
                # Above the appointed step: a rank that has not reached that one changes its interval twice, in order.
                return [self._agreement.propose_later(now, above=self._appointed_step)]

    def on_refusal(self, rank: int, number: int, reason: str) -> list[Effect]:
        """A rank refuses: its script has set another interval, or the rank could not keep its promise."""
        if self.open and number == self._agreement.number:
            self._refusal = f"rank {rank}: {reason}"
            return self._call_off(f"{self._refusal}; give all ranks of a job the same `every`", loud=True)
        return self.on_doubt(f"rank {rank}: {reason}") if number == self._appointed else []

    def on_doubt(self, reason: str) -> list[Effect]:
        """A rank may not have received the last decision: it is silent, dead or dropped, or has broken its promise."""
        return [*self._give_up(reason), *self._loosen(reason)]

    def on_rank_left(self, reason: str, *, lost: bool) -> list[Effect]:
        self._refusal = self._refusal or reason
        return self.on_doubt(reason) if lost else self._give_up(reason)

    def tick(self, now: float) -> list[Effect]:
        overdue = self._agreement.overdue_text(now)
        return self._call_off(overdue) if overdue else []

    def _appoint(self, request: PaceRequest) -> list[Effect]:
        step, before = self._agreement.step, None if self._pace is None else self._pace.every
        self._pace = Pace(max(step, request.after + request.every), request.every)
        self._appointed, self._appointed_step = self._agreement.number, step
        fields = {
            "at_step": step,
            "first_step": self._pace.first,
            "every": request.every,
            "every_before": before,
            "why": request.why,
        }
        event_line = EventLine("interval", f"from step {step} on {request.why}", fields)
        return [self._agreement.appoint(self._pace.to_json()), event_line]

    def _give_up(self, why: str) -> list[Effect]:
        return self._call_off(why) if self.open else []

    def _call_off(self, why: str, *, loud: bool = False) -> list[Effect]:
        every = self._request.every
        text = f"the interval stays as it is ({every} steps were wanted): {why}"
        event_line = EventLine("interval_kept", text, {"reason": why, "every": every}, is_error=loud)
        return [self._agreement.call_off(), event_line]

    def _loosen(self, why: str) -> list[Effect]:
        """Have every rank with a pace save at powers of two: such intervals share steps even where they differ."""
        if self._pace is None:
            return []
        self._pace = None
        text = f"the ranks may have different intervals ({why}): they continue at powers of two"
        loose = Announcement(AnnouncementKind.LOOSE, self._agreement.step, self._agreement.number)
        return [loose, EventLine("interval_loose", text, {"reason": why})]


class IntervalHandler:
    """Feeds ranks' messages, losses and ticks to the agreement, and sends its effects to ranks, log and events.

    Only for the loop's thread.
    """

    def __init__(
        self,
        trainers: Trainers,
        events: EventLog,
        *,
        attempt: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainers, self._events, self._clock, self._attempt = trainers, events, clock, attempt
        self._agreement = IntervalAgreement(trainers.ranks)

    def handle(self, rank: int, frame: Frame) -> None:
        """Handle WISH or HERE of a rank. Raises `ProtocolError`."""
        if frame.kind is Kind.WISH:
            body = wire.json_body(frame)
            if rank != 0:
                raise ProtocolError(f"WISH from rank {rank}; only rank 0 measures")
            self._apply(self._agreement.on_request(PaceRequest.from_json(body), self._clock()))
            return
        answer = StepAnswer.from_frame(frame)
        refusal = answer.body.get("refusal", "")
        if not isinstance(refusal, str):
            raise ProtocolError(f"HERE: refusal is {refusal!r:.80}, expected a text")
        if refusal:
            self._apply(self._agreement.on_refusal(rank, answer.number, refusal[:_REASON_CHARACTERS]))
        else:
            self._apply(self._agreement.on_answer(rank, answer, self._clock()))

    def on_rank_silent(self, reason: str) -> None:
        self._apply(self._agreement.on_doubt(reason))

    def on_rank_left(self, reason: str, *, lost: bool) -> None:
        self._apply(self._agreement.on_rank_left(reason, lost=lost))

    def tick(self) -> None:
        self._apply(self._agreement.tick(self._clock()))

    def _apply(self, effects: Sequence[Effect]) -> None:
        send_to_all = self._trainers.send_all
        apply_effects(effects, Kind.SAVE_EVERY, send_to_all, self._events, attempt=self._attempt(), log=_log)
