"""How long the link's thread pauses between polls: each poll costs time that training could use.

busy ─► a short pause, and a longer one each time, up to what the link waits for:
credits and answers ─ 0.5 ms      only the word that all is durable ─ 2 ms      nothing ─ 10 ms
a payload that moves only while both sides poll ─► no pause, as long as something moves now and then

After a long wait the pause is a fiftieth of the wait so far, at most 20 ms. Polling the ring every half millisecond
does not make a slow store faster, and nothing is delayed by more than that.

With more than two processes for each core, all pauses but the longest grow with their number: ranks that look and
find nothing would leave the stager no time to take what the others send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainer_side.link.outbox import Outbox

_SECONDS_MIN = 0.2e-3  # the stager takes ten times as long for a payload
_SENDING_SECONDS_MAX = 0.5e-3
_STAGED_SECONDS_MAX = 2e-3  # what is left of it is the stager's word that it is durable
_IDLE_SECONDS_MAX = 10e-3  # an offer wakes the thread at once; only the stager's news wait so long
_SECONDS_MAX = 20e-3
_PER_SECOND_WAITED = 0.02
_STREAMING_SECONDS = 0.02  # what goes over a network, or in many pieces, moves only while both sides poll
_GROWTH = 1.3
_CROWD = 2.0  # processes for each core; with more the pauses grow


class PollBackoff:
    """See the module. For the link's thread.

    `outbox` says what is under way; it is replaced with the stager. `crowding` is the number of processes of the job on
    this machine for each of its cores.
    """

    def __init__(self, outbox: Outbox, clock: Callable[[], float], crowding: float) -> None:
        self.outbox, self._clock, self._crowding = outbox, clock, max(1.0, crowding / _CROWD)
        self._wake = threading.Event()
        self._active_at = clock()
        self._seconds = _SECONDS_MIN

    def wake(self) -> None:
        """There is something to do. Any thread."""
        self._wake.set()

    def busy(self) -> None:
        """Something has happened: the next pause is short."""
        self._active_at = self._clock()
        self._seconds = _SECONDS_MIN

    def rest(self, *, fetching: bool) -> None:
        """Give the core away. `fetching`: an answer to a fetch is waited for."""
        now = self._clock()
        if self.outbox.notice_stall(now):
            self._active_at = now
        if self.outbox.streaming and now - self._active_at < _STREAMING_SECONDS:
            time.sleep(0 if self._crowding == 1 else _SECONDS_MIN)
            return
        most_seconds = _SENDING_SECONDS_MAX if fetching else _IDLE_SECONDS_MAX
        if self.outbox:
            most_seconds = _STAGED_SECONDS_MAX if self.outbox.staged else _SENDING_SECONDS_MAX
        if not self.outbox.streaming:
            most_seconds = max(most_seconds, (now - self._active_at) * _PER_SECOND_WAITED)
        most_seconds = min(_SECONDS_MAX, most_seconds * self._crowding)
        self._wake.wait(self._seconds)
        self._wake.clear()
        self._seconds = min(most_seconds, self._seconds * _GROWTH)
