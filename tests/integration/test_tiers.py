"""The main job with local tiers: beside the stager, without one, and after the stager was killed.

Tiers are real slot files in shared memory and on disk; every kill is SIGKILL; the relaunch is bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_continued, wait_until
from tests.support.events import read_events
from tests.support.job import Job
from tests.support.main_job import PAUSE_AT, RUN, SAVED, STEPS

pytestmark = [pytest.mark.mpi]
RANKS = 2
SMALL_ALONE = {"HOLDFAST_CHUNK_BYTES": "65536"}


@pytest.fixture
def memory() -> Iterator[Path]:
    """Provide a directory in shared memory."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="holdfast-test-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def cluster(tmp_path: Path, memory: Path) -> Cluster:
    """Provide a cluster with a tier in memory and one on disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    env = {
        "HOLDFAST_TIERS": f"memory:{memory},file:{disk}",
        "HOLDFAST_TIER_SLOTS": "2",
        "HOLDFAST_TIER_WRITERS": "2",
        "HOLDFAST_EVENTS": str(tmp_path / "events"),
        "TRAIN_WAITS_FOR": "kept",
    }
    return Cluster(tmp_path, str(tmp_path / "store"), env, script=train.__file__)


def events(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    """Return all events of a kind, of all ranks and starts."""
    return [line for line in read_events(cluster.directory / "events") if line["event"] == kind]


def wait_for_pause(cluster: Cluster, job: Job, *, kept: int) -> None:
    """Wait until all ranks pause, and know that step `kept` is complete in both tiers."""

    def ready() -> bool:
        assert job.process.poll() is None, job.output()
        if not all((cluster.out(1) / f"paused-{rank}").exists() for rank in range(RANKS)):
            return False
        return len([event for event in events(cluster, "complete") if event["step"] == kept]) == 2 * RANKS

    wait_until(ready, 120, lambda: f"no pause with step {kept} complete in both tiers:\n{job.output()}")


def kill_all_ranks(cluster: Cluster) -> None:
    for rank in range(RANKS):
        os.kill(int((cluster.out(1) / f"pid-{rank}").read_text()), signal.SIGKILL)


def check_resumed_from(cluster: Cluster, tier: str, step: int) -> None:
    """Every rank has restored this step, reading only from tiers of this kind."""
    found = events(cluster, "restore")
    assert [event["step"] for event in found] == [step] * RANKS
    for event in found:
        assert event["sources"], event
        assert all(name.startswith(tier) for name in event["sources"]), event["sources"]


def check_kept_once(cluster: Cluster, saves: int) -> None:
    """Each save is written once to each tier of each rank, with hardly more bytes than it has."""
    kept = events(cluster, "kept")
    assert len(kept) == saves * RANKS * 2, [(event["step"], event["tier"]) for event in kept]
    for event in kept:
        assert event["slice_bytes"] <= event["written_bytes"] < event["slice_bytes"] + 16 * 4096
        assert event["direct"] == event["tier"].startswith("memory")


def test_without_a_stager_a_killed_run_resumes_from_its_disk_when_its_memory_is_lost(
    cluster: Cluster, reference: Path, memory: Path
) -> None:
    """First its slices are gone for one rank, and it does not begin again; then they are back."""
    check_resumed_alone(cluster, reference, memory, lost=True)


def check_refused_without_the_slices_of_a_rank(
    cluster: Cluster, tiers: list[Path], env: dict[str, str]
) -> None:
    """Move a rank's slices away, check the refusal, and move them back."""
    lost = {
        path: cluster.directory / f"away-{n}"
        for n, tier in enumerate(tiers)
        for path in tier.glob("*/rank-00001-*.slots")
    }
    assert len(lost) == len(tiers)
    for path, away in lost.items():
        shutil.move(path, away)
    left = {path: path.read_bytes() for tier in tiers for path in tier.glob("*/*.slots")}
    assert len(left) == len(tiers)
    with cluster.start(RANKS, *RUN, stager=False, env=env, forked=True) as job:
        assert job.wait(120) == 6, job.output()
    said = " ".join(job.output().split())
    assert "there are checkpoints, and none is whole" in said
    assert (
        f"rank 1 on host {socket.gethostname()} has not its slice in memory:{tiers[0]}, file:{tiers[1]}"
        in said
    )
    assert {path: path.read_bytes() for path in left} == left
    for path, away in lost.items():
        shutil.move(away, path)


