"""Whole MPI jobs on a store that accepts nothing for a while: staged steps, surviving steps, and log messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from holdfast.ring.directory import runtime_directory
from tests.faults.failing_disk import Disk
from tests.faults.flushing import wait_until
from tests.faults.jobs import stepping
from tests.support.cluster import Cluster, assert_nothing_left
from tests.support.job import Job

pytestmark = pytest.mark.mpi

RANKS = 2
STEPS, STEP_SECONDS = 40, 0.3
OPTIONS = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "0")  # room for five checkpoints


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "store", 32 << 20)
    yield made
    made.unmount()


def start(tmp_path: Path, disk: Disk) -> tuple[Cluster, Job, Path]:
    events = tmp_path / "events.jsonl"
    store, env = str(disk.place / "run"), {"HOLDFAST_EVENTS": str(events)}
    cluster = Cluster(tmp_path, store, env, script=stepping.__file__, stager=OPTIONS)
    return cluster, cluster.start(RANKS, str(STEPS), str(STEP_SECONDS)), events


def read(events: Path) -> list[dict[str, Any]]:
    """Events in the log, without a last line that is still being written."""
    if not events.exists():
        return []
    return [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps_of(events: Path, event: str, role: str) -> set[int]:
    return {line["step"] for line in read(events) if (line["event"], line["role"]) == (event, role)}


def wait_for_training(cluster: Cluster, job: Job) -> list[dict[str, Any]]:
    """Wait until all steps were trained; return each rank's report."""
    reports = [cluster.out(cluster.started) / f"rank-{rank}.json" for rank in range(RANKS)]
    wait_until(lambda: all(report.exists() for report in reports), job.output, 120)
    return [json.loads(report.read_text()) for report in reports]


def check_published(disk: Disk, steps: set[int]) -> None:
    assert {int(path.stem[5:]) for path in disk.place.glob("run/step-*.pt")} == steps
    for step in steps:
        state = torch.load(disk.place / "run" / f"step-{step:09d}.pt", weights_only=True)
        assert all(bool((value == step).all()) for value in state["model"].values())


def test_steps_are_staged_while_the_disk_is_full_and_the_newest_come_out_when_it_is_not(
    tmp_path: Path, disk: Disk
) -> None:
    """The event log and the flusher's own log have no room either."""
    notes = Disk(tmp_path / "runtime-1-logs", 1 << 20)
    try:
        disk.fill(free_bytes=300_000)
        notes.fill(free_bytes=0)
        cluster, started, events = start(tmp_path, disk)
        with started as job:
            said = wait_for_training(cluster, job)
            assert all(one["staged"] == STEPS - 1 for one in said), f"the outage holds staged up: {said}"
            assert list(disk.place.glob("run/step-*")) == []
            disk.make_room()
            (cluster.out(1) / "go").touch()
            job.succeed(150)
        output = job.output()
        assert "store unavailable: " in output, output
        assert "no room (the file system is too full)" in output, (
            "the job's own log does not name the full disk"
        )
        assert "The flusher's log: " in output
        assert "which is whole there: the store has taken nothing for" in output
        assert "the store takes checkpoints again" in output
        cluster.wait_for_flusher()
        staged, gave_place = steps_of(events, "staged", "stager"), steps_of(events, "flush_failed", "flusher")
        durable = steps_of(events, "durable", "flusher")
        assert gave_place
        assert durable == staged - gave_place
        assert max(durable) == STEPS - 1
        assert min(durable) > max(gave_place), "an older step was kept, and a newer one gave its place"
        # While the first steps filled the ring, the flusher did not know yet that the outage would last.
        assert len(staged) > STEPS // 2
        check_published(disk, durable)
        assert_nothing_left(cluster.runtime)
    finally:
        notes.unmount()


def test_whole_steps_outlive_ranks_and_stager_that_die_in_an_outage(tmp_path: Path, disk: Disk) -> None:
    cluster, started, events = start(tmp_path, disk)
    with started as job:
        wait_until(lambda: bool(steps_of(events, "durable", "flusher")), job.output)
        disk.make_read_only()
        said = wait_for_training(cluster, job)
        assert all(one["staged"] == STEPS - 1 for one in said), f"the outage holds staged up: {said}"
        durable = steps_of(events, "durable", "flusher")
        directory = runtime_directory(cluster.store, cluster.runtime)
        flusher = int((directory / "flusher.pid").read_text())
        for pid in [job.process.pid, *children(job)]:
            if pid != flusher:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.wait(30)
    wait_until(lambda: bool(steps_of_stager_gone(events)), lambda: "the flusher has not noticed")
    waiting = set(checkpoint_steps(directory))
    assert max(waiting) == STEPS - 1
    assert psutil.pid_exists(flusher)
    disk.make_writable()
    cluster.wait_for_flusher()
    check_published(disk, durable | waiting)
    reasons = [line["message"] for line in read(events) if line["event"] == "flush_failed"]
    assert all("gives its place in the ring" in reason for reason in reasons), reasons
    assert not steps_of(events, "flush_failed", "flusher") & waiting


def children(job: Job) -> list[int]:
    return [child.pid for child in psutil.Process(job.process.pid).children(recursive=True)]


def steps_of_stager_gone(events: Path) -> list[dict[str, Any]]:
    return [line for line in read(events) if line["event"] == "stager_gone"]


def checkpoint_steps(directory: Path) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in directory.glob("checkpoint-*.json")]
