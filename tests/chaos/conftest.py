"""Shared fixtures of the scenarios: the uninterrupted runs, and the record of the cells that were run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.cells import Cell
from tests.chaos.cut_off import CutCell
from tests.chaos.freezing import FreezeCell
from tests.chaos.place import BucketPlace, DirectoryPlace, GrowingPlace
from tests.chaos.restarted_stagers import RestartCell
from tests.chaos.results import RESULTS, Result, append, commit_here
from tests.chaos.scenario import uninterrupted
from tests.chaos.share_cells import ShareCell
from tests.chaos.share_scenario import RankShareCell
from tests.chaos.slots import Machine
from tests.chaos.wrappers import WrapperCell
from tests.support.once import made_once

_SESSION = time.strftime("%Y-%m-%dT%H:%M:%S")
_COMMIT = commit_here()
_ran: list[Result] = []


@pytest.fixture(scope="session")
def directory_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with the state size of scenarios on a directory."""
    return made_once(
        tmp_path_factory, "chaos", partial(uninterrupted, DirectoryPlace.settings, DirectoryPlace.size)
    )


@pytest.fixture(scope="session")
def split_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of a model that FSDP2 has split, with whole tensors of each save beside it."""
    return made_once(
        tmp_path_factory,
        "chaos-split",
        partial(uninterrupted, DirectoryPlace.settings, DirectoryPlace.split_size),
    )


@pytest.fixture(scope="session")
def growing_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with a state size for which a ring grows."""
    return made_once(
        tmp_path_factory, "chaos-growth", partial(uninterrupted, GrowingPlace.settings, GrowingPlace.size)
    )


@pytest.fixture(scope="session")
def bucket_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with the state size of scenarios on S3."""
    return made_once(
        tmp_path_factory, "chaos-s3", partial(uninterrupted, BucketPlace.settings, BucketPlace.size)
    )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine with a memory of its own, for jobs without a stager."""
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="holdfast-test-"))
    yield Machine(tmp_path, memory)
    shutil.rmtree(memory)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record each cell that was run, for tests/chaos/table.py."""
    report = yield
    cell = _cell(item)
    if cell is not None and (report.when == "call" or report.failed) and not report.skipped:
        result = Result(cell.name, report.passed, round(call.duration, 1), _SESSION, _why(report), _COMMIT)
        append(result)
        _ran.append(result)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the matrix took."""
    if _ran:
        seconds = sum(result.seconds for result in _ran)
        terminalreporter.write_line(
            f"kill matrix: {len(_ran)} cells in {seconds:.0f} s; written to {RESULTS}; "
            "python -m tests.chaos.table makes docs/kill-matrix.md of it"
        )


_Recorded = Cell | FreezeCell | CutCell | ShareCell | RankShareCell | RestartCell | WrapperCell


def _cell(item: pytest.Item) -> _Recorded | None:
    callspec = getattr(item, "callspec", None)
    found = None if callspec is None else callspec.params.get("cell")
    return found if isinstance(found, _Recorded) else None


def _why(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message)[:500] if crash is not None else ""