def check_resumed_alone(cluster: Cluster, reference: Path, memory: Path, *, lost: bool) -> None:
    """Kill a run without a stager, and resume it; `lost`: the machine's memory is lost, too."""
    alone = {"HOLDFAST_STORE": cluster.store, **SMALL_ALONE}
    with cluster.start(RANKS, *RUN, str(PAUSE_AT), stager=False, env=alone, forked=True) as job:
        wait_for_pause(cluster, job, kept=SAVED)
        kill_all_ranks(cluster)
        job.wait(60)
    if lost:
        check_refused_without_the_slices_of_a_rank(cluster, [memory, cluster.directory / "disk"], alone)
        # The machine was restarted, so its memory is lost.
        for path in memory.iterdir():
            shutil.rmtree(path)
    with cluster.start(RANKS, *RUN, stager=False, env=alone, forked=True) as job:
        job.succeed(120)
    check_continued(reference, cluster, 1, cluster.started, start=SAVED + 1, steps=STEPS)
    check_resumed_from(cluster, "file" if lost else "memory", SAVED)
    check_kept_once(cluster, 3)
    assert not list(Path(cluster.store).glob("*.pt")), "nobody was there to write it"


def test_beside_the_stager_a_killed_run_resumes_from_memory(cluster: Cluster, reference: Path) -> None:
    with cluster.start(RANKS, *RUN, str(PAUSE_AT)) as job:
        wait_for_pause(cluster, job, kept=SAVED)
        wait_until(lambda: bool(events(cluster, "durable")), 120, job.output)
        kill_all_ranks(cluster)
        job.wait(60)
    with cluster.start(RANKS, *RUN) as job:
        job.succeed(120)
    check_continued(reference, cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    check_resumed_from(cluster, "memory", SAVED)
    check_kept_once(cluster, 3)
    durable = {event["step"] for event in events(cluster, "durable")}
    assert durable >= {3, 11}, "the stager got them as well"


def stager_of(runtime: Path) -> int:
    """Return the pid of this machine's stager."""
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("HOLDFAST_RUNTIME_DIR") == str(runtime)
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if mine and "stager" in words[1:3] and "mpirun" not in words[0]:
            return process.pid
    raise AssertionError("there is no stager")


def test_without_stager_and_tiers_the_message_names_both(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, str(tmp_path / "store"), {}, script=train.__file__)
    with cluster.start(1, *RUN, stager=False) as job:
        assert job.wait(60) != 0
    assert "no stager in this job of 1 trainers" in job.output()
    assert ": -n 1 holdfast stager --store URL" in " ".join(job.output().split())
    assert "HOLDFAST_TIERS" in job.output()


def check_a_killed_stager_ends_neither_training_nor_checkpoints(cluster: Cluster, reference: Path) -> None:
    with cluster.start(RANKS, *RUN, str(PAUSE_AT)) as job:
        wait_for_pause(cluster, job, kept=SAVED)
        os.kill(stager_of(cluster.runtime), signal.SIGKILL)
        (cluster.out(1) / "go-on").touch()
        job.wait(120)
    said = job.output()
    assert said.count("the stager is lost, and nothing more of this job goes to it") == RANKS, said
    assert "no more checkpoints are taken" not in said
    tiers = {event["tier"] for event in events(cluster, "complete") if event["step"] == 11}
    assert len(tiers) == 2, "step 11 came after the stager's death"
    with cluster.start(RANKS, *RUN) as job:
        job.succeed(120)
    check_continued(reference, cluster, 1, 2, start=12, steps=STEPS)
    check_resumed_from(cluster, "memory", 11)
