"""Retries checkpoints while the store fails: one error line, then growing pauses.

    a job fails ─► held: 1 s, 2 s, 4 s … 60 s, for as long as it takes ─► one succeeds ─► resumed

The newest whole checkpoint loses nothing by waiting: its chunks stay in the ring, its written parts in the store. When
the ring is full, it takes the place of older ones (`Engine._make_room`), or the next steps are declined.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.telemetry.events import EventLog

_log = logging.getLogger("holdfast.flusher")
_PAUSE_SECONDS_FIRST = 1.0
_PAUSE_SECONDS_MAX = 60.0


@dataclass(slots=True)
class _Hold:
    failures: int
    since: float
    due: float  # until then it pauses


class RetryCounts:
    """Counts failures per checkpoint. For the loop's thread."""

    def __init__(self, events: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._clock = events, clock
        self._holds: dict[CheckpointId, _Hold] = {}
        self._since = 0.0
        self.error: StoreError | None = None

    @property
    def seconds(self) -> float:
        """How long nothing has succeeded while a checkpoint was pending; 0 without one."""
        return self._clock() - self._since if self._holds else 0.0

    def count_failure(self, key: CheckpointId, error: StoreError) -> float:
        """Count a failed job of this checkpoint; return how many seconds to pause."""
        if not self._holds:
            self._since = self._clock()
        self.error = error
        hold = self._holds.get(key)
        if hold is None:
            hold = self._holds[key] = _Hold(0, self._clock(), 0.0)
            _log.error(
                "%s: the store fails; the checkpoint stays in the ring and is retried until it succeeds. When the "
                "ring is full, newer steps take the place of older ones, or are declined. The cause: %s",
                key,
                error,
            )
            fields = {"attempt": key.attempt, "code": error.code, "message": str(error)}
            self._events.emit("flush_held", fields, step=key.step)
        if self._clock() < hold.due:
            # Its parts are written in parallel and fail together: that is one failure of the store.
            return hold.due - self._clock()
        hold.failures += 1
        pause_seconds = min(_PAUSE_SECONDS_FIRST * 2.0 ** min(hold.failures - 1, 16), _PAUSE_SECONDS_MAX)
        hold.due = self._clock() + pause_seconds
        _log.warning("%s: retried in %.0f s (failure %d): %s", key, pause_seconds, hold.failures, error)
        return pause_seconds

    def on_progress(self, key: CheckpointId) -> bool:
        """Note that the store accepted something of this checkpoint; return whether it was failing before."""
        self._since = self._clock()
        hold = self._holds.pop(key, None)
        if hold is not None:
            seconds = self._clock() - hold.since
            _log.warning("%s: the store takes the checkpoint again, after %.1f s", key, seconds)
            fields = {"attempt": key.attempt, "seconds": round(seconds, 3), "failures": hold.failures}
            self._events.emit("flush_resumed", fields, step=key.step)
        return hold is not None

    def forget(self, key: CheckpointId) -> None:
        self._holds.pop(key, None)


class RetryQueue:
    """Calls to make later. For the loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, CheckpointId, Callable[[], None]]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def wait_seconds(self) -> float | None:
        """How long until the first call is due; None if the queue is empty."""
        return max(0.0, self._waiting[0][0] - self._clock()) if self._waiting else None

    def put(self, key: CheckpointId, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback`, which concerns checkpoint `key`, after a number of seconds."""
        heapq.heappush(self._waiting, (self._clock() + seconds, next(self._order), key, callback))

    def make_due(self, key: CheckpointId | None = None) -> None:
        """Make the pending calls of one checkpoint, or all of them, due now."""
        now = self._clock()
        self._waiting = [
            (min(due, now) if key in {None, of} else due, number, of, callback)
            for due, number, of, callback in self._waiting
        ]
        heapq.heapify(self._waiting)

    def run_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._clock():
            _, _, _, callback = heapq.heappop(self._waiting)
            callback()
