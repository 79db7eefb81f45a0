"""Priority is given up once, and never taken."""

from __future__ import annotations

import subprocess
import sys

_TWICE = (
    "import os; from holdfast.process import yield_to_training as y; {}; y(5); y(10); y(5); print(os.nice(0))"
)


def _niceness(before: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _TWICE.format(before)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_process_yields_once_and_one_that_is_nicer_already_stays_so() -> None:
    assert _niceness("pass") == 10
    assert _niceness("os.nice(15)") == 15
