"""A rank whose disk answers no read any more: real ranks, and calls of the C library that never return."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.mpirun import mpirun_command
from tests.faults.failing_disk import Calls
from tests.integration.jobs.tiers import saved, tier_of
from tests.support.job import environment
from tests.support.slices import keep

pytestmark = pytest.mark.mpi
_JOB = Path(__file__).with_name("jobs") / "hanging.py"  # not imported: it would start MPI in this process


def test_a_disk_that_hangs_costs_a_restart_a_part_of_its_time_and_is_named(tmp_path: Path) -> None:
    """The rank's slice comes from the store, the other rank's from its tier; and no job begins on that disk."""
    run, tiers = tmp_path / "run", tmp_path / "tiers"
    made = saved(5, ranks=2)
    made.publish(run)
    for rank in range(2):
        tier = tier_of(tiers, run, rank)
        keep(tier, made, rank)
        tier.close()
    calls = Calls(tmp_path / "shim", tiers / "machine-1")
    calls.hang("preadv")
    done = subprocess.run(
        mpirun_command(2, [sys.executable, str(_JOB), str(run), str(tiers), str(tmp_path)]),
        env=environment(tmp_path / "runtime", **calls.environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    dead, living = f"nvme:{tiers}/machine-1/tier", f"memory:{tiers}/machine-0/tier"
    for rank, report in enumerate(reports):
        assert report["step"] == 5
        assert all(report["same"])
        assert dead not in report["sources"]
        (named,) = report["mended"]
        assert named.startswith(
            f"rank 1: {dead}: rank 1's slice of step 5 (attempt 1) in {tiers}/machine-1/tier/"
        )
        assert "no bytes for 1 s, 10% of restore_seconds_max = 10 s: the device hangs" in named
        said = f"{dead} hangs: it has not listed its slices within 1 s"
        assert report["said"].startswith(said if rank == 1 else f"rank 1: {said}")
    assert living in reports[0]["sources"]
    assert str(run) in {place for report in reports for place in report["sources"]}
