"""Preemption notices at the stager: passes ranks' messages to holdfast/notices/preemption.py, executes its decisions.

NOTICE, AT, OFFER, DECLINE ─┐                ┌─► SAVE_AT to every rank
staged, declined, failed ───┼─► PreemptionCoordinator ───┼─► one clear log line
lost ranks, ticks ──────────┘                └─► event log
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from holdfast.config import StagerConfig
from holdfast.notices.messages import Effect, EventLine, apply_effects
from holdfast.notices.notice import NoticeKind
from holdfast.notices.preemption import PreemptionCoordinator
from holdfast.notices.should_save import InFlight
from holdfast.telemetry.events import EventLog
from holdfast.wire.frames import Frame, Kind
from stager.trainers import Trainers

_log = logging.getLogger("holdfast.stager")


class Notices:
    """Handles NOTICE and AT. Only for the loop's thread. `in_flight`: checkpoints in flight, oldest first."""

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
        self.is_terminating = False  # a rank's machine got a notice that it will be taken away
        self._coordinator = PreemptionCoordinator(
            trainers.ranks,
            in_flight,
            rebalance_seconds=config.rebalance_seconds,
            rebalance_factor=config.rebalance_factor,
        )

    def handle(self, rank: int, frame: Frame) -> None:
        """Handle NOTICE or AT of a rank. Raises `ProtocolError`: the message is malformed."""
        self._apply(self._coordinator.handle(rank, self._trainers.name(rank), frame, self._clock()))

    def on_offered(self, step: int) -> None:
        """A rank has offered or declined this step."""
        self._coordinator.on_offered(step)

    def on_staged(self, step: int, nbytes: int, seconds: float) -> None:
        """A checkpoint was staged, `seconds` after its first offer."""
        self._apply(self._coordinator.on_staged(step, nbytes, seconds, self._clock()))

    def on_ended(self, step: int, reason: str) -> None:
        """A checkpoint was declined or has failed, on all ranks."""
        self._apply(self._coordinator.on_ended(step, reason, self._clock()))

    def on_rank_left(self, rank: int, reason: str) -> None:
        """A rank has left, is lost, or was dropped."""
        self._apply(self._coordinator.on_rank_left(rank, reason, self._clock()))

    def tick(self) -> None:
        self._apply(self._coordinator.tick(self._clock()))

    def _apply(self, effects: Sequence[Effect]) -> None:
        self.is_terminating |= any(
            isinstance(effect, EventLine) and effect.fields.get("kind") == NoticeKind.TERMINATE
            for effect in effects
        )
        send_to_all = self._trainers.send_all
        apply_effects(effects, Kind.SAVE_AT, send_to_all, self._events, attempt=self._attempt(), log=_log)
