"""How long the link's thread pauses between polls, since each poll takes time from the training.

busy ─► a short pause, then longer ones, up to a limit that depends on what the link waits for:
credits and answers ─ 0.5 ms      only DURABLE ─ 2 ms      nothing ─ 10 ms
a payload that moves only while both sides poll ─► no pause, as long as it moves now and then

After a long wait the pause is a fiftieth of the wait so far, at most 20 ms: polling every half millisecond does not
make a slow store faster, and the pause delays no message by more than that.

With more than two processes per core, the limits grow with the number of processes, up to 20 ms: otherwise ranks that
poll without result would leave the stager no time to receive what the others send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainer_side.link.outbox import Outbox

_SECONDS_MIN = 0.2e-3  # the stager takes ten times as long for a payload
_SENDING_SECONDS_MAX = 0.5e-3
_STAGED_SECONDS_MAX = 2e-3  # only DURABLE is still to come
_IDLE_SECONDS_MAX = 10e-3  # delays only messages of the stager: an offer wakes the thread at once
_SECONDS_MAX = 20e-3
_PER_SECOND_WAITED = 0.02
_STREAMING_SECONDS = 0.02  # payloads over a network, or in many pieces, move only while both sides poll
_GROWTH = 1.3
_PROCESSES_PER_CORE_MAX = 2.0  # processes per core, above which the pauses grow


class PollBackoff:
    """The pauses of the link's thread. Link's thread, except `wake`.

    `outbox`: The checkpoints in flight; replaced together with the stager. `processes_per_core`: Processes of the job
    on this machine per core.
    """

    def __init__(self, outbox: Outbox, clock: Callable[[], float], processes_per_core: float) -> None:
        self.outbox, self._clock, self._pause_factor = (
            outbox,
            clock,
            max(1.0, processes_per_core / _PROCESSES_PER_CORE_MAX),
        )
        self._wake = threading.Event()
        self._active_at = clock()
        self._seconds = _SECONDS_MIN

    def wake(self) -> None:
        """End the current pause. Any thread."""
        self._wake.set()

    def reset(self) -> None:
        """Make the next pause short, since something has happened."""
        self._active_at = self._clock()
        self._seconds = _SECONDS_MIN

    def pause(self, *, is_fetching: bool) -> None:
        """Pause. `is_fetching`: An answer to a fetch is pending."""
        now = self._clock()
        if self.outbox.check_stall(now):
            self._active_at = now
        if self.outbox.is_streaming and now - self._active_at < _STREAMING_SECONDS:
            time.sleep(0 if self._pause_factor == 1 else _SECONDS_MIN)
            return
        limit_seconds = _SENDING_SECONDS_MAX if is_fetching else _IDLE_SECONDS_MAX
        if self.outbox:
            limit_seconds = _STAGED_SECONDS_MAX if self.outbox.all_staged else _SENDING_SECONDS_MAX
        if not self.outbox.is_streaming:
            limit_seconds = max(limit_seconds, (now - self._active_at) * _PER_SECOND_WAITED)
        limit_seconds = min(_SECONDS_MAX, limit_seconds * self._pause_factor)
        self._wake.wait(self._seconds)
        self._wake.clear()
        self._seconds = min(limit_seconds, self._seconds * _GROWTH)
