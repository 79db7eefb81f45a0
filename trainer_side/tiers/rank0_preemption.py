"""Rank 0 coordinates the save after a preemption notice, in a job without a stager.

NOTICE, AT of any rank ────────────────────┐                           ┌─► SAVE_AT, to all ranks
begun here, sealed or skipped anywhere, ───┼─► PreemptionCoordinator ──┼─► one clear log line
complete, void ── in the farthest tier     │                           └─► event log
ranks that are dead or have ended, ticks ──┘

The decisions are those of a stager (holdfast/notices/preemption.py). A step counts as safe when it is complete in the
*farthest* tier, which takes longest and survives most failures. Rank 0's own machine may be the preempted one: rank 0
mostly outlives its notice; if rank 0 dies before the save, the ranks' promises end with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from holdfast.errors import ProtocolError
from holdfast.notices.messages import Effect, apply_effects
from holdfast.notices.preemption import PreemptionCoordinator
from holdfast.notices.should_save import InFlight
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from trainer_side.tiers.tier import Nearness, Order, StepVerdict, Tier

_log = logging.getLogger("holdfast.trainer.council")


def farthest(tiers: Sequence[Tier]) -> int:
    """Return the number of the tier that survives most failures: a file tier, else NVMe, and so on down `Nearness`."""
    order = list(Nearness)
    return max(range(len(tiers)), key=lambda number: order.index(tiers[number].nearness))


class Rank0PreemptionCoordinator:
    """Runs on the votes' thread of rank 0, except `record_begun`, which belongs to the training thread.

    Methods return messages to all ranks, this one included, in order.

    `tier` is the number of the farthest tier. `safe` describes a checkpoint that is complete there. `fraction` returns
    the share of a step, 0 to 1, that this rank has written there.
    """

    def __init__(
        self,
        ranks: int,
        tier: int,
        safe: str,
        *,
        attempt: int,
        fraction: Callable[[Order], float],
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._attempt, self._fraction = tier, attempt, fraction
        self._events, self._clock = events, clock
        self._guard = threading.Lock()
        # Steps without a verdict: when each began, and the bytes of its image.
        self._begun: dict[Order, tuple[float, int]] = {}
        self._coordinator = PreemptionCoordinator(ranks, self._in_flight, safe_state=safe)

    def record_begun(self, tier: int, order: Order, image_bytes: int) -> None:
        """Note that this rank has taken a slot for a step."""
        if tier == self._tier:
            with self._guard:
                self._begun[order] = self._clock(), image_bytes

    def handle(self, rank: int, frame: Frame) -> list[bytes]:
        """Take a rank's NOTICE or AT. An invalid one is logged and ignored."""
        try:
            who = wire.json_body(frame).get("who")  # NOTICE: the rank, for people
            name = who if isinstance(who, str) else f"rank {rank}"
            return self._carry_out(self._coordinator.handle(rank, name, frame, self._clock()))
        except ProtocolError as error:
            _log.error(
                "ignoring a message of rank %d about a notice, so the notice may lead to no checkpoint: %s",
                rank,
                error,
            )
            return []

    def on_vote(self, tier: int, order: Order, *, given_up: bool) -> None:
        """Note that some rank has sealed its slice of this step, or never will.

        `given_up`: This rank never will, although it may have begun the step after the verdict.
        """
        if tier != self._tier:
            return
        self._coordinator.on_offered(order[1])
        if given_up:
            with self._guard:
                self._begun.pop(order, None)

    def on_verdict(self, verdict: StepVerdict) -> list[bytes]:
        """Handle the verdict that a step is complete in a tier, or void."""
        if verdict.tier != self._tier:
            return []
        step, now = verdict.order[1], self._clock()
        with self._guard:
            begun_at, image_bytes = self._begun.pop(verdict.order, (now, 0))
        if verdict.complete:
            return self._carry_out(self._coordinator.on_staged(step, image_bytes, now - begun_at, now))
        return self._carry_out(self._coordinator.on_ended(step, verdict.why.text, now))

    def rank_left(self, rank: int, why: str) -> list[bytes]:
        return self._carry_out(self._coordinator.on_rank_left(rank, f"rank {rank} {why}", self._clock()))

    def tick(self) -> list[bytes]:
        return self._carry_out(self._coordinator.tick(self._clock()))

    def _in_flight(self) -> list[InFlight]:
        now = self._clock()
        with self._guard:
            begun = sorted((order, at) for order, (at, _) in self._begun.items())
        return [InFlight(order[1], self._fraction(order), now - at) for order, at in begun]

    def _carry_out(self, effects: Sequence[Effect]) -> list[bytes]:
        messages: list[bytes] = []
        apply_effects(effects, Kind.SAVE_AT, messages.append, self._events, attempt=self._attempt, log=_log)
        return messages
