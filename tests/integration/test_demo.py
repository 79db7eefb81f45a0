"""A small `make demo`, a newcomer's first contact, must pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import REPOSITORY

pytestmark = [pytest.mark.mpi]

STEPS, EVERY = 60, 10


def demo(out: Path, launcher: str = "mpirun") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", "--small", "--steps", str(STEPS), "--every", str(EVERY)]
    return subprocess.run(
        [*command, "--out", str(out), "--launcher", launcher],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    done = demo(tmp_path)
    assert done.returncode == 2
    assert "--out" in done.stdout
    assert precious.read_text() == "years of work"
