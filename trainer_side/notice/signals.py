"""A signal of this process as a notice: mpirun, Slurm, Kubernetes and systemd send one before they kill.

    first signal   ─► Notice(terminate, in grace seconds); training continues
    second SIGTERM ─► ends the process, as it would without the watch
    second SIGUSR1 ─► nothing: it is no news
    after close()  ─► SIGTERM ends the process, SIGUSR1 does nothing

A second signal within two seconds counts as the first one: Slurm sends a signal to every process of a job, and torchrun
and `holdfast rank` among them pass it on. SIGTERM ends a forked child as it would without the watch.

The handler is Python's: it runs between two operations of the main thread, so after the collective call or kernel
launch that thread is in. It also calls a handler that the script had set before, each time. The handler stays until the
process ends: without one SIGUSR1 would kill it, and the sender does not know when close() was called.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.notices.notice import Notice, NoticeKind

_REPEAT_SECONDS = 2.0


class SignalSource:
    """A `NoticeSource` for one signal. Made and closed in the main thread; ValueError: this is another thread.

    The process is expected to be killed `grace_seconds` after the signal. The handler calls `wake`, and `is_void`:
    whether the signal is no notice now, and has the same effect as without the watch.
    """

    def __init__(
        self,
        number: signal.Signals,
        *,
        grace_seconds: float,
        wake: Callable[[], None],
        is_void: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = number.name.lower()
        self._number, self._grace_seconds = number, grace_seconds
        self._wake, self._is_void, self._clock = wake, is_void, clock
        self._received_at: float | None = None
        self._pid, self._closed = os.getpid(), False
        self._previous_handler: Any = None
        before: Any = signal.signal(number, self._handle_signal)
        while isinstance(earlier := getattr(before, "__self__", None), SignalSource):
            before = earlier._previous_handler  # of a Checkpointer that was closed
        self._previous_handler = before

    def poll(self) -> list[Notice]:
        if self._received_at is None:
            return []
        deadline_unix = self._received_at + self._grace_seconds
        said_by = f"{self._number.name} of process {os.getpid()}"
        return [Notice(NoticeKind.TERMINATE, deadline_unix, self.name, said_by)]

    @property
    def ends_by_default(self) -> bool:
        """Whether the signal would end this process without the watch, as the script has no handler. Any thread."""
        installed = getattr(signal.getsignal(self._number), "__self__", None)
        return installed is self and self._previous_handler in (None, signal.SIG_DFL)

    def close(self) -> None:
        """Take no further signal for a notice. The handler stays."""
        self._closed = True

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid and self.ends_by_default and self._is_void():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if os.getpid() == self._pid:
            now = self._clock()
            is_repeat = self._received_at is not None and 0 <= now - self._received_at < _REPEAT_SECONDS
            is_news = self._received_at is None and not self._closed
            if is_news:
                self._received_at = now
                self._wake()
        else:  # a forked child: its signals are no notice for the training
            is_repeat = is_news = False
        if callable(self._previous_handler):
            self._previous_handler(number, frame)
        elif number == signal.SIGTERM and not (is_news or is_repeat):
            self.restore_handler()
            os.kill(os.getpid(), number)

    def restore_handler(self) -> None:
        """Restore the handler that was set before this one."""
        signal.signal(self._number, self._previous_handler or signal.SIG_DFL)


def _restore_sigterm() -> None:
    """Restore SIGTERM in a forked child, where Python's handler would wait for a running call, such as a long sleep."""
    if isinstance(source := getattr(signal.getsignal(signal.SIGTERM), "__self__", None), SignalSource):
        source.restore_handler()


os.register_at_fork(after_in_child=_restore_sigterm)
