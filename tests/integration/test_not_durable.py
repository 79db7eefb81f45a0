"""Jobs that end by themselves before their newest checkpoint is durable: mpirun alone, and under holdfast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.faults.failing_disk import Disk
from tests.faults.flushing import wait_until
from tests.faults.jobs import stepping
from tests.integration.test_run import SETTINGS
from tests.support.cluster import Cluster
from tests.support.job import HOLDFAST, Job, environment

pytestmark = pytest.mark.mpi
RANKS, STEPS = 2, 20
ENDS = {"HOLDFAST_CLOSE_SECONDS_MAX": "3"}


def under_rank(command: list[str]) -> list[str]:
    return [HOLDFAST, "rank", "--", *command]


def wait_for_training(cluster: Cluster, job: Job) -> None:
    reports = [cluster.out(cluster.started) / f"rank-{rank}.json" for rank in range(RANKS)]
    wait_until(lambda: all(report.exists() for report in reports), job.output, 120)
    (cluster.out(cluster.started) / "go").touch()


def kill_stager(launcher: int) -> None:
    """That of this mpirun, or of this `holdfast run`."""
    children = psutil.Process(launcher).children(recursive=True)
    lines = {child.pid: child.cmdline() for child in children if "mpirun" not in child.name()}
    (pid,) = [
        pid for pid, words in lines.items() if "stager" in words[:4] or words[3:5] == ["holdfast", "stager"]
    ]
    os.kill(pid, signal.SIGKILL)


def test_a_stager_lost_in_mid_run_ends_holdfast_rank_with_the_code_to_start_again(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    env = {**ENDS, "HOLDFAST_EVENTS": str(events)}
    cluster = Cluster(tmp_path, str(tmp_path / "store"), env, script=stepping.__file__)
    with cluster.start(RANKS, str(STEPS), "0.2", rewrite=under_rank) as job:
        wait_until(lambda: '"durable"' in (events.read_text() if events.exists() else ""), job.output)
        kill_stager(job.process.pid)
        wait_for_training(cluster, job)
        assert job.wait(60) == RETRY_EXIT_CODE, job.output()
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
        assert "it is staged, and the flusher finishes it alone" in job.output()
        disk.make_room()
        cluster.wait_for_flusher()
        manifest = json.loads((disk.place / "run" / "step-000000002.json").read_text())
        assert manifest["step"] == 2
    finally:
        disk.unmount()


_RESUMES = """
import time
import torch
from trainer_side import Checkpointer

with Checkpointer({"value": torch.ones(200_000)}, every=1) as checkpointer:
    for step in range(checkpointer.restore(), 3):
        checkpointer.step(step)
        while checkpointer.staged_step < step:
            time.sleep(0.01)
"""


def test_holdfast_run_ends_with_0_only_when_the_newest_step_is_durable(tmp_path: Path) -> None:
    """Also where its last attempt has nothing left to train, because it resumes from the ring."""
    disk = Disk(tmp_path / "store", 32 << 20)
    env = environment(tmp_path / "runtime", **ENDS, HOLDFAST_HELD_SECONDS_MAX="3")

    def run(*options: str, stops_stager: bool = False, **more: str) -> tuple[int, str]:
        """Code, and what it said. Without the stager nobody waits for the store but the flusher, three seconds."""
        line = [
            HOLDFAST,
            "run",
            "-n",
            "2",
            "--store",
            str(disk.place / "run"),
            "--logs",
            str(tmp_path / "logs"),
        ]
        line += [*SETTINGS, *options, "--", sys.executable, "-c", _RESUMES]
        said = tmp_path / "said"
        with said.open("w") as output:
            process = subprocess.Popen(line, env={**env, **more}, stdout=output, stderr=output)
        try:
            if stops_stager:
                wait_until(lambda: "waiting for the store until" in said.read_text(), said.read_text, 120)
                kill_stager(process.pid)
            return process.wait(120), said.read_text()
        finally:
            process.kill()
            process.wait()

    try:
        disk.fill(free_bytes=300_000)
        code, said = run("--restarts-max", "0")
        assert code == 11, said
        assert "has ended, and the newest step that was to be saved is not durable" in said
        code, said = run(stops_stager=True)
        assert code == 11, said
        assert (
            "the job is done, and step 2, its newest, is staged but not durable; nor is any other step"
            in said
        )
        code, said = run(stops_stager=True, HOLDFAST_ON_NOT_DURABLE="warn")
        assert code == 0, said
        disk.make_room()
        code, said = run()
        assert code == 0, said
        assert json.loads((disk.place / "run" / "step-000000002.json").read_text())["step"] == 2
    finally:
        disk.unmount()
