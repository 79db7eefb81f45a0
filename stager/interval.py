"""What the stager does about the interval: between the ranks' messages and the decisions of stager/retiming.py.

WISH, HERE ────────┐               ┌─► SAVE_EVERY to every rank
lost ranks, ticks ─┴─► Retiming ───┼─► one clear log line
                                   └─► event log
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from holdfast.errors import ProtocolError
from holdfast.notices.emergency_wire import step_seconds
from holdfast.notices.messages import carry_out
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.pace import Wish
from stager.retiming import Retiming, Saying
from stager.trainers import Trainers

_log = logging.getLogger("holdfast.stager")

_REASON_CHARACTERS = 300


class Paces:
    """See the module. The loop's thread.

    Args:
        trainers: The ranks.
        events: Event log.
        attempt: The job's attempt now.
        clock: Seconds that only go forward.
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
        self._retiming = Retiming(trainers.ranks)

    def hear(self, rank: int, frame: Frame) -> None:
        """WISH or HERE of a rank.

        Raises:
            ProtocolError: The message does not hold what it should.
        """
        body = wire.json_body(frame)
        if frame.kind is Kind.WISH:
            if rank != 0:
                raise ProtocolError(f"WISH from rank {rank}; only rank 0 measures")
            self._do(self._retiming.wished(Wish.from_json(body), self._clock()))
            return
        seconds, refusal = step_seconds(frame, body), body.get("refusal", "")
        if not isinstance(refusal, str):
            raise ProtocolError(f"HERE: refusal is {refusal!r:.80}, expected a text")
        if refusal:
            self._do(self._retiming.refused(rank, frame.arg, refusal[:_REASON_CHARACTERS]))
        else:
            self._do(self._retiming.here(rank, frame.arg, frame.step, seconds, self._clock()))

    def silent(self, reason: str) -> None:
        """What a rank has heard is not known for now."""
        self._do(self._retiming.doubtful(reason))

    def left(self, reason: str, *, lost: bool) -> None:
        """Nothing more comes from a rank. `lost`: it has not said good-bye."""
        self._do(self._retiming.left(reason, lost=lost))

    def tick(self) -> None:
        """Look at the deadline."""
        self._do(self._retiming.tick(self._clock()))

    def _do(self, calls: Sequence[Saying]) -> None:
        tell_all = self._trainers.send_all
        carry_out(calls, Kind.SAVE_EVERY, tell_all, self._events, attempt=self._attempt(), log=_log)
