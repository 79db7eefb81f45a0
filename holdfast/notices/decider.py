"""How all ranks come to save one step after a notice, without a collective: the stager proposes, every rank answers.

    NOTICE ─► PROPOSING ── every rank is before the step ──► APPOINTED ── staged ─────────► over: said
                ▲  └─ a rank has passed it: a later one ─┐       │
                └────────────────────────────────────────┘       └─ declined, failed: planned anew, a later step
    a rank does not answer, is lost, or too many tries ─► over: said, and no rank waits for anything

Events in, actions out; no clock, no MPI. Rules:
1. A rank promises a step by answering that it has not passed it; it then waits at that step for the stager's word, and
   so either all ranks act at the step or none. That matters: a first save agrees on a layout, and waits for all.
2. A proposal is answered by the rank's link, not by its training: it takes milliseconds, and `answer_seconds_max` is
   for processes that are stopped.
3. The first proposal is step 0, which only ranks that have not begun can promise: it asks where everybody is.
4. A second notice joins the first while that one is open; the earlier deadline and the graver kind hold. For some
   seconds after, the step that was staged is that of the second one, too: machines that are taken at the same time
   hear of it at different looks of their watches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from holdfast.notices.notice import Notice, NoticeKind, Terms
from holdfast.notices.sparing import Spares
from holdfast.notices.worth import Choice, Decision, InFlight, Measures, Outlook, decide

_TRIES_MAX = 12  # the margin doubles, so the last ones are thousands of steps ahead
_SAVES_MAX = 6
_MARGIN_SECONDS = 0.1  # ranks and stager look at their messages every few milliseconds when nothing goes on
_MARGIN_STEPS_MAX = 100_000
_JOIN_SECONDS = 10.0  # two looks of a watch
_NO_DEADLINE_SECONDS_MAX = 600.0  # for the ranks to come to the step


class Word(Enum):
    """What SAVE_AT says about its step; the value travels in `flags`."""

    PROPOSED = 0
    APPOINTED = 1
    CALLED_OFF = 2


@dataclass(frozen=True, slots=True)
class Appoint:
    """Send SAVE_AT to every rank. `body`: see docs/wire.md."""

    word: Word
    step: int
    number: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Said:
    """Log it, and write the event. `loud`: something was not saved."""

    event: str
    text: str
    fields: Mapping[str, Any]
    loud: bool = False


Call = Appoint | Said


class _Phase(Enum):
    IDLE = "idle"
    PROPOSING = "proposing"
    APPOINTED = "appointed"


class Emergency:
    """See the module. Every method takes `now`, seconds of a clock that only goes forward, and gives what to do.

    Args:
        ranks: Training ranks.
        in_flight: What is on its way to the stager, oldest first; asked for at each decision.
        answer_seconds_max: How long a rank's answer is waited for.
        safe: What a checkpoint is once it outlives its ranks, for people.
        rebalance_seconds: For how long the interval is shorter after a rebalance. `rebalance_factor`: how much.

    Attributes:
        spares: Told by whoever hears notices and answers; without that nobody is spared.
    """

    def __init__(
        self,
        ranks: int,
        in_flight: Callable[[], Sequence[InFlight]],
        *,
        answer_seconds_max: float = 10.0,
        safe: str = "staged",
        rebalance_seconds: float = 1800.0,
        rebalance_factor: int = 4,
    ) -> None:
        self._ranks, self._in_flight = ranks, in_flight
        self._answer_seconds_max, self._safe = answer_seconds_max, safe
        self._rebalance_seconds, self._rebalance_factor = rebalance_seconds, rebalance_factor
        self.measures, self.spares = Measures(), Spares(ranks)
        self._phase = _Phase.IDLE
        self._notice: Notice | None = None
        self._deadline: float | None = None
        self._name = ""
        self._number = self._tries = self._saves = self._step = 0
        self._saving: int | None = None  # the step that was really offered
        self._asked_at = self._appointed_at = 0.0
        self._again_at: float | None = None  # when ranks that have not answered are asked again
        self._answers: dict[int, int] = {}
        self._step_seconds: dict[int, float] = {}
        self._staged_step = -1
        # The last step that was saved for a notice, when it was staged, and of which kind the notice was.
        self._served: tuple[int, float, NoticeKind] | None = None
        self._lost: dict[int, str] = {}
        self._decision: Decision | None = None

    @property
    def open(self) -> bool:
        """Whether a notice is being dealt with."""
        return self._phase is not _Phase.IDLE

    # -- what happens --------------------------------------------------------------------------------------------

    def noticed(
        self, rank: int, notice: Notice, seconds_left: float | None, name: str, now: float
    ) -> list[Call]:
        """A rank was told. `name`: who it is, for people."""
        deadline = None if seconds_left is None else now + seconds_left
        said = Said(
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
                self._notice, self._name = replace(notice, rank=rank, kind=kind), name
            if earlier:
                self._deadline = deadline
                if self._phase is _Phase.PROPOSING:
                    self._decision = None  # it was made for another deadline
            return [said]
        if self._served is not None:
            step, at, kind = self._served
            if now - at <= _JOIN_SECONDS and notice.kind in {kind, NoticeKind.REBALANCE}:
                text = f"{said.text}; step {step}, {self._safe} {now - at:.1f} s ago, is that of this notice, too"
                return [replace(said, text=text)]
        self._notice, self._name, self._deadline = replace(notice, rank=rank), name, deadline
        self._tries = self._saves = 0
        self._decision = self._again_at = None
        if self._lost:
            return [said, *self._over(f"no checkpoint can be whole: {'; '.join(self._lost.values())}", now)]
        return [said, self._propose(0, now)]

    def at(
        self, rank: int, number: int, next_step: int, step_seconds: float | None, now: float
    ) -> list[Call]:
        """A rank has answered proposal `number`: the step after its last one, and how long steps take."""
        if self._phase is not _Phase.PROPOSING or number != self._number:
            return []  # it was called off meanwhile
        self._answers[rank] = next_step
        if step_seconds is not None:
            self._step_seconds[rank] = step_seconds
        if len(self._answers) < self._ranks:
            return []
        newest = max(self._answers.values())
        if newest <= self._step and self._decision is not None:
            return self._appoint(now)
        if self._tries >= _TRIES_MAX:
            return self._over(f"the ranks had passed each of {self._tries} steps that were proposed", now)
        first = self._decision is None
        self._decision = decide(self._outlook(newest, now))
        margin = self._margin(self._decision.wait_seconds, 0 if first else self._tries - 1)
        return [self._propose(newest + margin, now)]

    def offered(self, step: int) -> None:
        """A rank has offered or declined `step`: the first one not below the appointed step is what was meant."""
        if self._phase is _Phase.APPOINTED and self._saving is None and step >= self._step:
            self._saving = step

    def staged(self, step: int, nbytes: int, seconds: float, now: float) -> list[Call]:
        """A checkpoint is staged, so long after its first offer."""
        self.measures.staged(nbytes, seconds)
        self._staged_step = max(self._staged_step, step)
        if self._phase is not _Phase.APPOINTED or self._saving is None or step < self._saving:
            return []
        left = self._left(now)
        when = "" if left is None else f", {left:.1f} s before the deadline"
        if left is not None and left < 0:
            when = f", {-left:.1f} s after the deadline"
        said = Said(
            "emergency_staged",
            f"the checkpoint of step {step}, saved because {self._name} was told of {self._kind()}, "
            f"is {self._safe}{when}",
            {"saved_step": step, "seconds_left": left, "seconds": seconds, "told": self._name},
        )
        assert self._notice is not None
        self._served = (step, now, self._notice.kind)
        self._phase = _Phase.IDLE
        return [said]

    def ended(self, step: int, reason: str, now: float) -> list[Call]:
        """A checkpoint was declined or has failed."""
        if self._phase is not _Phase.APPOINTED or step != self._saving:
            return []
        self._saves += 1
        if self._lost or self._saves >= _SAVES_MAX:
            return self._over(f"step {step} was not saved: {reason}", now)
        self._decision = None
        return [self._propose(step, now)]  # nobody can save it any more: it asks where they are

    def rank_left(self, rank: int, reason: str, now: float) -> list[Call]:
        """A rank is dead, dropped, or has said good-bye."""
        self._lost[rank] = reason
        if self._phase is not _Phase.PROPOSING and not (
            self._phase is _Phase.APPOINTED and self._saving is None
        ):
            return []  # what is under way may still become staged
        return self._over(f"no checkpoint can be whole: {reason}", now)

    def tick(self, now: float) -> list[Call]:
        """Time has passed."""
        if self._phase is _Phase.PROPOSING and now - self._asked_at > self._answer_seconds_max:
            missing = ", ".join(str(rank) for rank in range(self._ranks) if rank not in self._answers)
            # It may be starting still, or be stopped for a while.
            self._again_at = now + self._answer_seconds_max
            return self._over(
                f"rank {missing} did not answer within {self._answer_seconds_max:g} s; it is stopped or cut off",
                now,
            )
        if self._phase is _Phase.IDLE and self._again_at is not None and now >= self._again_at:
            self._again_at = None
            left = self._left(now)
            if left is not None and left > 0 and not self._lost:
                self._tries, self._decision = 0, None
                return [self._propose(0, now)]
        if self._phase is _Phase.APPOINTED:
            left = self._left(now)
            waited = now - self._appointed_at
            if (left is not None and left < -self._answer_seconds_max) or (
                left is None and waited > _NO_DEADLINE_SECONDS_MAX
            ):
                return self._over(
                    f"step {self._saving if self._saving is not None else self._step} was not {self._safe} by then",
                    now,
                )
        return []

    # -- steps ---------------------------------------------------------------------------------------------------

    def _propose(self, step: int, now: float) -> Appoint:
        self._phase = _Phase.PROPOSING
        self._number += 1
        self._tries += 1
        self._step, self._asked_at = step, now
        self._answers = {}
        self._saving = None
        return Appoint(Word.PROPOSED, step, self._number)

    def _appoint(self, now: float) -> list[Call]:
        assert self._notice is not None
        assert self._decision is not None
        decision, take = self._decision, self._decision.choice is Choice.TAKE
        factor, until_step = 1, 0
        if self._notice.kind is NoticeKind.REBALANCE and self._rebalance_factor > 1:
            longest = max(self._step_seconds.values(), default=0.0)
            steps = min(_MARGIN_STEPS_MAX, math.ceil(self._rebalance_seconds / max(longest, 1e-3)))
            factor, until_step = self._rebalance_factor, self._step + steps
        if take and self._notice.kind is NoticeKind.TERMINATE:
            self._spare(now)
        sparing = self.spares.in_force
        terms = Terms(take, decision.reason, self._notice, factor, until_step, sparing)
        appoint = Appoint(Word.APPOINTED, self._step, self._number, terms.to_json())
        does = {
            Choice.TAKE: f"step {self._step} is saved",
            Choice.FINISH: "no new checkpoint is begun",
            Choice.SKIP: "nothing can be saved",
        }
        said = Said(
            "emergency",
            f"because {self._name} was told of {self._kind()}: {does[decision.choice]} ({decision.reason})",
            {
                "choice": decision.choice.value,
                "at_step": self._step,
                "reason": decision.reason,
                "seconds_left": self._left(now),
                "needed_seconds": decision.needed_seconds,
                "tries": self._tries,
                "told": self._name,
                "spared": list(sparing.ranks),
            },
            loud=decision.choice is Choice.SKIP,
        )
        self._appointed_at, self._saving = now, None
        self._phase = _Phase.APPOINTED if take else _Phase.IDLE
        return [appoint, said]

    def _spare(self, now: float) -> None:
        """From the step that is saved now on, ranks that go send what they alone have, if there is time to plan it."""
        wanted = self.spares.wanted
        if wanted == self.spares.in_force:
            return
        outlook = self._outlook(self._step, now)
        if outlook.staged_seconds is not None:
            outlook = replace(outlook, staged_seconds=outlook.staged_seconds * self.spares.growth(wanted))
        if decide(replace(outlook, plan_seconds=self.spares.plan_seconds(wanted))).choice is Choice.TAKE:
            self.spares.in_force = wanted

    def _over(self, why: str, now: float) -> list[Call]:
        waiting, self._phase = self._phase is _Phase.PROPOSING, _Phase.IDLE
        step = f"step {self._staged_step}" if self._staged_step >= 0 else "nothing"
        kept = f"{step} is {self._safe}"
        text = f"no checkpoint was taken after {self._name} was told of {self._kind()}: {why}; {kept}"
        fields = {"reason": why, "seconds_left": self._left(now), "told": self._name}
        said = Said("emergency_failed", text, fields, loud=True)
        # What was appointed stays so: some ranks may have saved, and the others must not then leave it out.
        return [Appoint(Word.CALLED_OFF, self._step, self._number), said] if waiting else [said]

    def _outlook(self, next_step: int, now: float) -> Outlook:
        return Outlook(
            seconds_left=self._left(now),
            staged_seconds=self.measures.staged_seconds(),
            in_flight=tuple(self._in_flight()),
            step_seconds=max(self._step_seconds.values(), default=None),
            next_step=next_step,
            staged_step=self._staged_step,
            safe=self._safe,
        )

    def _margin(self, wait_seconds: float, doubled: int) -> int:
        """How many steps ahead all ranks surely are not when they hear of it, and what is in flight has gone."""
        quickest = min(self._step_seconds.values(), default=0.0)
        if quickest <= 0:
            return min(_MARGIN_STEPS_MAX, 1 << doubled)
        wanted = math.ceil((_MARGIN_SECONDS * (1 << doubled) + wait_seconds) / quickest)
        return max(1, min(_MARGIN_STEPS_MAX, wanted))

    def _left(self, now: float) -> float | None:
        return None if self._deadline is None else self._deadline - now

    def _kind(self) -> str:
        assert self._notice is not None
        return "its end" if self._notice.kind is NoticeKind.TERMINATE else "a rebalance"
