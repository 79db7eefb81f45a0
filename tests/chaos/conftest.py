"""What the scenarios of one session share: the uninterrupted runs, and the record of what was run."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cells import Cell
from tests.chaos.place import BucketPlace, DirectoryPlace
from tests.chaos.results import RESULTS, Result, append
from tests.chaos.scenario import uninterrupted

_SESSION = time.strftime("%Y-%m-%dT%H:%M:%S")
_ran: list[Result] = []


@pytest.fixture(scope="session")
def directory_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of the size that scenarios on a directory have."""
    directory = tmp_path_factory.mktemp("reference")
    uninterrupted(DirectoryPlace.settings, DirectoryPlace.size, directory)
    return directory


@pytest.fixture(scope="session")
def bucket_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of the size that scenarios on S3 have."""
    directory = tmp_path_factory.mktemp("reference-s3")
    uninterrupted(BucketPlace.settings, BucketPlace.size, directory)
    return directory


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `-m chaos`, leave out the cells that are not run each time."""
    if "chaos" in config.getoption("markexpr"):
        return
    left_out = [
        item
        for item in items
        if (cell := _cell(item) or _parameters(item).get("slot_cell")) is not None and not cell.regular
    ]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write down each cell that was run, for tests/chaos/table.py."""
    report = yield
    cell = _cell(item)
    if cell is not None and (report.when == "call" or report.failed) and not report.skipped:
        result = Result(cell.name, report.passed, round(call.duration, 1), _SESSION, _why(report))
        append(result)
        _ran.append(result)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the matrix took."""
    if _ran:
        seconds = sum(result.seconds for result in _ran)
        terminalreporter.write_line(
            f"kill matrix: {len(_ran)} cells in {seconds:.0f} s; written to {RESULTS}; "
            "python -m tests.chaos.table makes docs/kill-matrix.md of it"
        )


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _cell(item: pytest.Item) -> Cell | None:
    found = _parameters(item).get("cell")
    return found if isinstance(found, Cell) else None


def _why(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message)[:500] if crash is not None else ""
