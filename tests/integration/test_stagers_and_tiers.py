"""Local tiers beside several stagers: killed ranks resume from a tier, and the tiers go on when a stager is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast import faultpoint
from tests.integration.jobs import train
from tests.integration.test_several_stagers import several
from tests.integration.test_tiers import (
    check_kept_once,
    check_resumed_from,
    events,
    kill_all_ranks,
    memory,
    wait_for_pause,
)
from tests.support.cluster import SMALL, Cluster, check_continued, check_loadable, losses, wait_until
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED, STEPS
from tests.support.mpi_stagers import with_stagers

__all__ = ["memory"]
pytestmark = [pytest.mark.mpi]
RANKS = STAGERS = 2
SECONDS_MAX = 240.0
NEVER, MANY = 10_000, 100_000
NEWEST = STEPS // EVERY * EVERY - 1


@pytest.fixture
def cluster(tmp_path: Path, memory: Path) -> Cluster:
    """Its machine has a tier in memory and one on disk; chunks are small enough that each stager has some."""
    for name in ("disk", "store"):
        (tmp_path / name).mkdir()
    env = {
        "HOLDFAST_TIERS": f"memory:{memory},file:{tmp_path / 'disk'}",
        "HOLDFAST_EVENTS": str(tmp_path / "events"),
        "TRAIN_WAITS_FOR": "kept",
    }
    stager = (*SMALL, "--chunk-bytes", "8KiB")
    return Cluster(tmp_path, str(tmp_path / "store"), env, script=train.__file__, stager=stager)


def test_killed_ranks_resume_from_memory_and_both_stagers_have_written_the_files(
    cluster: Cluster, reference: Path
) -> None:
    rewrite = with_stagers(STAGERS)
    with cluster.start(RANKS, *RUN, str(PAUSE_AT), rewrite=rewrite) as job:
        wait_for_pause(cluster, job, kept=SAVED)
        kill_all_ranks(cluster)
        job.wait(SECONDS_MAX)
    with cluster.start(RANKS, *RUN, rewrite=rewrite) as job:
        job.succeed(SECONDS_MAX)
    check_continued(reference, cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    check_resumed_from(cluster, "memory", SAVED)
    check_kept_once(cluster, 3)
    files = sorted(Path(cluster.store).glob("step-*.pt"))
    assert any(f"step-{NEWEST:09d}" in file.name for file in files)
    for file in files:
        record = json.loads(file.with_suffix(".json").read_text())["record"]
        assert record["flusher"]["shares"] == STAGERS, file
    check_loadable(files)


@pytest.mark.parametrize("lost", [0, 1], ids=["lead", "member"])
def test_a_stager_that_dies_in_the_middle_of_its_share_costs_no_checkpoint_in_the_tiers(
    cluster: Cluster, reference: Path, lost: int
) -> None:
    fired = cluster.directory / "fired"
    fired.mkdir()
    fault = f"{faultpoint.VARIABLE}=stager@chunk_received#5=kill"
    before: dict[int, Sequence[str]] = {lost: ("env", fault, f"{faultpoint.FIRED_VARIABLE}={fired}")}
    with cluster.start(RANKS, *RUN, rewrite=with_stagers(STAGERS, before=before)) as job:
        job.wait(SECONDS_MAX)
        said = job.output()
    assert list(fired.iterdir()), said
    assert (
        said.count(f"stager {lost + 1}/{STAGERS} is lost, and nothing more of this job goes to it") == RANKS
    )
    assert "no more checkpoints are taken" not in said
    for step in range(EVERY - 1, STEPS, EVERY):
        complete = [event for event in events(cluster, "complete") if event["step"] == step]
        assert len(complete) == 2 * RANKS, (step, said)
    with cluster.start(RANKS, *RUN, rewrite=with_stagers(STAGERS)) as job:
        job.succeed(SECONDS_MAX)
    check_continued(reference, cluster, 1, 2, start=NEWEST + 1, steps=STEPS)
    check_resumed_from(cluster, "memory", NEWEST)


def test_after_a_notice_all_ranks_keep_one_step_although_a_stager_is_lost(tmp_path: Path) -> None:
    for name in ("disk", "store"):
        (tmp_path / name).mkdir()
    tiers, store = f"file:{tmp_path / 'disk'}", str(tmp_path / "store")
    with several(
        tmp_path / "scene", store, STAGERS, HOLDFAST_TIERS=tiers, TRAIN_STEP_SECONDS="0.02"
    ) as scene:
        with scene.start(str(MANY), str(NEVER)) as job:
            out = scene.cluster.out(1)
            path = out / "losses-1"
            wait_until(lambda: path.exists() and len(losses(path)) > 5, SECONDS_MAX, job.output)
            scene.stagers[1].kill()
            wait_until(lambda: len(scene.events("stager_lost")) == RANKS, SECONDS_MAX, job.output)
            os.kill(job.process.pid, signal.SIGTERM)
            wait_until(lambda: len(scene.events("complete")) >= RANKS, SECONDS_MAX, job.output)
            for rank in range(RANKS):
                os.kill(int((out / f"pid-{rank}").read_text()), signal.SIGKILL)
            job.wait(SECONDS_MAX)
            assert "no step is named" not in job.output(), "the lead is there, and names one"
        first = scene.events("complete")[0]["step"]
        scene.again(1)
        with scene.start(str(first + 100), str(NEVER)) as job:
            job.succeed(SECONDS_MAX)
        restores = scene.events("restore")
        assert len({event["step"] for event in restores}) == 1
        assert len(restores) == RANKS
        for event in restores:
            assert event["step"] >= first
            assert all(name.startswith("file:") for name in event["sources"]), event
        scene.stop()
