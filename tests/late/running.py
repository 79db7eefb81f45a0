"""Runs tests on the late device in a separate process; skips them if the late runtime cannot be made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.late.provision import LateRuntime, NoLateRuntime, install

SECONDS_MAX = 1200
ROOT = Path(__file__).resolve().parents[2]


def late_runtime() -> LateRuntime:
    """The runtime; installs it first if necessary."""
    try:
        return install()
    except NoLateRuntime as reason:
        pytest.skip(str(reason))


def run_late(*arguments: str) -> None:
    """Run `python -m tests.late ARGUMENTS`, which must pass."""
    _pass(*arguments, "-q")


def run_late_files(policies: str, files: Sequence[str]) -> None:
    """Run the tests of these files, each file in a process of its own."""
    _pass("--policies", policies, "--python", "-m", "tests.late.forked", policies, *files)


def _pass(*arguments: str) -> None:
    late_runtime()
    done = subprocess.run(
        [sys.executable, "-m", "tests.late", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout, done.stdout
