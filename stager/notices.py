"""What the stager does about notices: between the ranks' messages and the emergency's decisions.

NOTICE, AT, OFFER, DECLINE ─┐                ┌─► SAVE_AT to every rank
staged, declined, failed ───┼─► Emergency ───┼─► one clear log line
lost ranks, ticks ──────────┘                └─► event log
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from holdfast.config import StagerConfig
from holdfast.notices.decider import Call, Emergency
from holdfast.notices.emergency_wire import hear
from holdfast.notices.messages import carry_out
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
        machine = self._trainers.on_machine_of(rank)
        self._do(hear(self._emergency, rank, self._trainers.name(rank), frame, self._clock(), machine))

    def offered(self, step: int) -> None:
        """A rank has offered or declined this step."""
        self._emergency.offered(step)

    def staged(self, step: int, nbytes: int, seconds: float) -> None:
        """A checkpoint is staged, so long after its first offer."""
        self._do(self._emergency.staged(step, nbytes, seconds, self._clock()))

    def ended(self, step: int, reason: str) -> None:
        """A checkpoint was declined or has failed, for all."""
        self._do(self._emergency.ended(step, reason, self._clock()))

    def left(self, rank: int, reason: str) -> None:
        """Nothing more comes from this rank."""
        self._do(self._emergency.rank_left(rank, reason, self._clock()))

    def tick(self) -> None:
        """Look at the deadlines."""
        self._do(self._emergency.tick(self._clock()))

    def _do(self, calls: Sequence[Call]) -> None:
        tell_all = self._trainers.send_all
        carry_out(calls, Kind.SAVE_AT, tell_all, self._events, attempt=self._attempt(), log=_log)
