"""Runs a background thread of a training rank: an unexpected exception is logged once, and ends waits for the thread.

    work() returns ─► the thread ends
    work() raises ──► ERROR with its cause ─► on_death(error): releases the threads that wait for this one

Calls with a deadline (ranks/deadlines.py) run in other threads, and raise in the waiting thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.errors import PeerLost

_log = logging.getLogger("holdfast.trainer")


class ThreadDied(PeerLost):
    """A thread of this rank has ended by an exception that it should have handled."""


class BackgroundThread:
    """A daemon thread, begun by `start`.

    `task`: Its purpose, in words that follow `which`. `on_death`: Called in the dying thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        rank: int,
        task: str,
        on_death: Callable[[ThreadDied], object],
    ) -> None:
        self.name = name
        self._work, self._rank, self._task, self._on_death = work, rank, task, on_death
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds_max: float) -> None:
        """Wait until the thread ends, at most `seconds_max`."""
        self._thread.join(seconds_max)

    def _run(self) -> None:
        try:
            self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the thread must not end unnoticed
            self._on_death(thread_died(error, rank=self._rank, name=self.name, task=self._task))


def thread_died(error: BaseException, *, rank: int, name: str, task: str) -> ThreadDied:
    """Log what has ended a thread of this rank, with the traceback, and return it as an error. Dying thread."""
    found = ThreadDied(
        f"rank {rank}: the thread {name}, which {task}, has ended by {type(error).__name__}: {error}. This is a bug, "
        "or the process is short of memory: start the job again, and report the traceback in the log of this rank"
    )
    found.__cause__ = error
    _log.error("%s", found, exc_info=error)
    return found
