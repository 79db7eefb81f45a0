"""Results: one JSON line for each run of a cell, appended, so that several sessions add up.

{"cell": "mid-part x flusher (S3)", "passed": true, "seconds": 8.1, "session": "2026-11-21T14:20:00", …}
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support.job import REPOSITORY

__all__ = ["RESULTS", "Result", "append", "commit_here", "read"]

RESULTS = REPOSITORY / "build" / "chaos" / "results.jsonl"


class Result(NamedTuple):
    """One run of one cell."""

    cell: str
    passed: bool
    seconds: float
    session: str
    why: str = ""
    commit: str = ""


def commit_here() -> str:
    """The commit under test, with a plus if files differ from it; empty if git does not know."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()


def append(result: Result, path: Path = RESULTS) -> None:
    """Add one run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result._asdict()) + "\n")


def read(path: Path = RESULTS) -> Iterable[Result]:
    """All runs so far."""
    if path.exists():
        for line in path.read_text().splitlines():
            yield Result(**json.loads(line))
