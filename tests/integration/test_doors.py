"""Mistaken arguments to the API, in real processes: each call does the right thing, or refuses at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.jobs import doors
from tests.support.job import environment

SECONDS_MAX = 120.0
STEP = "step: expected a whole number of at least 0 and at most 4611686018427387903"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run all cases in one process; return the output lines by case."""
    directory = tmp_path_factory.mktemp("doors")
    done = subprocess.run(
        [sys.executable, doors.__file__, str(directory), *doors.CASES],
        env=environment(directory / "runtime"),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = {part.partition("\n")[0]: part.splitlines()[1:] for part in done.stdout.split("case ")[1:]}
    assert all(lines[-1] == "done" for lines in cases.values()), done.stdout + done.stderr
    return cases


def test_a_wrong_step_is_refused_at_the_call_and_the_next_ones_are_saved(
    said: dict[str, list[str]],
) -> None:
    lines = said["numbers"]
    assert lines[:16] == [
        f"refused ConfigError {call}(): {STEP}" for _ in range(8) for call in ("save", "step")
    ]
    assert lines[16:20] == ["saved True"] * 4
    assert "next 7 6" in lines


def test_bytes_that_become_empty_are_saved_and_come_back(said: dict[str, list[str]]) -> None:
    lines = said["emptied"]
    assert "next 2 1" in lines
    assert "back b'' b''" in lines


def test_inference_tensors_and_bits_under_deterministic_algorithms_come_back(
    said: dict[str, list[str]],
) -> None:
    lines = said["odd"]
    assert "next 2 1" in lines
    assert "inferred [2.0, 2.0, 2.0, 2.0, 2.0] [3.0]" in lines


def test_a_second_checkpointer_is_refused_beside_the_first_and_works_after_it(
    said: dict[str, list[str]],
) -> None:
    lines = said["second"]
    (beside,) = [line for line in lines if line.startswith("beside")]
    assert "ConfigError Checkpointer(...): this process has the Checkpointer of model, own," in beside
    assert "doors.py:" in beside
    assert "saved True" in lines
    assert "next 2 1" in lines


def test_a_forked_child_is_refused_and_its_end_harms_nothing(said: dict[str, list[str]]) -> None:
    lines = said["forked"]
    (worker,) = [line for line in lines if line.startswith("worker")]
    assert "ConfigError step() in process" in worker
    assert "ConfigError save() in process" in worker
    assert "a forked child of training process" in worker
    assert [line for line in lines if line.startswith("child")] == [
        "child close 0",
        "child leave 0",
        "child exit 0",
        "child error 1",
    ]
    assert "saved True" in lines
    assert "next 2 1" in lines
