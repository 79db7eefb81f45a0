"""Whole MPI jobs on stores that misbehave: real ranks, stager and flusher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.failing_disk import Calls, Disk
from tests.faults.flushing import wait_until
from tests.faults.jobs import stepping
from tests.integration.jobs import train
from tests.integration.test_main_job_s3 import pull_all
from tests.support.cluster import Cluster, assert_nothing_left, check_loadable
from tests.support.fault_proxy import Fault, Rule, running_proxy
from tests.support.s3_place import S3Place, plain_client

pytestmark = pytest.mark.mpi

RANKS = 2
STEPS, EVERY = 6, 3
SAVED = {2, 5}
STAGER = ("--chunk-bytes", "1MiB", "--ring-bytes", "16MiB", "--keep-last", "0")


@pytest.mark.s3
@pytest.mark.soak
def test_a_job_on_s3_of_which_a_tenth_of_all_requests_fails(swift_s3: S3Place, tmp_path: Path) -> None:
    with running_proxy(swift_s3.endpoint, seed=3) as proxy:
        kinds = (Fault.RESET_BEFORE, Fault.LOST_ANSWER, Fault.INTERNAL_ERROR, Fault.SLOW_DOWN)
        proxy.add(*(Rule(fault, times=None, probability=0.1 / len(kinds)) for fault in kinds))
        env = {**swift_s3.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "TRAIN_WIDTH": "15000"}
        cluster = Cluster(tmp_path, swift_s3.url("team/run"), env, script=train.__file__, stager=STAGER)
        for steps in (STEPS - EVERY, STEPS):  # the second start restores through the same bad line
            with cluster.start(RANKS, str(steps), str(EVERY)) as job:
                job.succeed(200)
            cluster.wait_for_flusher()
        assert len(proxy.hits()) >= len(proxy.requests()) // 40
    final = torch.load(cluster.out(2) / "final-0.pt", weights_only=True)
    assert final["start"] == STEPS - EVERY, "the second job did not go on where the first ended"
    check_loadable(pull_all(swift_s3, SAVED, tmp_path / "pulled"))
    client = plain_client()
    try:
        listed = client.list_objects_v2(Bucket=swift_s3.bucket)["Contents"]
        visible = {found["Key"] for found in listed if "/.holdfast/writer-" not in found["Key"]}
        assert visible == {f"team/run/step-{step:09d}.{end}" for step in SAVED for end in ("pt", "json")}
        assert not client.list_multipart_uploads(Bucket=swift_s3.bucket).get("Uploads")
    finally:
        client.close()


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
