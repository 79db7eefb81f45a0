"""A script with a bug under Kubeflow's MPI runtime: `holdfast run` retries, goes back a step, and then gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.network import why_not
from tests.infra.mpi_pods import played_mpi

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "pods can be played here")


def test_a_bug_in_the_script_of_an_mpi_job_fails_it(tmp_path: Path) -> None:
    with played_mpi(tmp_path) as job:
        (tmp_path / "out" / "bug").touch()
        job.start()
        assert job.settle() == "FailJobSet", job.output()
        assert job.codes[0]["holdfast-launcher-0-0"] == 1, job.output()
        assert "the bug of rank 1" in job.output()
        assert len(job.starts(1)) >= 2
