"""Sends messages about a run to people, without delaying the run.

notify(event) ─► alert ─► rate limit per kind ─► a bounded queue and a thread for each destination ─► tries, with pauses

Without `holdfast run` a thread of the stager's process follows the event log of stager and flusher. The stager's loop
is not involved: neither a slow destination nor a slow disk under the log delays a rank.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from holdfast.notify.alert import Alert, alert_for
from holdfast.notify.webhook import Undelivered
from holdfast.telemetry.event_follower import Follower

WINDOW_SECONDS = 300.0
CLOSE_SECONDS_MAX = 10.0
PAUSES_SECONDS = (1.0, 4.0)  # between the tries for one message
_QUEUED_MAX = 64
_LOG_POLL_SECONDS = 0.5

_log = logging.getLogger("holdfast.run")


class Destination(Protocol):
    """A receiver of messages. `name`: for people, without secrets."""

    name: str

    def send(self, alert: Alert, context: Mapping[str, Any]) -> Undelivered | None: ...


class AlertRateLimiter:
    """Rate limit: at most one message of a kind within a window; the next one has the count of those dropped. Pure."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._sent: dict[str, float] = {}
        self._dropped: Counter[str] = Counter()

    def admit(self, alert: Alert, now: float) -> Alert | None:
        """Return the message to send; None within the window of its kind. The last message of a run always passes."""
        if alert.kind == "over":
            rest = ", ".join(f"{count} × {kind}" for kind, count in sorted(self._dropped.items()))
            return alert._replace(text=f"{alert.text} (not sent: {rest})") if rest else alert
        if now < self._sent.get(alert.kind, float("-inf")) + self._window_seconds:
            self._dropped[alert.kind] += 1
            return None
        self._sent[alert.kind] = now
        count = self._dropped.pop(alert.kind, 0)
        more = f" ({count} more of this kind were not sent)" if count else ""
        return alert._replace(text=alert.text + more)


class _Sender(threading.Thread):
    """Thread for one destination, so that a slow destination does not delay others."""

    def __init__(self, destination: Destination, pauses_seconds: Sequence[float]) -> None:
        super().__init__(name="notify", daemon=True)
        self._destination, self._pauses = destination, pauses_seconds
        self._queue: queue.Queue[tuple[Alert, Mapping[str, Any]] | None] = queue.Queue(_QUEUED_MAX)
        self._closing = threading.Event()
        self._is_failing = False

    def put(self, alert: Alert, context: Mapping[str, Any]) -> None:
        try:
            self._queue.put_nowait((alert, context))
        except queue.Full:
            self._report_failure(f"{_QUEUED_MAX} messages are already queued")

    def close(self) -> None:
        """Send the queued messages without retries, and end."""
        self._closing.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._report_failure("too many messages are queued at the end")

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                problem = self._deliver(*item)
            except Exception:  # noqa: BLE001 - a bug here must not end the messages
                _log.exception("notify: %s", self._destination.name)
                continue
            if problem is None:
                self._is_failing = False
            else:
                self._report_failure(problem.reason)

    def _deliver(self, alert: Alert, context: Mapping[str, Any]) -> Undelivered | None:
        for pause in (*self._pauses, None):
            problem = self._destination.send(alert, context)
            if problem is None or not problem.may_retry or pause is None or self._closing.wait(pause):
                break
        return problem

    def _report_failure(self, reason: str) -> None:
        if not self._is_failing:
            _log.warning(
                "notify: a message to %s was not delivered: %s; the run continues, and further failures in a row are "
                "not logged",
                self._destination.name,
                reason,
            )
        self._is_failing = True


class Notifier:
    """Sends messages about a run. `notify` and `close`: from one thread, which they do not block for long. `run`: its
    URL; the password and query are removed. `window_seconds`: of the rate limit. `pauses_seconds`: between tries.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        *,
        run: str,
        is_unsupervised: bool = False,
        window_seconds: float = WINDOW_SECONDS,
        pauses_seconds: Sequence[float] = PAUSES_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        url = urlsplit(run)
        public = url._replace(netloc=url.netloc.rpartition("@")[2], query="").geturl()
        self._context = {"run": public, "host": socket.gethostname()}
        self._is_unsupervised = is_unsupervised
        self._rate_limiter, self._clock = AlertRateLimiter(window_seconds), clock
        self._senders = [_Sender(one, pauses_seconds) for one in destinations]
        for sender in self._senders:
            sender.start()
        if destinations:
            _log.info("notifications go to %s", ", ".join(one.name for one in destinations))

    def notify(self, event: Mapping[str, Any]) -> None:
        """Queue the message about an event, if it has one. Returns at once."""
        alert = alert_for(event, is_unsupervised=self._is_unsupervised) if self._senders else None
        admitted = None if alert is None else self._rate_limiter.admit(alert, self._clock())
        if admitted is None:
            return
        context = {**self._context, "time": round(time.time(), 3)}
        for sender in self._senders:
            sender.put(admitted._replace(text=f"{admitted.text} [{self._context['run']}]"), context)

    def close(self, seconds_max: float = CLOSE_SECONDS_MAX) -> None:
        """Wait until all messages are sent, at most `seconds_max`."""
        deadline = time.monotonic() + seconds_max
        for sender in self._senders:
            sender.close()
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))


class LogWatch(threading.Thread):
    """Thread that starts itself. `events`: the log, may not exist yet; old lines are skipped. Closes `notifier`."""

    def __init__(self, events: Path, notifier: Notifier) -> None:
        super().__init__(name="notify-log", daemon=True)
        self._follower, self._notifier = Follower(events), notifier
        self._closing = threading.Event()
        self._last: Mapping[str, Any] | None = None
        self.start()

    def run(self) -> None:
        while not self._closing.wait(_LOG_POLL_SECONDS):
            self._poll()
        self._poll()
        if self._last is not None:
            self._notifier.notify(self._last)
        self._notifier.close()
        self._follower.close()

    def close(self, last: Mapping[str, Any] | None = None) -> None:
        """Send messages for the rest of the log, then for `last`. Bounded in time; a second call sends nothing."""
        if not self._closing.is_set():
            self._last = last
            self._closing.set()
        self.join(2 * CLOSE_SECONDS_MAX)

    def _poll(self) -> None:
        try:
            while events := list(self._follower.read()):
                for event in events:
                    self._notifier.notify(event)
        except Exception:  # noqa: BLE001 - a bug here must not end the messages
            _log.exception("notify: an event could not be reported")
