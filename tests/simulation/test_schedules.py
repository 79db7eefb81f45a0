"""Seeded schedules of the whole system, with faults at every step: no invariant breaks. `make soak` plays 10,000.

For more seeds, or others: `SIMULATION_SCHEDULES=200000 SIMULATION_FIRST_SEED=1000000 pytest -k test_schedules`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCHEDULES = int(os.environ.get("SIMULATION_SCHEDULES", "1000"))  # over MPI and TCP together
OVER_TCP = SCHEDULES // 10
FIRST_SEED = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
WORKERS = 2
SECONDS_MAX = 600 + SCHEDULES // 8  # on a busy machine; alone it takes minutes


def play(first: int, count: int, *options: str, **env: str) -> dict[str, object]:
    range_of_seeds = ["--first", str(first), "--count", str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--json", *range_of_seeds, *options],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(SECONDS_MAX + 60)
def test_seeded_schedules_break_no_invariant() -> None:
    each = -(-(SCHEDULES - OVER_TCP) // WORKERS)
    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(lambda n: play(FIRST_SEED + n * each, each), range(WORKERS)))
    lines = [
        f"seed {seed}: {failure}\n    python -m tests.simulation --seed {seed} --trace"
        for result in results
        for seed, failure in result["failures"]  # type: ignore[attr-defined]
    ]
    schedules = sum(int(result["schedules"]) for result in results)  # type: ignore[call-overload]
    events = sum(int(result["events"]) for result in results)  # type: ignore[call-overload]
    print(f"{schedules} schedules, {events} events")
    assert not lines, "\n".join(lines)
    assert schedules >= SCHEDULES - OVER_TCP
    assert events > 100 * schedules, "the schedules are too short to mean much"


@pytest.mark.timeout(SECONDS_MAX + 60)
def test_schedules_over_tcp() -> None:
    result = play(FIRST_SEED, OVER_TCP, "--tcp")
    lines = [f"seed {seed}: {failure}" for seed, failure in result["failures"]]  # type: ignore[attr-defined]
    assert not lines, "python -m tests.simulation --tcp --seed N --trace\n" + "\n".join(lines)
    assert int(result["events"]) > 300 * OVER_TCP, "the schedules are too short to mean much"  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [(), ("--tcp",)])
def test_a_seed_replays_exactly(options: tuple[str, ...]) -> None:
    """The same seed in two processes, after other seeds: the same events, to the last line."""

    def trace(seed: int) -> str:
        command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--trace", *options]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    seed = next(seed for seed in range(100) if "is killed" in trace(seed))
    assert trace(seed) == trace(seed)
