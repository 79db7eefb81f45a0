"""CPU cost of a test run: CPU seconds of each test and of the whole run, and the time stolen by the host.

    each test: own CPU + CPU of children that ended ─► report ─► the slowest 25; a unit test over its budget fails
    each worker: all of its CPU ─► the sum, beside the wall clock and the host's steal

CPU seconds instead of wall time: a busy machine makes a test slow but not expensive. A child that outlives its test
(a server of the whole session) counts in the sum only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_server import cpu_seconds_of_ranks

_LISTED = 25
_KEY = "cpu_seconds"
_UNIT = "tests/unit/"
_REFERENCE_TURNS, _REFERENCE_SECONDS = 2_000_000, 0.08  # an idle core of 2023, Python 3.11


class Costs:
    """The pytest plugin, in each worker and in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._unit_seconds_max: float | None = config.getoption("unit_cpu_seconds_max")
        self._began = time.monotonic()
        self._steal_before = _steal_seconds()
        self._of_workers = 0.0
        self._tests: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Remember where the counter stood before the fixtures."""
        item.stash[_BEFORE] = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a unit test over the budget; fixtures do not count, since other tests may share them."""
        report = yield
        now = _cpu_seconds()
        spent, item.stash[_BEFORE] = now - item.stash[_BEFORE], now
        report.user_properties.append((_KEY, spent))
        limit = self._unit_seconds_max if item.nodeid.startswith(_UNIT) else None
        if limit and call.when == "call" and report.passed and spent > limit:
            slowness = _slowness()
            if spent > limit * slowness:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {spent:.1f} s of CPU, and a unit test has {limit:g} (UNIT_CPU_SECONDS_MAX) "
                    f"x {slowness:.1f}, as slow as this machine is now: make it smaller, or move it to "
                    "tests/integration or tests/soak"
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sum up over setup, call and teardown."""
        spent = sum(float(str(value)) for name, value in report.user_properties if name == _KEY)
        self._tests[report.nodeid] = self._tests.get(report.nodeid, 0.0) + spent
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker: send the sum to the controller."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = _cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add a worker's sum; a worker that crashed has none."""
        self._of_workers += getattr(node, "workeroutput", {}).get(_KEY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the slowest tests and the sum."""
        if not self._tests:
            return
        terminalreporter.section(f"the slowest {_LISTED}: on the clock, CPU")
        for name, seconds in sorted(self._seconds.items(), key=lambda one: -one[1])[:_LISTED]:
            terminalreporter.write_line(f"{seconds:7.1f} s {self._tests[name]:7.1f} s  {name}")
        folders: dict[str, float] = {}
        for name, spent in self._tests.items():
            folder = "/".join(name.split("::")[0].split("/")[:2])
            folders[folder] = folders.get(folder, 0.0) + spent
        terminalreporter.section("CPU by folder")
        for name, spent in sorted(folders.items(), key=lambda one: -one[1]):
            terminalreporter.write_line(f"{spent:7.0f} s  {name}")
        wall = time.monotonic() - self._began
        # Workers are children of this process, and have reported their own CPU seconds.
        total = sum(os.times()[:2]) + self._of_workers if self._of_workers else _cpu_seconds()
        stolen = _steal_seconds() - self._steal_before
        terminalreporter.write_line(
            f"{total:7.0f} s of CPU in all, {wall:.0f} s on the clock, {stolen:.0f} s taken by the host "
            f"({os.cpu_count()} cores)"
        )


_BEFORE = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    """CPU seconds of this process, its children that ended, and the ranks that it had forked elsewhere."""
    return sum(os.times()[:4]) + cpu_seconds_of_ranks()


def _slowness() -> float:
    """Ratio of the CPU time of the same work now and on the machine that the budgets were measured on; at least 1.

    A shared core takes twice the CPU seconds, and the budget must not fail a test for that.
    """
    begun, value = time.process_time(), 0
    for number in range(_REFERENCE_TURNS):
        value = (value * 31 + number) & 0xFFFF
    return max(1.0, (time.process_time() - begun) / _REFERENCE_SECONDS)


def _steal_seconds() -> float:
    """CPU seconds that the hypervisor gave to other virtual machines, over all cores; 0 where unknown."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
