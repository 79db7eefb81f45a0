"""Nightly, more of tests/integration/test_run.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.ring.directory import runtime_directory
from tests.integration import test_run as nightly
from tests.integration.test_run import Run, check_resumed, run
from tests.support.cluster import check_continued, load, wait_until
from tests.support.main_job import SAVED, STEPS

pytestmark = [pytest.mark.mpi]

test_a_checkpoint_that_the_job_crashes_on_is_set_aside_and_the_run_ends_well = (
    nightly.check_a_checkpoint_that_the_job_crashes_on_is_set_aside_and_the_run_ends_well
)
test_a_step_not_yet_in_the_store_is_restored_from_the_ring = (
    nightly.check_a_step_not_yet_in_the_store_is_restored_from_the_ring
)


def test_the_supervisor_kills_a_rank_that_cannot_go_on_alone(run: Run, reference: Path) -> None:
    """The other rank sleeps for a minute: the supervisor ends it because it cannot continue alone."""
    run.main_job(options=("--set=rank_seconds_max=5",))
    run.pause()
    os.kill(run.pid(1), signal.SIGKILL)
    check_resumed(run, reference, "killed")


def test_ranks_stager_and_mpirun_are_killed(run: Run, reference: Path) -> None:
    run.main_job()
    run.pause()
    stager = run.job(lambda line: "stager" in line and "operator_side.supervise.rank" not in line)
    mpirun = run.job(lambda line: Path(line[0]).name in {"mpirun", "prterun"})
    assert len(stager) == 1
    assert mpirun
    for pid in (*stager, run.pid(0), run.pid(1), *mpirun):
        os.kill(pid, signal.SIGKILL)
    check_resumed(run, reference, "killed")


def test_fewer_hosts_fewer_ranks(run: Run) -> None:
    """Between two attempts the test removes a host from the file."""
    hosts = run.directory / "hosts"
    hosts.write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    run.main_job(ranks=3, options=("--min-ranks", "2", "--hosts", str(hosts), "--poll-seconds", "600"))
    run.pause(ranks=3)
    hosts.write_text("localhost slots=2\n")
    for rank in range(3):
        os.kill(run.pid(rank), signal.SIGKILL)
    assert run.wait() == 0, run.said()
    launched = run.status("launched")
    assert [line["ranks"] for line in launched] == [3, 2]
    assert [line["hosts"] for line in launched] == [["localhost:2", "127.0.0.1:1"], ["localhost:2"]]
    assert [line["cause"] for line in run.status("ended")] == ["preempted", "done"]
    assert load(run.cluster.out(2) / "final-0.pt")["start"] == SAVED + 1
    run.assert_nothing_left()


def test_a_supervisor_that_is_killed_takes_its_job_with_it(run: Run, reference: Path) -> None:
    """The flusher that it kept has no supervisor any more, and ends by itself."""
    run.main_job()
    run.pause()
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.living(), 60, lambda: f"left: {run.living()}")
    assert not runtime_directory(run.store, run.runtime).exists()
    run.main_job()
    assert run.wait() == 0, run.said()
    assert [line["attempt"] for line in run.status("launched")] == [1, 2]
    check_continued(reference, run.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    run.assert_nothing_left()
