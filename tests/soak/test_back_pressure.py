"""Nightly, more of tests/integration/test_back_pressure.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_back_pressure import MIB, RANKS, SMALL, Pressed, check_alike
from tests.support.cluster import load, same
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]


def test_on_full_wait_takes_every_step(tmp_path: Path) -> None:
    steps = 12
    run = Pressed(tmp_path, "together", steps, rate=40 * MIB, HOLDFAST_ON_FULL="wait", **SMALL)
    output = run.run()
    assert check_alike(run, steps) == steps
    assert "were not checkpointed" not in output
    for rank in range(RANKS):
        saves = run.events("save", rank=rank)
        assert len(saves) == steps
        waited = [line for line in saves if line["wait_seconds"] > 0]
        assert len(waited) >= steps // 2, "the store was not slow enough to wait for"
        assert all(line["cst_seconds"] >= line["save_seconds"] >= line["wait_seconds"] for line in saves)


def test_a_killed_stager_costs_the_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    steps = 30
    undisturbed = Pressed(tmp_path / "undisturbed", "together", steps, rate=1024 * MIB, **SMALL)
    undisturbed.run()
    run = Pressed(tmp_path / "lost", "lost", steps, rate=1024 * MIB, **SMALL)
    with run.start() as job:
        job.wait(200)  # mpirun itself reports the death
        output = job.output()
    for rank in range(RANKS):
        said = run.said(rank)
        assert same(load(run.out / f"final-{rank}.pt"), load(undisturbed.out / f"final-{rank}.pt"))
        assert (
            output.count(f"rank {rank}: the stager is lost, and no more checkpoints are taken in this job")
            == 1
        ), output
        assert len(run.events("stager_lost", rank=rank)) == 1
        assert len(said["lost_save_seconds"]) > 0
        assert max(said["lost_save_seconds"]) < 20  # nothing is waited for; the limit is the machine's
        assert said["close_seconds"] < 60
        in_a_save = said["stats"]["causes"]["stager lost"] - len(said["lost_save_seconds"])
        assert in_a_save in {0, 1}, "it may be lost in the middle of one"
