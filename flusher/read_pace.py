"""How fast published checkpoints are read while others are written.

Training waits for the ring's chunks, and these for the store; nobody is in a hurry to have a checkpoint read. A read
therefore waits while anything is being written. But a training that always writes would never have a checkpoint
verified, and would pile up those that retention removes only once a newer one is. Therefore half as many bytes are
read as are written: while one checkpoint is read back, no more than two or three of its size come to be. A store that
takes nothing for seconds holds no read back.
"""

from __future__ import annotations

import threading

_READ_PER_WRITTEN = 0.5
_AHEAD_BYTES_MAX = 64 << 20  # what was written while nothing was read is not made up for
_WAITS_SECONDS_MAX = 2.0


class ReadPace:
    """See the module. Any thread. `waits_seconds_max`: how long one read waits while something is being written, and
    nothing of it gets done.
    """

    def __init__(self, waits_seconds_max: float = _WAITS_SECONDS_MAX) -> None:
        self._waits_seconds_max = waits_seconds_max
        self._changed = threading.Condition()
        self._is_busy = self._ended = False
        self._allowed_bytes = 0.0

    def busy(self, is_busy: bool) -> None:
        """Tell whether something is being written."""
        with self._changed:
            self._is_busy = is_busy
            self._changed.notify_all()

    def wrote(self, nbytes: int) -> None:
        """Note that `nbytes` have been written."""
        share = nbytes * _READ_PER_WRITTEN
        with self._changed:
            self._allowed_bytes = min(self._allowed_bytes + share, max(_AHEAD_BYTES_MAX, share))
            self._changed.notify_all()

    def wait(self, nbytes: int) -> bool:
        """Wait until `nbytes` may be read; False once it has ended."""

        def may_read() -> bool:
            return not self._is_busy or self._allowed_bytes > 0 or self._ended

        with self._changed:
            self._changed.wait_for(may_read, self._waits_seconds_max)
            if self._is_busy and self._allowed_bytes > 0:
                self._allowed_bytes -= nbytes
            return not self._ended

    def end(self) -> None:
        """Nothing waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
