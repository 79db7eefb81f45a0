"""Makes all ranks save the same step after a preemption notice: proposes the step, and follows its checkpoint.

    NOTICE ─► agreeing (step_agreement.py) ── every rank has promised the step ──► APPOINTED ── staged ──► over: logged
                ▲                                                                     │
                └─────────────── declined or failed: propose a later step ────────────┘
    no agreement, or a rank is lost ─► over: logged, and no rank waits for anything

Events in, effects out; no clock, no transport. Runs in the stager, or in rank 0 of a job without a stager.
- All ranks must act at the step or none: a first save agrees on a layout, and waits for all ranks.
- A second notice joins the first while the first is open; the earlier deadline and the more urgent kind apply. A notice
  that arrives within seconds after the step was staged is served by that step: machines that are reclaimed together
  receive their notices at different polls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.notices.messages import Effect, EventLine, StepAnswer
from holdfast.notices.notice import Notice, NoticeKind, SaveInstruction
from holdfast.notices.should_save import Choice, Decision, InFlight, Outlook, StagingTimes, should_save
from holdfast.notices.step_agreement import Margin, ProposalState, StepAgreement
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

_TRIES_MAX = 12  # the margin doubles, so the last tries are thousands of steps ahead
_SAVES_MAX = 6
# Idle ranks and the stager poll their messages every few milliseconds.
_MARGIN = Margin(seconds=0.1, steps_min=1, steps_max=100_000, steps_unmeasured=1)
_JOIN_SECONDS = 10.0  # two polls of a watch
_NO_DEADLINE_SECONDS_MAX = 600.0  # for the ranks to reach the step


class PreemptionCoordinator:
    """State machine whose methods return effects. `now`: monotonic time. `in_flight`: returns checkpoints in flight,
    oldest first. `safe_state`: word for a checkpoint that survives its ranks, such as `staged`. `rebalance_seconds`,
    `rebalance_factor`: how long checkpoints are more frequent after a rebalance, and how much.
    """

    def __init__(
        self,
        ranks: int,
        in_flight: Callable[[], Sequence[InFlight]],
        *,
        answer_seconds_max: float = 10.0,
        safe_state: str = "staged",
        rebalance_seconds: float = 1800.0,
        rebalance_factor: int = 4,
    ) -> None:
        self._in_flight = in_flight
        self._answer_seconds_max = answer_seconds_max
        self._safe_state = safe_state
        self._rebalance_seconds, self._rebalance_factor = rebalance_seconds, rebalance_factor
        self.staging_times = StagingTimes()
        self._agreement = StepAgreement(
            ranks, _MARGIN, tries_max=_TRIES_MAX, answer_seconds_max=answer_seconds_max
        )
        self._notice: Notice | None = None
        self._deadline: float | None = None
        self._notified_rank = ""
        self._decision: Decision | None = None
        self._appointed_at: float | None = None  # None: no appointed step waits for its checkpoint
        self._saving_step: int | None = None  # the step that ranks actually offered
        self._failed_saves = 0
        self._retry_at: float | None = None  # when to ask again after ranks did not answer
        self._staged_step = -1
        self._since_step = -1  # the newest step staged since the notice, appointed or not
        # The last step that was saved for a notice, when it was staged, and the kind of the notice.
        self._served: tuple[int, float, NoticeKind] | None = None
        self._lost_ranks: dict[int, str] = {}

    @property
    def open(self) -> bool:
        return self._agreement.open or self._appointed_at is not None

    # -- messages of ranks ---------------------------------------------------------------------------------------

    def handle(self, rank: int, name: str, frame: Frame, now: float) -> list[Effect]:
        """Handle a rank's NOTICE or AT. `name`: the rank, for people. Raises `ProtocolError`: a field is wrong."""
        if frame.kind is Kind.NOTICE:
            notice = Notice.from_json(wire.json_body(frame))
            return self.on_notice(rank, notice, notice.seconds_left(), name, now)
        return self.on_answer(rank, StepAnswer.from_frame(frame), now)

    def on_notice(
        self, rank: int, notice: Notice, seconds_left: float | None, name: str, now: float
    ) -> list[Effect]:
        """Handle a notice that a rank received. `name`: the rank, for people."""
        deadline = None if seconds_left is None else now + seconds_left
        event_line = EventLine(
            "notice",
            f"{name} was told: {notice.sentence()}",
            {**notice.to_json(), "told_rank": rank, "name": name},
        )
        if self.open:
            assert self._notice is not None
            graver = notice.kind is NoticeKind.TERMINATE and self._notice.kind is NoticeKind.REBALANCE
            earlier = deadline is not None and (self._deadline is None or deadline < self._deadline)
            if graver or earlier:
                kind = NoticeKind.TERMINATE if graver else self._notice.kind
                self._notice, self._notified_rank = replace(notice, rank=rank, kind=kind), name
            if earlier:
                self._deadline = deadline
                self._agreement.ignore_promises()  # the decision was made for another deadline
            return [event_line]
        if self._served is not None:
            step, at, kind = self._served
            if now - at <= _JOIN_SECONDS and notice.kind in {kind, NoticeKind.REBALANCE}:
                served = f"step {step}, {self._safe_state} {now - at:.1f} s ago, serves this notice, too"
                text = f"{event_line.text}; {served}"
                return [replace(event_line, text=text)]
        self._notice, self._notified_rank, self._deadline = replace(notice, rank=rank), name, deadline
        self._failed_saves, self._retry_at, self._since_step = 0, None, -1
        if self._lost_ranks:
            reasons = "; ".join(self._lost_ranks.values())
            return [event_line, *self._give_up(f"no checkpoint can be whole: {reasons}", now)]
        return [event_line, self._agreement.begin(now)]

    def on_answer(self, rank: int, answer: StepAnswer, now: float) -> list[Effect]:
        agreement = self._agreement
        match agreement.add_answer(rank, answer):
            case ProposalState.INCOMPLETE:
                return []
            case ProposalState.PROMISED:
                return self._appoint(now)
            case ProposalState.EXHAUSTED:
                return self._give_up(agreement.exhausted_reason, now)
            case ProposalState.PASSED:
                self._decision = should_save(self._build_outlook(agreement.foremost_step, now))
                return [agreement.propose_later(now, wait_seconds=self._decision.wait_seconds)]

    def on_offered(self, step: int) -> None:
        """Note that a rank has offered or declined `step`. Follow the first such step from the appointed one on."""
        if self._appointed_at is not None and self._saving_step is None and step >= self._agreement.step:
            self._saving_step = step

    def on_staged(self, step: int, nbytes: int, seconds: float, now: float) -> list[Effect]:
        """Note that a checkpoint was staged, `seconds` after its first offer."""
        self.staging_times.add(nbytes, seconds)
        self._staged_step = max(self._staged_step, step)
        if self.open:
            self._since_step = step
        if self._appointed_at is None or self._saving_step is None or step < self._saving_step:
            return []
        left = self._seconds_left(now)
        when = "" if left is None else f", {left:.1f} s before the deadline"
        if left is not None and left < 0:
            when = f", {-left:.1f} s after the deadline"
        event_line = EventLine(
            "emergency_staged",
            f"the checkpoint of step {step}, saved because {self._notified_rank} received a {self._kind_text()} "
            f"notice, is {self._safe_state}{when}",
            {"saved_step": step, "seconds_left": left, "seconds": seconds, "told": self._notified_rank},
        )
        assert self._notice is not None
        self._served = (step, now, self._notice.kind)
        self._appointed_at = None
        return [event_line]

    def on_ended(self, step: int, reason: str, now: float) -> list[Effect]:
        """Note that a checkpoint was declined or has failed."""
        if self._appointed_at is None or step != self._saving_step:
            return []
        self._failed_saves += 1
        if self._lost_ranks or self._failed_saves >= _SAVES_MAX:
            return self._give_up(f"step {step} was not saved: {reason}", now)
        self._appointed_at = None
        return [self._agreement.ask(step, now)]  # no rank can save this step again

    def on_rank_left(self, rank: int, reason: str, now: float) -> list[Effect]:
        """Note that a rank is dead or dropped, or has said BYE."""
        self._lost_ranks[rank] = reason
        if not self.open or (self._appointed_at is not None and self._saving_step is not None):
            return []  # the checkpoint in flight may still be staged
        return self._give_up(f"no checkpoint can be whole: {reason}", now)

    def tick(self, now: float) -> list[Effect]:
        overdue, left = self._agreement.overdue_text(now), self._seconds_left(now)
        if overdue:
            # Ask again later: that rank may still be starting, or be suspended for a while.
            self._retry_at = now + self._answer_seconds_max
            return self._give_up(f"{overdue}; it is stopped or cut off", now)
        if not self.open and self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            may_save = left is not None and left > 0 and not self._lost_ranks
            return [self._agreement.begin(now)] if may_save else []
        if self._appointed_at is None:
            return []
        waited = now - self._appointed_at
        if waited > _NO_DEADLINE_SECONDS_MAX if left is None else left < -self._answer_seconds_max:
            step = self._agreement.step if self._saving_step is None else self._saving_step
            return self._give_up(f"step {step} was not {self._safe_state} by then", now)
        return []

    # -- steps ---------------------------------------------------------------------------------------------------

    def _appoint(self, now: float) -> list[Effect]:
        assert self._notice is not None
        assert self._decision is not None
        decision, take = self._decision, self._decision.choice is Choice.TAKE
        step, tries = self._agreement.step, self._agreement.tries
        factor, until_step = 1, 0
        if self._notice.kind is NoticeKind.REBALANCE and self._rebalance_factor > 1:
            longest = self._agreement.slowest_step_seconds or 0.0
            steps = min(_MARGIN.steps_max, math.ceil(self._rebalance_seconds / max(longest, 1e-3)))
            factor, until_step = self._rebalance_factor, step + steps
        terms = SaveInstruction(take, decision.reason, self._notice, factor, until_step)
        actions = {
            Choice.TAKE: f"step {step} is to be saved, as soon as all ranks have finished it",
            Choice.FINISH: "no new checkpoint is started",
            Choice.SKIP: "nothing can be saved",
        }
        event_line = EventLine(
            "emergency",
            f"because {self._notified_rank} received a {self._kind_text()} notice: "
            f"{actions[decision.choice]} ({decision.reason})",
            {
                "choice": decision.choice.value,
                "at_step": step,
                "reason": decision.reason,
                "seconds_left": self._seconds_left(now),
                "needed_seconds": decision.needed_seconds,
                "tries": tries,
                "told": self._notified_rank,
            },
            is_error=decision.choice is Choice.SKIP,
        )
        self._appointed_at, self._saving_step = (now if take else None), None
        return [self._agreement.appoint(terms.to_json()), event_line]

    def _give_up(self, why: str, now: float) -> list[Effect]:
        self._appointed_at = None
        step = f"step {self._staged_step}" if self._staged_step >= 0 else "nothing"
        kept = f"{step} is {self._safe_state}"
        other = "no further checkpoint" if self._since_step >= 0 else "no checkpoint"
        text = f"{other} was taken after {self._notified_rank} received a {self._kind_text()} notice: {why}; {kept}"
        fields = {"reason": why, "seconds_left": self._seconds_left(now), "told": self._notified_rank}
        event_line = EventLine("emergency_failed", text, fields, is_error=self._since_step < 0)
        # An appointed step stays appointed: if some ranks have saved it, the others must not skip it.
        return [self._agreement.call_off(), event_line] if self._agreement.open else [event_line]

    def _build_outlook(self, next_step: int, now: float) -> Outlook:
        return Outlook(
            seconds_left=self._seconds_left(now),
            staged_seconds=self.staging_times.staged_seconds(),
            in_flight=tuple(self._in_flight()),
            step_seconds=self._agreement.slowest_step_seconds,
            next_step=next_step,
            staged_step=self._staged_step,
            safe_state=self._safe_state,
        )

    def _seconds_left(self, now: float) -> float | None:
        return None if self._deadline is None else self._deadline - now

    def _kind_text(self) -> str:
        assert self._notice is not None
        return "termination" if self._notice.kind is NoticeKind.TERMINATE else "rebalance"
