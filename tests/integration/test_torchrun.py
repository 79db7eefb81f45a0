"""The main job under torchrun with local tiers and without a stager: killed, restarted, preempted, refused.

The reference for the resumed runs was made under mpirun.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_continued, load, losses, same, wait_until
from tests.support.events import read_events
from tests.support.job import REPOSITORY, Job, environment
from tests.support.main_job import PAUSE_AT, RUN, SAVED, STEPS
from tests.support.torchrun import by_torchrun, torchrun_command

pytestmark = [pytest.mark.mpi]
RANKS = 2
NEVER, MANY = 10_000, 100_000


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    disk = tmp_path / "disk"
    disk.mkdir()
    env = {
        "HOLDFAST_TIERS": f"file:{disk}",
        "HOLDFAST_STORE": str(tmp_path / "store"),
        "HOLDFAST_CHUNK_BYTES": "65536",
        "HOLDFAST_EVENTS": str(tmp_path / "events"),
        "TRAIN_WAITS_FOR": "kept",
    }
    return Cluster(tmp_path, env["HOLDFAST_STORE"], env, script=train.__file__)


def start(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
) -> Job:
    rewrite = by_torchrun(RANKS, restarts=restarts)
    return cluster.start(RANKS, *arguments, stager=False, rewrite=rewrite, env=env)


def events(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_events(cluster.directory / "events") if line["event"] == kind]


def pid(cluster: Cluster, rank: int) -> int:
    return int((cluster.out(1) / f"pid-{rank}").read_text())


def wait_for_pause(cluster: Cluster, job: Job) -> None:
    """Wait until all ranks pause, and know that step SAVED is complete."""

    def ready() -> bool:
        assert job.process.poll() is None, job.output()
        paused = all((cluster.out(1) / f"paused-{rank}").exists() for rank in range(RANKS))
        return paused and [event["step"] for event in events(cluster, "complete")].count(SAVED) == RANKS

    wait_until(ready, 240, lambda: f"no pause with step {SAVED} complete:\n{job.output()}")


def test_an_agent_that_is_killed_takes_its_ranks_with_it_and_a_new_one_resumes(
    cluster: Cluster, reference: Path
) -> None:
    with start(cluster, [*RUN, str(PAUSE_AT)]) as job:
        wait_for_pause(cluster, job)
        pids = [pid(cluster, rank) for rank in range(RANKS)]
        os.kill(job.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), 60, f"ranks {pids} live on")
    with start(cluster, RUN) as job:
        job.succeed(240)
    check_continued(reference, cluster, 1, 2, start=SAVED + 1, steps=STEPS)


def test_torchrun_itself_restarts_the_ranks_when_one_is_killed(cluster: Cluster, reference: Path) -> None:
    with start(cluster, [*RUN, str(PAUSE_AT)], restarts=1) as job:
        wait_for_pause(cluster, job)
        os.kill(pid(cluster, 1), signal.SIGKILL)
        (
            cluster.out(1) / "go-on"
        ).touch()  # for the ranks of the second start; rank 0 of the first waits for rank 1
        job.succeed(240)
        assert "received a preemption notice" not in job.output()
        assert "holdfast saves every" in job.output()
    for rank in range(RANKS):
        final = load(cluster.out(1) / f"final-{rank}.pt")
        assert final["start"] == SAVED + 1
        assert same({**final, "start": 0}, load(reference / f"final-{rank}.pt"))
        assert losses(cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")
    assert [event["step"] for event in events(cluster, "restore")] == [SAVED] * RANKS


def test_sigterm_to_torchrun_is_a_notice_and_all_ranks_save_one_step(cluster: Cluster) -> None:
    slowly = {"TRAIN_STEP_SECONDS": "0.02"}  # and watched by default
    with start(cluster, [str(MANY), str(NEVER)], env=slowly) as job:
        path = cluster.out(1) / "losses-1"
        wait_until(lambda: path.exists() and len(losses(path)) > 5, 240, job.output)
        os.kill(job.process.pid, signal.SIGTERM)
        wait_until(lambda: len(events(cluster, "complete")) == RANKS, 120, job.output)
        for rank in range(RANKS):
            os.kill(pid(cluster, rank), signal.SIGKILL)
        job.wait(120)
    (saved,) = {event["step"] for event in events(cluster, "complete")}
    with start(cluster, [str(saved + 3), str(NEVER)]) as job:
        job.succeed(240)
    assert [event["step"] for event in events(cluster, "restore")] == [saved] * RANKS


def test_a_script_that_sets_up_torch_distributed_by_itself_saves_and_restores(cluster: Cluster) -> None:
    command = torchrun_command(RANKS, [str(REPOSITORY / "tests/integration/jobs/launched.py")])
    env = environment(cluster.directory / "runtime", **cluster._env)
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
    assert [event["step"] for event in events(cluster, "complete")] == [0] * RANKS + [1] * RANKS
    assert [event["step"] for event in events(cluster, "restore")] == [0] * RANKS
