"""`make demo`, small: what a newcomer sees first must hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

STEPS, EVERY = 60, 10


def demo(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", "--small", "--steps", str(STEPS), "--every", str(EVERY)]
    return subprocess.run(
        [*command, "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.soak
def test_a_killed_run_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    out = tmp_path / "demo-run"
    done = demo(out)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["passed"]
    assert len(result["checks"]) >= 10
    figures = result["figures"]
    assert STEPS // 2 <= figures["killed_after_step"] < STEPS - 1
    assert 0 < figures["resumed_from_step"] <= figures["killed_after_step"]
    assert (figures["resumed_from_step"] + 1) % EVERY == 0
    for name in ("image_bytes", "cst_seconds", "pgt1_seconds", "pgt2_seconds", "restore_seconds"):
        assert figures[name], name
    assert "resumed from step" in done.stdout


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    done = demo(tmp_path)
    assert done.returncode == 2
    assert "--out" in done.stdout
    assert precious.read_text() == "years of work"
