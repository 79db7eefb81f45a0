"""A signal of this process as a notice: what mpirun, Slurm, Kubernetes and systemd send before they kill.

    first signal ─► Notice(terminate, in grace seconds); training goes on
    second one   ─► what it would have done without the watch: SIGTERM ends the process

A second one within two seconds is the first one again: Slurm sends a signal to every process of a job, and torchrun
and `holdfast rank` among them pass it on.

The handler is Python's: it runs between two operations of the main thread, and so after the collective call or kernel
launch that thread is in. A handler that the script had set before is called as well, each time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.notices.notice import Notice, NoticeKind

_SAME_SECONDS = 2.0


class Signal:
    """A source that hears one signal. Made, and closed, in the main thread.

    Args:
        number: SIGTERM or SIGUSR1.
        grace_seconds: How long after the signal the process is expected to be killed.
        wake: Called in the handler; must be safe there (`SimpleQueue.put`).
        clock: Seconds since 1970.

    Raises:
        ValueError: This is not the main thread.
    """

    def __init__(
        self,
        number: signal.Signals,
        *,
        grace_seconds: float,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = number.name.lower()
        self._number, self._grace_seconds = number, grace_seconds
        self._wake, self._clock = wake, clock
        self._heard_at: float | None = None
        self._before: Any = signal.signal(number, self._hear)

    def look(self) -> list[Notice]:
        if self._heard_at is None:
            return []
        deadline_unix = self._heard_at + self._grace_seconds
        return [
            Notice(
                NoticeKind.TERMINATE,
                deadline_unix,
                self.name,
                f"{self._number.name} of process {os.getpid()}",
            )
        ]

    def close(self) -> None:
        """Give the signal back, unless the script has taken it since. Main thread."""
        if signal.getsignal(self._number) == self._hear:
            signal.signal(self._number, self._before if self._before is not None else signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        again = self._heard_at is not None and not 0 <= now - self._heard_at < _SAME_SECONDS
        if self._heard_at is None:
            self._heard_at = now
            self._wake()
        if callable(self._before):
            self._before(number, frame)
        elif again:
            signal.signal(number, self._before if self._before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
