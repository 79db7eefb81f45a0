"""The commands of Kubeflow's MPI runtime in pods that are network and PID namespaces of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.hosts.network import why_not
from tests.infra.mpi_pods import NODES, PlayedMpiJob, played_mpi
from tests.integration.jobs.in_a_pod import EVERY, MET_AT, STEPS, counted_after

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "pods can be played here")

RESTARTED = "RestartJobSetAndIgnoreMaxRestarts"
STAGED = re.compile(r"the checkpoint of step (\d+), saved because rank 1 .* is staged")


def _completed_from(job: PlayedMpiJob, step_min: int) -> None:
    """Check that the JobSet completes; its last start began at this step or later, and each step ran exactly once."""
    assert job.settle() == "Completed", job.output()
    for rank in range(NODES):
        before, after = job.starts(rank)
        assert (before, after >= step_min) == (0, True)
        assert (job.folder / "out" / f"final-{rank}").read_text() == str(counted_after(after))


def test_a_killed_rank_of_an_mpi_job_is_started_again_in_its_pod(tmp_path: Path) -> None:
    with played_mpi(tmp_path) as job:
        job.start()
        job.wait_for_ranks()
        (tmp_path / "out" / "go-on").touch()
        job.pods[1].kill_rank()
        _completed_from(job, STEPS - 2 * EVERY)


def test_a_node_pod_that_is_told_to_go_has_the_ranks_save_and_all_pods_started_again(tmp_path: Path) -> None:
    with played_mpi(tmp_path) as job:
        (tmp_path / "out" / "stay").touch()
        job.start()
        job.wait_for_ranks()
        (tmp_path / "out" / "go-on").touch()
        gone = job.pods[1]
        job.take(gone, lambda: STAGED.search(job.output()) is not None)
        assert job.settle() == RESTARTED, job.output()
        # Not 0: JobSet would take the run for completed.
        assert job.codes[0][gone.name] == RETRY_EXIT_CODE, job.output()
        assert job.codes[0]["holdfast-launcher-0-0"] != 0, job.output()
        # The step saved because of the notice is later than any step due without it.
        _completed_from(job, MET_AT + 2)
