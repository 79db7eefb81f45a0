"""Jobs that end by themselves while their newest checkpoint is not durable: mpirun, and `holdfast rank` around it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from operator_side.supervise.exit_codes import AGAIN
from tests.faults.failing_disk import Disk
from tests.faults.flushing import wait_until
from tests.faults.jobs import stepping
from tests.support.cluster import Cluster
from tests.support.job import HOLDFAST, Job

pytestmark = pytest.mark.mpi
RANKS, STEPS = 2, 20
ENDS = {"HOLDFAST_CLOSE_SECONDS_MAX": "3"}
Rewrite = Callable[[list[str]], list[str]]


def under_rank(command: list[str]) -> list[str]:
    return [HOLDFAST, "rank", "--", *command]


def wait_for_training(cluster: Cluster, job: Job) -> None:
    reports = [cluster.out(cluster.started) / f"rank-{rank}.json" for rank in range(RANKS)]
    wait_until(lambda: all(report.exists() for report in reports), job.output, 120)
    (cluster.out(cluster.started) / "go").touch()


def kill_stager(job: Job) -> None:
    children = psutil.Process(job.process.pid).children(recursive=True)
    (pid,) = [
        child.pid for child in children if "stager" in child.cmdline()[:4] and "mpirun" not in child.name()
    ]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rewrite", "code", "more"),
    [(list, 11, {}), (under_rank, AGAIN, {}), (list, 0, {"HOLDFAST_ON_NOT_DURABLE": "warn"})],
    ids=["mpirun", "holdfast rank", "who does not care"],
)
def test_a_stager_lost_in_mid_run_does_not_end_with_0(
    tmp_path: Path, rewrite: Rewrite, code: int, more: dict[str, str]
) -> None:
    events = tmp_path / "events.jsonl"
    env = {**ENDS, **more, "HOLDFAST_EVENTS": str(events)}
    cluster = Cluster(tmp_path, str(tmp_path / "store"), env, script=stepping.__file__)
    with cluster.start(RANKS, str(STEPS), "0.2", rewrite=rewrite) as job:
        wait_until(lambda: '"durable"' in (events.read_text() if events.exists() else ""), job.output)
        kill_stager(job)
        wait_for_training(cluster, job)
        assert job.wait(60) == code, job.output()
    said = f"step {STEPS - 1}, the newest that was to be saved, is not durable"
    assert said in job.output()
    assert "the stager is lost (" in job.output()
    cluster.wait_for_flusher()


def test_a_store_that_is_full_at_the_end_does_not_end_with_0(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "store", 32 << 20)
    try:
        disk.fill(free_bytes=300_000)
        cluster = Cluster(tmp_path, str(disk.place / "run"), ENDS, script=stepping.__file__)
        with cluster.start(RANKS, "3") as job:
            wait_for_training(cluster, job)
            assert job.wait(60) == 11, job.output()
        assert "it is staged, and the flusher goes on with it alone" in job.output()
        disk.make_room()
        cluster.wait_for_flusher()
        manifest = json.loads((disk.place / "run" / "step-000000002.json").read_text())
        assert manifest["step"] == 2
    finally:
        disk.unmount()
