"""The pace at which published checkpoints are read back while others are written.

Training waits for slots of the ring, and these for the store; nobody is in a hurry to have a checkpoint read. A read
therefore waits while anything is being written. But a training that always writes would never have a checkpoint
verified, and retention, which waits for newer verified ones, would let old ones pile up. Therefore half as many bytes
are read as are written: during one read-back, at most two or three checkpoints of its size are written. If the store
accepts nothing for seconds, reads go ahead.
"""

from __future__ import annotations

import threading

_READ_PER_WRITTEN = 0.5
_AHEAD_BYTES_MAX = 64 << 20  # limit of what may be read in return for earlier writes
_WAITS_SECONDS_MAX = 2.0


class ReadPace:
    """Paces reads. Any thread. `waits_seconds_max`: how long one read waits while writes make no progress."""

    def __init__(self, waits_seconds_max: float = _WAITS_SECONDS_MAX) -> None:
        self._waits_seconds_max = waits_seconds_max
        self._changed = threading.Condition()
        self._is_busy = self._ended = False
        self._allowed_bytes = 0.0

    def set_busy(self, is_busy: bool) -> None:
        """Set whether something is being written."""
        with self._changed:
            self._is_busy = is_busy
            self._changed.notify_all()

    def add_written(self, nbytes: int) -> None:
        """Note that `nbytes` have been written."""
        share = nbytes * _READ_PER_WRITTEN
        with self._changed:
            self._allowed_bytes = min(self._allowed_bytes + share, max(_AHEAD_BYTES_MAX, share))
            self._changed.notify_all()

    def wait(self, nbytes: int) -> bool:
        """Wait until `nbytes` may be read; return False after `end`."""

        def may_read() -> bool:
            return not self._is_busy or self._allowed_bytes > 0 or self._ended

        with self._changed:
            self._changed.wait_for(may_read, self._waits_seconds_max)
            if self._is_busy and self._allowed_bytes > 0:
                self._allowed_bytes -= nbytes
            return not self._ended

    def end(self) -> None:
        """Release everyone who waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
