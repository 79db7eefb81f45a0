"""Sends messages about a run that has a stager and no supervisor: follows the event log of stager and flusher.

stager, flusher ─► event log ─► follower, in a thread of its own ─► notifier ─► destinations

The stager's loop is not involved: neither a slow destination nor a slow disk under the log delays a rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.notify.notifier import CLOSE_SECONDS_MAX, Notifier
from holdfast.telemetry.event_follower import Follower

_log = logging.getLogger("holdfast.stager")

_POLL_SECONDS = 0.5


class LogWatch(threading.Thread):
    """Thread that starts itself. `events`: the log, may not exist yet; old lines are skipped. Closes `notifier`."""

    def __init__(self, events: Path, notifier: Notifier) -> None:
        super().__init__(name="notify-log", daemon=True)
        self._follower, self._notifier = Follower(events), notifier
        self._closing = threading.Event()
        self._last: Mapping[str, Any] | None = None
        self.start()

    def run(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
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
