"""Nightly, more of tests/integration/test_notice.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import test_notice as nightly
from tests.integration.test_notice import (
    _WAIT_SECONDS_MAX,
    NEVER,
    STEPS,
    Spot,
    check_resumes,
    check_saved_among_themselves,
    make,
    reference,
)
from tests.support.cluster import load, losses, same, wait_until

pytestmark = [pytest.mark.mpi]

memory = nightly.memory
test_a_rank_that_is_told_and_then_killed_loses_nothing_before_its_step = (
    nightly.check_a_rank_that_is_told_and_then_killed_loses_nothing_before_its_step
)
test_a_notice_that_comes_too_late_is_said_and_breaks_nothing = (
    nightly.check_a_notice_that_comes_too_late_is_said_and_breaks_nothing
)


@pytest.mark.parametrize("name", ["sigterm", "sigusr1"])
def test_a_signal_is_a_notice_too(make: Callable[[int], Spot], reference: Path, name: str) -> None:
    """SIGTERM to one rank; SIGUSR1 to mpirun, which forwards it to all, including the stager."""
    spot = make(2)
    spot.env["HOLDFAST_WATCH"] = name
    with spot.cluster.start(2, str(STEPS), str(NEVER)) as job:
        spot.train_until(job, 10)
        if name == "sigterm":
            os.kill(spot.pid(0), signal.SIGTERM)
        else:
            os.kill(job.process.pid, signal.SIGUSR1)
        saved = spot.wait_for(job, "emergency_staged")["saved_step"]
        spot.train_until(job, saved + 5)
        for rank in range(2):
            os.kill(spot.pid(rank), signal.SIGKILL)
        job.wait(60)
    spot.cluster.wait_for_flusher()
    told = [(notice["source"], notice["told_rank"]) for notice in spot.events("notice")]
    assert sorted(told) == [(name, rank) for rank in range(1 if name == "sigterm" else 2)]
    assert len(spot.events("emergency")) == 1
    check_resumes(spot, reference, saved)


def test_ranks_that_are_told_at_the_same_time_save_one_step(make: Callable[[int], Spot]) -> None:
    spot = make(3)
    with spot.cluster.start(3, str(STEPS), str(NEVER)) as job:
        spot.train_until(job, 10)
        for server in spot.servers:
            server.interrupt(20)
        saved = spot.wait_for(job, "emergency_staged")["saved_step"]
        wait_until(lambda: len(spot.events("notice")) == 3, _WAIT_SECONDS_MAX, job.output)
        spot.train_until(job, saved + 60)  # each watch polls several times, and gets the same answer
        job.kill()
    spot.cluster.wait_for_flusher()
    assert len(spot.events("emergency")) == 1
    assert spot.steps() == [saved]
    assert sorted(event["told_rank"] for event in spot.events("notice")) == [0, 1, 2]


def test_a_rebalance_saves_now_and_more_often_and_training_goes_on(
    make: Callable[[int], Spot], reference: Path
) -> None:
    spot, every = make(2), 60
    with spot.cluster.start(2, str(STEPS), str(every)) as job:
        spot.train_until(job, 65)
        spot.servers[0].recommend()
        saved = spot.wait_for(job, "emergency_staged")["saved_step"]
        job.succeed(120)
    spot.cluster.wait_for_flusher()
    before = [step for step in spot.steps() if step < saved]
    after = [step for step in spot.steps() if step > saved]
    assert before == [59]
    assert after == [step for step in range(saved + 1, STEPS) if (step + 1) % 15 == 0]
    for rank in range(2):
        final = load(spot.cluster.out(1) / f"final-{rank}.pt")
        assert same(final, load(reference / f"final-{rank}.pt")), "a notice has changed the training"


def test_without_a_stager_a_notice_that_comes_too_late_breaks_nothing(
    make: Callable[[int], Spot], reference: Path
) -> None:
    spot = make(2)
    spot.env |= {"HOLDFAST_TIERS": f"file:{spot.cluster.directory}", "HOLDFAST_STORE": spot.cluster.store}
    with spot.cluster.start(2, str(STEPS), str(NEVER), stager=False) as job:
        spot.train_until(job, 10)
        spot.servers[0].interrupt(-3)
        job.succeed(120)
        said = job.output()
    assert [event["choice"] for event in spot.events("emergency")] == ["skip"]
    assert "nothing is kept in file:" in said
    assert not spot.events("kept")
    for rank in range(2):
        assert losses(spot.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")


def test_without_a_stager_the_ranks_save_one_step_on_their_disks(
    make: Callable[[int], Spot], reference: Path
) -> None:
    spot = make(2)
    check_saved_among_themselves(spot, reference, f"file:{spot.cluster.directory}", told=1)
