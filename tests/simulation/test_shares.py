"""Seeded schedules of several flushers that write one file: no invariant breaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULES = int(os.environ.get("SIMULATION_SCHEDULES", "1000")) // 4
FIRST_SEED = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
SECONDS_MAX = 600 + SCHEDULES


def play(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation.shares", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


@pytest.mark.timeout(SECONDS_MAX + 60)
def test_schedules_of_several_flushers() -> None:
    done = play("--json", "--first", str(FIRST_SEED), "--count", str(SCHEDULES))
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    lines = [f"seed {seed}: {failure}" for seed, failure in result["failures"]]
    assert not lines, "python -m tests.simulation.shares --seed N --trace\n" + "\n".join(lines)
    assert result["events"] > 300 * SCHEDULES, "the schedules are too short to mean much"


def test_a_seed_replays_exactly() -> None:
    """The same seed twice: the same events, to the last line."""
    first, second = (play("--seed", "24", "--trace") for _ in range(2))
    assert "is killed" in first.stdout
    assert first.returncode == 0, first.stdout[-2000:]
    # Each run is a separate process, with its rings in a separate folder.
    said, said_again = (
        re.sub(r"holdfast-sim-\w+|pid': \d+", "its own", run.stdout) for run in (first, second)
    )
    assert said == said_again
