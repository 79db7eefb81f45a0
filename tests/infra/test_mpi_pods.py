"""The commands of Kubeflow's MPI runtime in pods that are network and PID namespaces of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.network import why_not
from tests.infra.mpi_pods import NODES, PlayedMpiJob, played_mpi
from tests.integration.jobs.in_a_pod import EVERY, STEPS, counted_after

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "pods can be played here")


def _resumed(job: PlayedMpiJob) -> None:
    assert job.settle() == "RestartJobSet", job.output()
    assert job.settle() == "Completed", job.output()
    for rank in range(NODES):
        before, after = job.starts(rank)
        assert (before, after >= STEPS - 2 * EVERY) == (0, True)
        assert (job.folder / "out" / f"final-{rank}").read_text() == str(counted_after(after))


def test_a_killed_rank_of_an_mpi_job_has_the_run_started_again(tmp_path: Path) -> None:
    with played_mpi(tmp_path) as job:
        job.start()
        job.wait_for_ranks()
        (tmp_path / "out" / "go-on").touch()
        job.pods[1].kill_rank()
        _resumed(job)
