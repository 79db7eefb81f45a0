"""Skips the last tests of a run on a machine that is too slow, and reports how many."""

from __future__ import annotations

import time
from typing import Any

import pytest

__all__ = ["LeftOut"]

_REASON = "no time was left to begin it"


class LeftOut:
    """The pytest plugin, in each worker and in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds_max: float = config.getoption("begin_seconds_max")
        self._began, self._count = time.monotonic(), 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skip before the fixtures run, which may take long."""
        if self._seconds_max and time.monotonic() - self._began > self._seconds_max:
            pytest.skip(_REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count += report.skipped and _REASON in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._count:
            terminalreporter.write_line(
                f"{self._count} tests are left out: none begins after {self._seconds_max:g} seconds"
            )
