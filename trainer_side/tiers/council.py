"""How the training ranks agree on what their local tiers hold, without a stager: rank 0 decides.

    lanes             sealed, skipped ─┐                                        ┌─► on_verdict: tier.complete, tier.void
    training thread   agree, concur, … ┼► CouncilThread ═► rank 0: Coordinator ═┼─► answers to `agree`, `concur`
    watch             notice ──────────┘                                        └─► appointments: a step all ranks save

Where rank 0 is silent nothing is decided. A slice without a verdict is then kept and never called void, because rank 0
may have told other ranks that it is complete. From then on local tiers take nothing new, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable

from holdfast.errors import HoldfastError, PeerLost
from holdfast.notices.notice import Notice
from holdfast.telemetry.causes import Reason
from holdfast.wire import frames as wire
from holdfast.wire.agreement import pickle_reserve_bytes
from holdfast.wire.doubt import Doubt
from holdfast.wire.frames import Kind
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.ranks.ports import CouncilPort
from trainer_side.tiers.coordinator import ROOT, Coordinator, CouncilLimits
from trainer_side.tiers.council_member import CouncilMember
from trainer_side.tiers.council_thread import CouncilThread
from trainer_side.tiers.replica_watch import fingerprints_frame
from trainer_side.tiers.tally import Order, StepVerdict, reason_body

_log = logging.getLogger("holdfast.trainer.council")

_SLACK_SECONDS = 10.0  # for an answer that itself has a deadline at rank 0


class Council:
    """One rank's part in the council: `RankCouncil`, and the verdicts on slices. Any thread.

    Args:
        port: To the other ranks.
        limits: How long the slowest rank is waited for.
        on_verdict: Called with every verdict, in the council's thread.
        on_turn: Called in the council's thread again and again, also when nothing is decided any more.
        appointments: At which step this rank acts on a notice; only in a job without a stager.
        coordinator: Decides; on rank 0 only. None: one that neither has a chair nor compares replicas.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        port: CouncilPort,
        limits: CouncilLimits,
        *,
        on_verdict: Callable[[StepVerdict], None],
        on_turn: Callable[[], None] = lambda: None,
        appointments: AgreedSteps | None = None,
        coordinator: Coordinator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._limits, self._clock = port.rank, limits, clock
        self._answer_seconds_max = limits.agree_seconds_max + _SLACK_SECONDS
        silence_seconds_max = 2 * limits.seal_seconds_max + _SLACK_SECONDS
        self._member = CouncilMember(
            port.rank, on_verdict, appointments, silence_seconds_max=silence_seconds_max
        )
        if coordinator is None and port.rank == ROOT:
            coordinator = Coordinator(port.ranks, limits)
        self._thread = CouncilThread(port, self._member, coordinator, on_turn=on_turn, clock=clock)

    @property
    def problem(self) -> HoldfastError | None:
        """Why nothing is decided any more; None while all is well."""
        return self._thread.problem

    @property
    def undecided(self) -> int:
        return self._member.undecided

    @property
    def new_pickle_reserve_bytes(self) -> int:
        return self._member.new_pickle_reserve_bytes

    def sealed(self, tier: int, order: Order, layout: str) -> None:
        """Say that this rank has sealed its slice in this tier; once for each slice."""
        self._member.sealed(tier, order, self._clock())
        self._say_of(Kind.SEALED, tier, order, wire.text_body(layout))

    def skipped(self, tier: int, order: Order, why: Reason) -> None:
        """Say that this rank will never seal its slice in this tier."""
        self._say_of(Kind.SKIPPED, tier, order, reason_body(why))

    def compare(self, order: Order, layout_digest: str, fingerprints: str) -> None:
        """Have rank 0 compare this rank's replicas with those of the others. Comes before `sealed` of the step."""
        self._thread.say(fingerprints_frame(order, layout_digest, fingerprints))

    def hurry(self, seconds_max: float) -> None:
        """From now on no answer is waited for any longer than that."""
        self._answer_seconds_max = min(self._answer_seconds_max, seconds_max)

    def agree(self, proposal: Proposal) -> Agreement:
        answer = self._ask(proposal.to_frame(0), "compare the layouts of all ranks")
        assert answer is not None
        return answer

    def concur(self, error: HoldfastError | None) -> None:
        body = wire.to_json({}) if error is None else wire.error_body(error)
        try:
            self._ask(wire.encode(Kind.READY, body=body), "hear whether all ranks are ready")
        except HoldfastError as refused:
            raise error or refused from None
        assert error is None

    def fits(self, step: int) -> None:
        if self.problem is None:
            self._thread.say(wire.encode(Kind.FITS, step=step))

    def make_room(self, needed_bytes: int) -> None:
        assert self._rank == ROOT
        self._thread.say(wire.encode(Kind.ROOM, arg=pickle_reserve_bytes(needed_bytes)))

    def doubt(self, doubt: Doubt) -> None:
        if self.problem is None:
            self._thread.say(doubt.to_frame(Kind.DOUBT, attempt=0))

    def when_doubted(self, call: Callable[[Doubt], None]) -> None:
        self._member.on_doubt = call

    def notice(self, notice: Notice) -> None:
        if self.problem is not None:
            _log.error(
                "rank %d: %s; the ranks no longer agree on anything, so no extra checkpoint is taken",
                self._rank,
                notice.sentence(),
            )
            return
        who = f"rank {self._rank} on host {platform.node()} (process {os.getpid()})"
        body = wire.to_json({**notice.to_json(), "who": who})
        self._thread.say(wire.encode(Kind.NOTICE, body=body))

    def close(self, seconds_max: float) -> None:
        """Wait for the open verdicts and for the other ranks, then end the thread. Safe to call twice."""
        self._thread.close(seconds_max)

    def _say_of(self, kind: Kind, tier: int, order: Order, body: bytes) -> None:
        attempt, step = order
        self._thread.say(wire.encode(kind, attempt=attempt, step=step, arg=tier, body=body))

    def _ask(self, message: bytes, what: str) -> Agreement | None:
        question = self._member.asks()
        if self.problem is not None:  # looked at only now: a problem from here on answers the question
            raise self.problem
        self._thread.say(message)
        limit = self._answer_seconds_max
        if not question.answered.wait(limit):
            raise PeerLost(f"rank {self._rank} waited {limit:g} s for rank 0 to {what}")
        if isinstance(question.answer, HoldfastError):
            raise question.answer
        return question.answer
