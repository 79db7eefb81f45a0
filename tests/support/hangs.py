"""A test that hangs ends its children, fails by name, and takes no worker with it.

    timeout_seconds ─► SIGALRM: pytest-timeout fails the test where it waits
        a second later ─► SIGKILL for every process that the test started, so that no `finally` waits for one
        a minute later ─► the main thread was in C and heard nothing: tracebacks of all threads, and the worker ends
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

_GRACE_SECONDS = 1.0
_DEAF_SECONDS = 60.0
_MARK = "PYTEST_CURRENT_TEST"  # pytest sets it anew for each phase of a test, and children inherit it


class Hangs:
    """The plugin."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        # pytest puts another file in the place of the second descriptor while a test runs.
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else 2

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Any:
        """Beside pytest-timeout's own alarm."""
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._timer = threading.Timer(settings.timeout + _GRACE_SECONDS, end_children, [item.nodeid, before])
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(settings.timeout + _DEAF_SECONDS, exit=True, file=self._stderr)
        return (yield)

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> Any:
        """The test is over."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return (yield)


def end_children(test: str, spared: set[int]) -> None:
    """Kill what was started in the phase in which the test is now: servers that fixtures made for others stay.

    An orphan has another parent by now, and is known by its environment; one that cleared it, by its parent.
    """
    phase = os.environ.get(_MARK, "")
    ours = psutil.Process()
    kept = {ours.pid, *spared}
    descendants = {process.pid for process in ours.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid in kept:
            continue
        mark = _environment(process.pid).get(_MARK)
        same_run = _environment(process.pid).get("PYTEST_XDIST_TESTRUNUID") == os.environ.get(
            "PYTEST_XDIST_TESTRUNUID"
        )
        started_here = mark == phase and same_run if mark is not None else process.pid in descendants
        if started_here and phase.startswith(test):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _environment(pid: int) -> dict[str, str]:
    """As it was when the process began; empty where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(field.partition("=")[::2] for field in fields if "=" in field)
