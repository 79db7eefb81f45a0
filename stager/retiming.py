"""How all ranks come to another interval at the same step, without a collective: rank 0 wishes, the stager proposes.

    WISH ─► PROPOSING ── every rank is before the step ──► appointed: from that step on it holds
             ▲  └─ a rank has passed it: a later one ─┐
             └────────────────────────────────────────┘
    a rank refuses, is lost, does not answer, or too many tries ─► called off: everything stays as it was
    a rank is lost, silent, or does not keep its promise ────────► loose: trainer_side/link/schedule.py

Events in, actions out; no clock, no MPI. The rule is that of decider.py: who has answered that it has not
passed a step has promised it, and waits there for the stager's word. So at any step either all ranks have another
interval or none has. What is appointed is never called off, it can only be followed by something else.

Nothing here is urgent, so a step is proposed far enough ahead that no rank is ever seen waiting, and whatever is
doubtful ends the try: the next wish comes with the next checkpoint.
"""

from __future__ import annotations

import math

from holdfast.notices.decider import Said
from holdfast.wire.pace import Announce, Pace, PaceWord, Wish

_TRIES_MAX = 10
_MARGIN_SECONDS = 0.5  # ranks and stager look at their messages every few milliseconds; doubled at each try
_MARGIN_STEPS_MAX = 10_000


Saying = Announce | Said


class Retiming:
    """See the module. `now`: seconds of a clock that only goes forward. Every method gives what to do.

    Args:
        ranks: Training ranks.
        answer_seconds_max: How long a rank's answer is waited for.
    """

    def __init__(self, ranks: int, *, answer_seconds_max: float = 10.0) -> None:
        self._ranks, self._answer_seconds_max = ranks, answer_seconds_max
        self._wish: Wish | None = None  # None: nothing is being proposed
        self._number = self._tries = self._step = 0
        self._asked_at = 0.0
        self._answers: dict[int, int] = {}
        self._step_seconds: dict[int, float] = {}
        self._pace: Pace | None = None  # what all ranks have promised to keep, as proposal `_appointed`
        self._appointed, self._appointed_step = 0, -1
        self._refused = ""  # why no interval can be agreed on in this job

    @property
    def open(self) -> bool:
        """Whether ranks may be waiting for a word."""
        return self._wish is not None

    def wished(self, wish: Wish, now: float) -> list[Saying]:
        """Rank 0 has computed another interval."""
        if self._refused or (self._pace is not None and self._pace.every == wish.every and not self.open):
            return []  # it has not come to the step that is appointed
        if self.open:
            self._wish = wish  # what is proposed is a step; the interval is said when it is appointed
            return []
        self._wish, self._tries = wish, 0
        return [self._propose(0, now)]  # nobody can promise it: it asks where they are

    def here(
        self, rank: int, number: int, next_step: int, step_seconds: float | None, now: float
    ) -> list[Saying]:
        """A rank has answered proposal `number`: the step after its last one, and how long steps take."""
        if self._wish is None or number != self._number:
            return []
        self._answers[rank] = next_step
        if step_seconds is not None:
            self._step_seconds[rank] = step_seconds
        if len(self._answers) < self._ranks:
            return []
        newest = max(self._answers.values())
        if newest <= self._step and self._tries > 1:
            return self._appoint(self._wish)
        if self._tries >= _TRIES_MAX:
            return self._call_off(f"the ranks had passed each of {self._tries} steps that were proposed")
        # Above the one that is appointed: ranks that have not come to it yet take up both, in this order.
        return [self._propose(max(newest + self._margin(), self._appointed_step + 1), now)]

    def refused(self, rank: int, number: int, reason: str) -> list[Saying]:
        """A rank does not change its interval: it has another one from its script, or has given up its promise."""
        if self._wish is not None and number == self._number:
            self._refused = f"rank {rank}: {reason}"
            return self._call_off(f"{self._refused}; give all ranks of a job the same `every`", loud=True)
        return self.doubtful(f"rank {rank}: {reason}") if number == self._appointed else []

    def doubtful(self, reason: str) -> list[Saying]:
        """What a rank has heard is not known: it is silent, dead or dropped, or has given up its promise."""
        return [*self._give_up(reason), *self._loosen(reason)]

    def left(self, reason: str, *, lost: bool) -> list[Saying]:
        """Nothing more comes from this rank. `lost`: it has not said good-bye."""
        self._refused = self._refused or reason
        return self.doubtful(reason) if lost else self._give_up(reason)

    def tick(self, now: float) -> list[Saying]:
        """Time has passed."""
        if self._wish is None or now - self._asked_at <= self._answer_seconds_max:
            return []
        missing = ", ".join(str(rank) for rank in range(self._ranks) if rank not in self._answers)
        return self._call_off(f"rank {missing} did not answer within {self._answer_seconds_max:g} s")

    # -- steps ---------------------------------------------------------------------------------------------------

    def _propose(self, step: int, now: float) -> Announce:
        self._number += 1
        self._tries += 1
        self._step, self._asked_at, self._answers = step, now, {}
        return Announce(PaceWord.PROPOSED, step, self._number)

    def _appoint(self, wish: Wish) -> list[Saying]:
        before = None if self._pace is None else self._pace.every
        self._pace = Pace(max(self._step, wish.after + wish.every), wish.every)
        self._wish, self._appointed, self._appointed_step = None, self._number, self._step
        said = Said(
            "interval",
            f"from step {self._step} on {wish.why}",
            {
                "at_step": self._step,
                "first_step": self._pace.first,
                "every": wish.every,
                "every_before": before,
                "why": wish.why,
            },
        )
        return [Announce(PaceWord.APPOINTED, self._step, self._number, self._pace.to_json()), said]

    def _give_up(self, why: str) -> list[Saying]:
        return self._call_off(why) if self.open else []

    def _call_off(self, why: str, *, loud: bool = False) -> list[Saying]:
        assert self._wish is not None
        wish, self._wish = self._wish, None
        text = f"the interval stays as it is ({wish.every} steps were wanted): {why}"
        said = Said("interval_kept", text, {"reason": why, "every": wish.every}, loud=loud)
        return [Announce(PaceWord.CALLED_OFF, self._step, self._number), said]

    def _loosen(self, why: str) -> list[Saying]:
        """Whoever holds a pace goes to the interval that has steps in common with all others."""
        if self._pace is None:
            return []
        self._pace = None
        text = f"the ranks may have heard different intervals ({why}): they go on at powers of two"
        return [
            Announce(PaceWord.LOOSE, self._step, self._number),
            Said("interval_loose", text, {"reason": why}),
        ]

    def _margin(self) -> int:
        """How many steps ahead all ranks surely are not when they hear of it."""
        quickest = min(self._step_seconds.values(), default=0.0)
        tried = self._tries - 1
        if quickest <= 0:
            return min(_MARGIN_STEPS_MAX, 8 << tried)
        return max(2, min(_MARGIN_STEPS_MAX, math.ceil(_MARGIN_SECONDS * (1 << tried) / quickest)))
