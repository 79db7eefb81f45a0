"""A test that hangs fails by name, its children are killed, and its worker survives if it can.

timeout_seconds ─► SIGALRM: pytest-timeout fails the test where it waits
    a second later ─► SIGKILL for every process that the test started, so that no `finally` waits for one
    a minute later ─► the main thread is still in C code: tracebacks of all threads, and the worker ends
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

_GRACE_SECONDS = 1.0
_DEAF_SECONDS = 60.0
_RUN = "PYTEST_XDIST_TESTRUNUID"
_MARK = "PYTEST_CURRENT_TEST"  # pytest sets it for each phase of a test, and children inherit it


class Hangs:
    """The pytest plugin."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        # pytest redirects file descriptor 2 while a test runs.
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else 2

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Any:
        """Start our timer beside pytest-timeout's own alarm."""
        self._timer = threading.Timer(
            settings.timeout + _GRACE_SECONDS, end_children, [item.nodeid, _children()]
        )
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(settings.timeout + _DEAF_SECONDS, exit=True, file=self._stderr)
        return (yield)

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> Any:
        """Cancel the timers: the test is over."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return (yield)


def end_children(test: str, before: set[int]) -> None:
    """Kill the processes that the test started in its current phase; servers of shared fixtures stay.

    Args:
        test: Its id.
        before: The pids of the children at the start of the phase.

    Orphans are found by PYTEST_CURRENT_TEST in their environment, processes with another environment by their parent.
    """
    phase = os.environ.get(_MARK, "")
    if not phase.startswith(test):
        return  # the test has ended meanwhile
    new = [psutil.Process(pid) for pid in _children() - before if psutil.pid_exists(pid)]
    descendants = {process.pid for child in new for process in (child, *child.children(recursive=True))}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # the process has ended, or belongs to another user
            variables = process.environ()
            if _MARK in variables:
                ours = variables[_MARK] == phase and variables.get(_RUN) == os.environ.get(_RUN)
            else:
                ours = process.pid in descendants
            if ours and process.pid != os.getpid():
                process.kill()


def _children() -> set[int]:
    """This process's children, by a lookup that is cheap enough to run before each test."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found
