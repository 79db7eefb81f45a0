"""Preemption notices at the stager: ranks' messages in, the decisions of holdfast/notices/decider.py carried out.

NOTICE, AT, OFFER, DECLINE ─┐                ┌─► SAVE_AT to every rank
staged, declined, failed ───┼─► Emergency ───┼─► one clear log line
lost ranks, ticks ──────────┘                └─► event log
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from holdfast.config import StagerConfig
from holdfast.notices.decider import Emergency
from holdfast.notices.messages import Effect, carry_out
from holdfast.notices.worth import InFlight
from holdfast.telemetry.events import EventLog
from holdfast.wire.frames import Frame, Kind
from stager.trainers import Trainers

_log = logging.getLogger("holdfast.stager")


class Notices:
    """See the module. The loop's thread.

    Args:
        trainers: The ranks.
        in_flight: What is on its way, oldest first.
        attempt: The job's attempt now.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        config: StagerConfig,
        trainers: Trainers,
        in_flight: Callable[[], Sequence[InFlight]],
        events: EventLog,
        *,
        attempt: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainers, self._events, self._clock, self._attempt = trainers, events, clock, attempt
        self._emergency = Emergency(
            trainers.ranks,
            in_flight,
            rebalance_seconds=config.rebalance_seconds,
            rebalance_factor=config.rebalance_factor,
        )

    def hear(self, rank: int, frame: Frame) -> None:
        """NOTICE or AT of a rank.

        Raises:
            ProtocolError: The message does not hold what it should.
        """
        self._do(self._emergency.hear(rank, self._trainers.name(rank), frame, self._clock()))

    def offered(self, step: int) -> None:
        """A rank has offered or declined this step."""
        self._emergency.offered(step)

    def staged(self, step: int, nbytes: int, seconds: float) -> None:
        """A checkpoint was staged, `seconds` after its first offer."""
        self._do(self._emergency.staged(step, nbytes, seconds, self._clock()))

    def ended(self, step: int, reason: str) -> None:
        """A checkpoint was declined or has failed, for all."""
        self._do(self._emergency.ended(step, reason, self._clock()))

    def left(self, rank: int, reason: str) -> None:
        """Nothing more comes from this rank."""
        self._do(self._emergency.rank_left(rank, reason, self._clock()))

    def tick(self) -> None:
        self._do(self._emergency.tick(self._clock()))

    def _do(self, effects: Sequence[Effect]) -> None:
        tell_all = self._trainers.send_all
        carry_out(effects, Kind.SAVE_AT, tell_all, self._events, attempt=self._attempt(), log=_log)
