"""What scripts hand over at the door of the API by mistake, in real processes: it is right, or refused at the call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.jobs import doors
from tests.support.job import environment

SECONDS_MAX = 120.0
STEP = "step: expected a whole number of at least 0 and at most 4611686018427387903"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[str]]:
    def play(case: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, doors.__file__, str(tmp_path / "store"), f"file:{tmp_path / 'tier'}", case],
            env=environment(tmp_path / "runtime"),
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        said = done.stdout.splitlines()
        assert done.returncode == 0, done.stderr
        assert said[-1] == "done", done.stdout + done.stderr
        return said

    return play


def test_a_wrong_step_is_refused_at_the_call_and_the_next_ones_are_saved(
    run: Callable[[str], list[str]],
) -> None:
    said = run("numbers")
    assert said[:16] == [
        f"refused ConfigError {call}(): {STEP}" for _ in range(8) for call in ("save", "step")
    ]
    assert said[16:20] == ["saved True"] * 4
    assert "next 7 6" in said


def test_bytes_that_become_empty_are_saved_and_come_back(run: Callable[[str], list[str]]) -> None:
    said = run("emptied")
    assert "next 2 1" in said
    assert "back b'' b''" in said


def test_inference_tensors_and_bits_under_deterministic_algorithms_come_back(
    run: Callable[[str], list[str]],
) -> None:
    said = run("odd")
    assert "next 2 1" in said
    assert "inferred [2.0, 2.0, 2.0, 2.0, 2.0] [3.0]" in said


def test_a_second_checkpointer_is_refused_beside_the_first_and_works_after_it(
    run: Callable[[str], list[str]],
) -> None:
    said = run("second")
    (beside,) = [line for line in said if line.startswith("beside")]
    assert "ConfigError Checkpointer(...): this process has the Checkpointer of model, own," in beside
    assert "doors.py:" in beside
    assert "saved True" in said
    assert "next 2 1" in said


def test_a_forked_child_is_refused_and_its_end_harms_nothing(run: Callable[[str], list[str]]) -> None:
    said = run("forked")
    (worker,) = [line for line in said if line.startswith("worker")]
    assert "ConfigError step() in process" in worker
    assert "ConfigError save() in process" in worker
    assert "a forked child of training process" in worker
    assert [line for line in said if line.startswith("child")] == [
        "child close 0",
        "child leave 0",
        "child exit 0",
        "child error 1",
    ]
    assert "saved True" in said
    assert "next 2 1" in said
