"""Whole MPI jobs on stores that misbehave: real ranks, stager and flusher."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.failing_disk import Calls, Disk
from tests.faults.flushing import wait_until
from tests.faults.jobs import stepping
from tests.integration.jobs import train
from tests.support.cluster import Cluster, assert_nothing_left

pytestmark = pytest.mark.mpi

RANKS = 2
STAGER = ("--chunk-bytes", "1MiB", "--ring-bytes", "16MiB", "--keep-last", "0")


def test_training_goes_on_while_the_disk_is_full_and_what_was_staged_comes_out_when_it_is_not(
    tmp_path: Path,
) -> None:
    """Also under the event log and the flusher's own log there is no room."""
    disk = Disk(tmp_path / "store", 32 << 20)
    notes = Disk(tmp_path / "runtime-1-logs", 1 << 20)
    try:
        disk.fill(free_bytes=300_000)
        notes.fill(free_bytes=0)
        store, events = disk.place / "run", tmp_path / "events.jsonl"
        env = {"HOLDFAST_EVENTS": str(events)}
        options = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "0")
        cluster = Cluster(tmp_path, str(store), env, script=stepping.__file__, stager=options)
        steps = 20
        with cluster.start(RANKS, str(steps)) as job:
            out = cluster.out(1)
            reports = [out / f"rank-{rank}.json" for rank in range(RANKS)]
            wait_until(lambda: all(report.exists() for report in reports), job.output, 120)
            said: list[dict[str, Any]] = [json.loads(report.read_text()) for report in reports]
            # All steps were trained, though the store took none.
            assert all(one["staged"] < steps - 1 for one in said), f"the disk refused nothing: {said}"
            assert list(store.glob("step-*")) == []
            disk.make_room()
            (out / "go").touch()
            job.succeed(150)
        output = job.output()
        assert "the store takes nothing: " in output, output
        assert "no room (the file system is too full)" in output, (
            "the job's own log does not name the full disk"
        )
        assert "The flusher's log: " in output
        assert re.search(r"is declined: .*; the store takes nothing: .*no room", output), output
        assert "the store takes checkpoints again" in output
        cluster.wait_for_flusher()
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        durable = {line["step"] for line in lines if line["event"] == "durable"}
        assert {line["step"] for line in lines if line["event"] == "staged"} == durable
        assert durable
        refused = [
            {
                line["step"]
                for line in lines
                if line["event"] in ("declined", "failed") and line.get("rank") == rank
            }
            for rank in range(RANKS)
        ]
        assert refused[0] == refused[1] == set(range(steps)) - durable, (
            f"{durable} are durable, refused: {refused}"
        )
        for step in durable:
            state = torch.load(store / f"step-{step:09d}.pt", weights_only=True)
            assert all(bool((value == step).all()) for value in state["model"].values())
        assert any(line["event"] == "flush_held" for line in lines)
        assert_nothing_left(cluster.runtime)
    finally:
        disk.unmount()
        notes.unmount()


def test_a_tier_whose_writes_do_not_return_costs_no_checkpoint_of_the_stager(tmp_path: Path) -> None:
    """From the middle of the run on. Its area comes back in time for the next save, and leaving the block ends."""
    disk, events = tmp_path / "disk", tmp_path / "events.jsonl"
    disk.mkdir()
    calls = Calls(tmp_path / "shim", disk)
    env = {
        **calls.environment,
        "HOLDFAST_TIERS": f"file:{disk}",
        "HOLDFAST_TIER_SECONDS_MAX": "1",
        "HOLDFAST_ON_FULL": "wait",
        "HOLDFAST_FULL_SECONDS_MAX": "20",
        "HOLDFAST_EVENTS": str(events),
    }
    cluster = Cluster(tmp_path, str(tmp_path / "store"), env, script=train.__file__, stager=STAGER)
    with cluster.start(RANKS, "8", "2", "4") as job:
        paused = [cluster.out(1) / f"paused-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in paused), job.output, 120)
        wait_until(
            lambda: 3 in _steps(events, "complete"), job.output, 120
        )  # staged is not yet kept in the tier
        calls.hang("pwrite")
        (cluster.out(1) / "go-on").touch()
        job.succeed(150)
    cluster.wait_for_flusher()
    assert job.output().count("takes nothing until its device answers") == RANKS, job.output()
    assert _steps(events, "durable") == {1, 3, 5, 7}
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    # The first to see it tells the others that step 5 is void; that nothing more is begun there each sees by itself.
    skipped = [line for line in lines if line["event"] == "skipped_tier"]
    assert {line["cause"] for line in skipped if line["step"] == 7} == {"hangs"}
    assert {(line["rank"], line["step"]) for line in skipped} == {
        (rank, step) for rank in (0, 1) for step in (5, 7)
    }
    assert_nothing_left(cluster.runtime)


def _steps(events: Path, event: str) -> set[int]:
    """Of which steps the log has this event; a last line that is being written is left out."""
    lines = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"] for line in lines if line["event"] == event}
