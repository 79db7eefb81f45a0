"""The connection to the flusher. When the flusher dies it is lost, and a thread finds or starts another flusher.

    attached ── its socket ends ──► lost ── thread: attach ─► found ── the service takes it ──► attached
                                     ▲           │ none: a pause, longer each time
                                     └───────────┘

The thread only attaches: all MPI calls stay in the stager's loop, which continues. Messages are dropped while no
flusher is attached: the next flusher is told what the session knows.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.image.layout import Layout
from holdfast.image.shares import WHOLE, ImageShare, Shares
from holdfast.log_files import log_path
from holdfast.process import wait_readable
from holdfast.ring.doorbell import Message
from holdfast.store import part_chunks_for
from holdfast.telemetry.events import EventLog
from stager.flusher_process import Flusher, attach

_log = logging.getLogger("holdfast.stager")

_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 0.5, 30.0
_POINT_TO_LOG_AFTER = 5  # flushers that ended without having done anything
# Messages in the channel. More wait here: the channel would take a long replay for a dead peer.
_UNSENT_MAX = 1024


class FlusherConnection:
    """The stager's connection to its flusher. All methods belong to the loop's thread.

    Attributes:
        flusher: The flusher that is or was attached; its ring stays mapped.
        lost_reason: Why no flusher is attached; empty while one is.
        failures: How many flushers in a row ended without progress or could not be started.
        held: The store error that the flusher reports; empty while the store works.
        attempts: Attempts of this job; more than one after a flusher had to make a new ring.
    """

    def __init__(
        self,
        config: StagerConfig,
        flusher: Flusher,
        *,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._events, self._clock = config, events, clock
        self.flusher = flusher
        self.lost_reason = self.held = ""
        self.failures = 0
        self.attempts = {flusher.attempt}
        self._unsent: deque[tuple[str, dict[str, Any]]] = deque()
        self._lost_at = self._retry_at = 0.0
        self._thread: threading.Thread | None = None
        self._found: queue.SimpleQueue[Flusher | HoldfastError] = queue.SimpleQueue()

    @property
    def leads_others(self) -> bool:
        """Whether other stagers have the attempt of this one's flusher."""
        return self._config.share.is_lead and self._config.share != WHOLE

    def share_of(self, layout: Layout) -> ImageShare:
        """The share of an image that this stager receives; the ranks compute the same one."""
        number, url = self._config.share, self.flusher.store_url
        part_chunks = 1 if number == WHOLE else part_chunks_for(url, layout.image_bytes, layout.chunk_bytes)
        return ImageShare(Shares.of(layout, number.writers, part_chunks), number.index)

    @property
    def log_path(self) -> Path:
        return log_path("flusher", self._config.store)

    # -- while it is attached ---------------------------------------------------------------------------------------

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the flusher; dropped if it is gone."""
        if not self.lost_reason:
            self._unsent.append((kind, fields))
            self._send_queued()

    def poll(self) -> list[Message]:
        """Return the flusher's messages; close the connection if it broke the protocol."""
        if self.lost_reason:
            return []
        self._send_queued()
        try:
            return self.flusher.channel.poll()
        except ProtocolError as error:
            self.disconnect(error)
            return []

    def wait(self, seconds: float, *others: int) -> None:
        """Sleep; wake when the flusher sends a message, or when one of `others` (descriptors) can be read."""
        if not self.flusher.channel.closed:
            others = (self.flusher.channel.fileno(), *others)
        if others:
            wait_readable(others, seconds)
        else:
            time.sleep(seconds)

    def reset_failures(self) -> None:
        """Reset the count of failures: this flusher has made progress."""
        self.failures = 0

    def disconnect(self, error: ProtocolError) -> None:
        """End the connection to a flusher that cannot be trusted."""
        _log.error("the flusher broke the protocol: %s", error)
        self.flusher.channel.close()

    def _send_queued(self) -> None:
        channel = self.flusher.channel
        while self._unsent and channel.unsent < _UNSENT_MAX:
            kind, fields = self._unsent.popleft()
            channel.send(kind, **fields)

    # -- when it is lost ------------------------------------------------------------------------------------------

    def check_exited(self) -> bool:
        """Return whether the flusher has ended since the last call; if so, schedule the search for another."""
        if self.lost_reason or not self.flusher.channel.closed:
            return False
        pid = self.flusher.pid
        self.lost_reason = f"the flusher (process {pid}) has ended, and no other one is ready yet"
        self._lost_at = self._clock()
        self._unsent.clear()
        _log.error(
            "the flusher (process %d) has ended; the ring is kept, and another flusher is started", pid
        )
        self._events.emit("flusher_lost", {"pid": pid})
        self._count_failure("")
        return True

    def poll_replacement(self) -> Flusher | None:
        """Return another flusher once the thread has found it, for `switch_to`. Never waits."""
        if not self.lost_reason:
            return None
        if self._thread is None:
            if self._clock() >= self._retry_at:
                self._thread = threading.Thread(
                    target=self._find_replacement, name="holdfast-flusher", daemon=True
                )
                self._thread.start()
            return None
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return None
        self._thread.join()
        self._thread = None
        if isinstance(found, Flusher):
            return found
        self.lost_reason = (
            f"the flusher (process {self.flusher.pid}) has ended, and no other one could be started: {found}"
        )
        self._count_failure(str(found))
        return None

    def switch_to(self, flusher: Flusher) -> None:
        """Switch to this flusher. Close the old ring, unless the new flusher has kept it."""
        if flusher.ring is not self.flusher.ring:
            self.flusher.ring.close()
        self.flusher.channel.close()
        self.flusher = flusher
        self.attempts.add(flusher.attempt)
        self.lost_reason = self.held = ""
        seconds = self._clock() - self._lost_at
        self._events.emit(
            "flusher_replaced",
            {
                "pid": flusher.pid,
                "attempt": flusher.attempt,
                "resumed": flusher.resumed,
                "seconds": round(seconds, 6),
            },
        )
        what = "has kept the ring" if flusher.resumed else "has a new ring"
        _log.warning(
            "another flusher (process %d) %s, %.1f s after the end of the last one",
            flusher.pid,
            what,
            seconds,
        )

    def close(self) -> None:
        """Detach from the flusher, which keeps running."""
        self.flusher.close()

    def _count_failure(self, why: str) -> None:
        """Count one more failure; the pause before the next try grows."""
        self.failures += 1
        pause_seconds = 0.0
        if self.failures > 1:
            pause_seconds = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS_MIN * 2 ** min(self.failures - 2, 16))
        self._retry_at = self._clock() + pause_seconds
        if why:
            _log.error("no other flusher could be started: %s; retried in %g s", why, pause_seconds)
        if self.failures >= _POINT_TO_LOG_AFTER:
            _log.error(
                "flushers have ended or failed to start %d times with nothing done in between; %s says why. The next "
                "one is started in %g s",
                self.failures,
                self.log_path,
                pause_seconds,
            )

    def _find_replacement(self) -> None:
        """The thread: find or start one."""
        ring = self.flusher.ring
        update = {"chunk_bytes": ring.chunk_bytes}  # the trainers were told these sizes
        if self._config.ring_bytes is not None:
            update["ring_bytes"] = ring.chunk_bytes * ring.ring_chunks
        try:
            found = attach(
                self._config.model_copy(update=update),
                previous=self.flusher,
                lead_attempt=0 if self._config.share.is_lead else self.flusher.attempt,
            )
            if found.ring.chunk_bytes != ring.chunk_bytes:
                found.close()
                raise ProtocolError(
                    f"the flusher (process {found.pid}) has chunks of {found.ring.chunk_bytes} bytes, expected "
                    f"{ring.chunk_bytes}, with which this job began; end that flusher, so that a new one can be started"
                )
        except HoldfastError as error:
            self._found.put(error)
        except Exception as error:  # noqa: BLE001 - the loop logs any failure and retries
            self._found.put(PeerLost(f"{type(error).__name__}: {error}"))
        else:
            self._found.put(found)
