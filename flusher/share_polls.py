"""Polls the records that other flushers of the same image write into the store: how often, and for how long.

    this share is still arriving    half of the time waited so far, up to 2 s: the others are hardly further
    this share is complete          at once, then a tenth of the time waited since, up to 10 s

A poll is thus late by a tenth of the wait, and a long wait needs few polls.
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
_ARRIVING, _COMPLETE = (0.5, 2.0), (0.1, 10.0)  # fraction of the time waited; maximum in seconds
# How long a job polls. The lead times out first, so that the others learn its reason.
_OTHERS_SECONDS_MAX, _LEAD_SECONDS_MAX = 600.0, 900.0
# For an upload of an earlier attempt that the lead has not begun: only the next flusher of the lead's ring still may.
_EARLIER_SECONDS_MAX = 30.0


class PollAgain(NamedTuple):
    """A job must wait for another flusher. `missing`: what it waits for; `since`: when it first polled."""

    job: Job
    missing: str
    since: float


class SharePolls:
    """Jobs that wait for other flushers. For the loop's thread. `share`: the one that this flusher writes."""

    def __init__(self, share: ShareNumber, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._waiting = RetryQueue(clock)
        self._complete_since: dict[CheckpointId, float] = {}  # when this flusher's share became complete
        self._attempt_since = 0.0

    @property
    def wait_seconds(self) -> float | None:
        """Seconds until the next poll is due; None: no job waits."""
        return self._waiting.wait_seconds

    def begin_attempt(self) -> None:
        self._attempt_since = self._clock()

    def on_share_complete(self, key: CheckpointId) -> None:
        """Poll at once: this share is complete, so the others may be, too."""
        self._complete_since.setdefault(key, self._clock())
        self._waiting.make_due(key)

    def forget(self, key: CheckpointId) -> None:
        self._complete_since.pop(key, None)

    def timeout_error(self, item: PollAgain, attempt: int) -> PeerLost | None:
        """Return the timeout error of a job that has polled for too long, else None. `attempt`: the ring's."""
        job, waited_seconds = item.job, self._clock() - item.since
        seconds_max = _OTHERS_SECONDS_MAX if self._share.is_lead else _LEAD_SECONDS_MAX
        if isinstance(job, Open) and job.key.attempt < attempt:
            seconds_max = min(seconds_max, _EARLIER_SECONDS_MAX + max(0.0, self._attempt_since - item.since))
        if waited_seconds < seconds_max:
            return None
        return PeerLost(
            f"{job.key}: this flusher, {self._share}, has waited {waited_seconds:.0f} s for {item.missing}; "
            "look at the log of that stager's flusher"
        )

    def put(self, item: PollAgain, poll: Callable[[], None]) -> None:
        """Call `poll` when the next poll is due."""
        complete_since = self._complete_since.get(item.job.key)
        self._waiting.put(item.job.key, pause_seconds(self._clock(), item.since, complete_since), poll)

    def make_due(self, key: CheckpointId) -> None:
        """Make the polls of a checkpoint due now, so that its jobs end."""
        self._waiting.make_due(key)

    def run_due(self) -> None:
        self._waiting.run_due()


def pause_seconds(now: float, since: float, complete_since: float | None) -> float:
    """Return the pause before the next poll. `since`: the first poll; `complete_since`: when this share became
    complete.
    """
    part, most = _ARRIVING if complete_since is None else _COMPLETE
    waited_seconds = now - (since if complete_since is None else max(since, complete_since))
    return min(max(_PAUSE_SECONDS_MIN, part * waited_seconds), most)
