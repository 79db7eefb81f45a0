"""Whole MPI jobs on faulty stores: real ranks, stager and flusher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.failing_disk import Calls
from tests.faults.flushing import wait_until
from tests.integration.jobs import train
from tests.support.cluster import Cluster, assert_nothing_left

pytestmark = pytest.mark.mpi

RANKS = 2
STAGER = ("--chunk-bytes", "1MiB", "--ring-bytes", "16MiB", "--keep-last", "0")


def test_a_tier_whose_writes_do_not_return_costs_no_checkpoint_of_the_stager(tmp_path: Path) -> None:
    """Writes hang from mid-run on. The area is free in time for the next save, and leaving the block ends."""
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
        # A staged step is not yet in the tier.
        wait_until(lambda: 3 in _steps(events, "complete"), job.output, 120)
        calls.hang("pwrite")
        (cluster.out(1) / "go-on").touch()
        job.succeed(150)
    cluster.wait_for_flusher()
    assert job.output().count("takes nothing until its device answers") == RANKS, job.output()
    assert _steps(events, "durable") == {1, 3, 5, 7}
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    # The first rank to notice tells the others that step 5 is void; each rank stops using its own tier by itself.
    skipped = [line for line in lines if line["event"] == "skipped_tier"]
    assert {line["cause"] for line in skipped if line["step"] == 7} == {"hangs"}
    assert {(line["rank"], line["step"]) for line in skipped} == {
        (rank, step) for rank in (0, 1) for step in (5, 7)
    }
    assert_nothing_left(cluster.runtime)


def _steps(events: Path, event: str) -> set[int]:
    """Steps with this event in the log, ignoring a last line that is still being written."""
    lines = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"] for line in lines if line["event"] == event}
