"""Looks at what other flushers of the same image write into the store: how often, and for how long.

    own chunks still come     half of the time waited so far, up to 2 s: the others are hardly further
    own share is all there    at once, then a tenth of the time waited since, up to 10 s: whatever comes is used at once

A look is thus late by a tenth of the wait, and the looks of a long wait are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from flusher.retry_queue import RetryQueue
from flusher.steps import Job, Open
from holdfast.errors import PeerLost
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import ShareNumber

_PAUSE_SECONDS_MIN = 0.05
_FAR, _NEAR = (0.5, 2.0), (0.1, 10.0)  # part of the time waited; seconds at most
# How long a job looks. The lead gives up first, so that those that wait for it hear why.
_OTHERS_SECONDS_MAX, _LEAD_SECONDS_MAX = 600.0, 900.0
# For an upload of an earlier attempt that the lead has not begun: only its next flusher on the same ring still may.
_EARLIER_SECONDS_MAX = 30.0


class LookAgain(NamedTuple):
    """A job has found that another flusher is not so far. `missing`: what it waits for; `since`: its first look."""

    job: Job
    missing: str
    since: float


class Looks:
    """The jobs that wait for other flushers. For the loop's thread. `share`: the one that is written here."""

    def __init__(self, share: ShareNumber, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._waiting = RetryQueue(clock)
        self._near: dict[CheckpointId, float] = {}  # since when its own share is all there
        self._attempt_since = 0.0

    @property
    def wait_seconds(self) -> float | None:
        """How long until the next look is due; None: no job waits."""
        return self._waiting.wait_seconds

    def begin_attempt(self) -> None:
        self._attempt_since = self._clock()

    def expect(self, key: CheckpointId) -> None:
        """All chunks of the own share are there, so those of the other shares may be, too."""
        self._near.setdefault(key, self._clock())
        self._waiting.at_once(key)

    def forget(self, key: CheckpointId) -> None:
        self._near.pop(key, None)

    def too_long(self, item: LookAgain, attempt: int) -> PeerLost | None:
        """The error of a job that has looked for long enough. `attempt`: of the job to which the ring belongs now."""
        job, waited_seconds = item.job, self._clock() - item.since
        seconds_max = _OTHERS_SECONDS_MAX if self._share.leads else _LEAD_SECONDS_MAX
        if isinstance(job, Open) and job.key.attempt < attempt:
            seconds_max = min(seconds_max, _EARLIER_SECONDS_MAX + max(0.0, self._attempt_since - item.since))
        if waited_seconds < seconds_max:
            return None
        return PeerLost(
            f"{job.key}: this flusher, {self._share}, has waited {waited_seconds:.0f} s for {item.missing}; "
            "look at the log of that stager's flusher"
        )

    def put(self, item: LookAgain, look: Callable[[], None]) -> None:
        """Call `look` when it is time for the next one."""
        near = self._near.get(item.job.key)
        self._waiting.put(item.job.key, pause_seconds(self._clock(), item.since, near), look)

    def at_once(self, key: CheckpointId) -> None:
        """Nothing more is waited for: have the jobs of this checkpoint end."""
        self._waiting.at_once(key)

    def do_due(self) -> None:
        self._waiting.do_due()


def pause_seconds(now: float, since: float, near: float | None) -> float:
    """Seconds from one look to the next. `since`: the first look; `near`: when the own share was there, if it is."""
    part, most = _FAR if near is None else _NEAR
    waited_seconds = now - (since if near is None else max(since, near))
    return min(max(_PAUSE_SECONDS_MIN, part * waited_seconds), most)
