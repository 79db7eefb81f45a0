"""Runs of W&B, TensorBoard and MLflow, in offline mode, across a job that is killed and resumed.

Killed with SIGKILL after step 37, resumed from step 29: one run in each, with each step once, and marks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import tracked, tracked_branch, tracked_runs
from tests.support import trackers
from tests.support.cluster import Cluster, kill_ranks
from tests.support.once import made_once

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not (trackers.HOME / "wandb").is_dir(), reason=trackers.MISSING),
]

STEPS, EVERY, KILLED_AT, SAVED = 42, 10, 37, 29
SEEN = "seen.json"
BRANCH = [[step, 200 + step] for step in range(3, 7)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = made_once(tmp_path_factory, "trackers", _kill_and_resume)
    found: dict[str, Any] = json.loads((directory / SEEN).read_text())
    return found


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = made_once(tmp_path_factory, "tracked-branches", _rewind)
    found: dict[str, Any] = json.loads((directory / SEEN).read_text())
    return found


def _rewind(directory: Path) -> None:
    for attempt in ("1", "2"):
        _run(directory, tracked_branch.__file__, str(directory), attempt)
    (directory / SEEN).write_text(
        _run(directory, tracked_runs.__file__, str(directory), str(directory / "events"))
    )


def _run(directory: Path, *arguments: str) -> str:
    env = {**os.environ, **trackers.environment(directory)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


def _kill_and_resume(directory: Path) -> None:
    env = trackers.environment(directory)
    cluster = Cluster(directory, str(directory / "store"), env, script=tracked.__file__)
    with cluster.start(2, str(STEPS), str(EVERY), str(KILLED_AT)) as job:
        kill_ranks(cluster, job, 2, 1, saved=SAVED)
    with cluster.start(2, str(STEPS), str(EVERY)) as job:
        job.succeed(120)
    seen = _run(directory, tracked_runs.__file__, str(directory), str(cluster.out(1) / "events"))
    (directory / SEEN).write_text(seen)


KINDS = ("wandb", "tensorboard", "mlflow")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_has_one_run_with_each_step_once(runs: dict[str, Any], kind: str) -> None:
    assert runs[kind]["runs"] == 1
    points = runs[kind]["charts"]["loss"]
    assert [step for step, _ in points] == [*range(STEPS)]
    assert [value for _, value in points] == pytest.approx([1 / (step + 1) for step in range(STEPS)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_has_marks_at_the_steps_that_they_are_about(runs: dict[str, Any], kind: str) -> None:
    charts = runs[kind]["charts"]
    assert charts["holdfast/attempt"] == [[0, 1], [SAVED + 1, 2]]
    for name in ("stall_seconds", "staged_seconds", "durable_seconds"):
        points = charts[f"holdfast/{name}"]
        assert [step for step, _ in points] == [9, 19, 29, 39], name
        assert all(value >= 0 for _, value in points)
    [said] = [text for text in runs[kind]["texts"] if "resumed" in text]
    assert said.startswith(f"attempt 2 resumed from step {SAVED} of attempt 1, read from ")


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_the_run_says_how_many_steps_were_lost(runs: dict[str, Any], kind: str) -> None:
    lost = KILLED_AT - SAVED
    # The row of step 37 was still open, so W&B had not written it.
    assert runs[kind]["charts"]["holdfast/lost_steps"] == [[SAVED + 1, lost - (kind == "wandb")]]


def test_a_rewound_training_hides_the_other_branch_in_tensorboard(branches: dict[str, Any]) -> None:
    assert branches["tensorboard"]["charts"]["loss"] == [*([step, 100 + step] for step in range(3)), *BRANCH]
    assert branches["tensorboard"]["charts"]["holdfast/attempt"] == [[0, 1], [3, 2]]


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_rewound_training_begins_another_run_where_points_stay(branches: dict[str, Any], kind: str) -> None:
    assert branches[kind]["runs"] == 2
    points = branches[kind]["charts"]["loss"]
    assert points[-len(BRANCH) :] == BRANCH
    assert all(value < 200 for _, value in points[: -len(BRANCH)]), (
        "all of the other branch, and no more of this one"
    )
    assert "rewound to step 2" in branches[kind]["texts"]
    assert len(branches[kind]["texts"]) == 2, "the other one is the run that it was rewound from"
