"""infra/slurm/holdfast.sbatch under a real Slurm on several hosts, in situations that Slurm's users meet.

`make slurm` runs them; `make check` runs only the one of tests/slurm/regular, where Slurm is installed.
"""

from __future__ import annotations

import pytest

from tests.hosts.checks import check_done_twice, resumed_at
from tests.hosts.cluster import EVERY, PAUSE_AT
from tests.slurm.story import SLOW_STEPS, Story

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]


def test_a_rank_is_killed(story: Story) -> None:
    story.train()
    story.until_paused()
    pid = (story.cluster.out(1) / "pid-1").read_text()
    assert story.slurm.on("t2", "kill", "-KILL", pid).returncode == 0
    story.check_ended_well(restarts=0)
    check_done_twice(story.cluster, resumed_at(story.cluster, ranks=2), ranks=2)


def test_a_preemption_with_grace_saves_a_checkpoint_and_the_job_goes_back_into_the_queue(
    story: Story,
) -> None:
    story.train_slowly()
    story.until(lambda: story.steps_done() > 10, "it does not train")
    urgent = story.slurm.submit(
        "--partition=urgent", "--nodes=3", "--exclusive", script=["--wrap", "sleep 1"]
    )
    story.slurm.until(urgent, "COMPLETED")
    story.start_now()
    story.check_ended_well(restarts=1, steps=SLOW_STEPS)
    (emergency,) = story.cluster.events("emergency_staged")
    (restored,) = [line for line in story.cluster.status("restored") if line["attempt"] == 2]
    assert restored["step"] == emergency["saved_step"] > 0
    assert restored["step"] in story.check_checkpoints()


def test_requeued_without_a_warning_it_goes_on_from_the_newest_checkpoint(story: Story) -> None:
    story.train()
    story.until_paused()
    story.slurm.said("scontrol", "requeue", str(story.number))
    story.start_now()
    story.check_ended_well(restarts=1)
    check_done_twice(story.cluster, resumed_at(story.cluster, ranks=2), ranks=2)


def test_the_first_node_is_lost_and_slurm_starts_the_job_again_on_others(story: Story) -> None:
    story.train()
    story.until_paused()
    story.cluster.kill("t1")
    story.start_now()
    story.check_ended_well(restarts=1)
    check_done_twice(story.cluster, resumed_at(story.cluster, ranks=2), ranks=2)
    assert story.launched(2) == ["t2:1", "t3:1"]


def test_a_no_kill_job_goes_on_with_the_nodes_that_are_left(story: Story) -> None:
    story.train("--no-kill", nodes=3)
    story.until_paused()
    story.cluster.kill("t2")
    story.until(lambda: story.launched(2), "no second attempt")
    assert story.launched(2) == ["t1:1", "t3:1"]
    story.check_ended_well(restarts=0)
    assert resumed_at(story.cluster, ranks=2) == PAUSE_AT // EVERY * EVERY


def test_cancelled_it_is_not_started_again(story: Story) -> None:
    """Staged steps are durable; the ring stays for the next run on this node, and the log names it."""
    story.train()
    story.until_paused()
    story.slurm.said("scancel", str(story.number))
    story.slurm.until(story.number, "CANCELLED")
    story.until(lambda: not story.running(), "something still runs")
    assert story.slurm.job(story.number)["Restarts"] == "0"
    assert story.check_checkpoints() == {EVERY - 1, 2 * EVERY - 1}
    (left,) = story.cluster.status("ring_left")
    assert story.cluster.host("t1").file(left["directory"]).is_dir()
