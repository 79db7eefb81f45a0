"""Runs the other tests of this folder on the late device (tests/late), and jobs on several such devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_late_rules import POLICIES
from tests.late.control import is_late
from tests.late.running import SECONDS_MAX, late_runtime, run_late
from tests.support.cluster import Cluster, kill_ranks, losses, same

pytestmark = pytest.mark.skipif(is_late(), reason="this is that device")
_JOB = Path(__file__).with_name("jobs") / "on_devices.py"  # not imported: FSDP2 takes a second of each worker


# How a job runs ─► whether `make rest` runs it; the others are in tests/soak/test_late_policies.py.
WAYS = {
    "replicas, mirror": True,
    "replicas, gate": False,
    "FSDP2, mirror": False,
    "FSDP2, gate": True,
}


def test_copies_are_right_whenever_the_device_does_its_work() -> None:
    run_late("--policies", POLICIES, "tests/gpu")


@pytest.mark.mpi
@pytest.mark.parametrize("way", [name for name, is_regular in WAYS.items() if is_regular])
def test_ranks_on_devices_are_killed_and_go_on_exactly(tmp_path: Path, way: str) -> None:
    resumes_exactly(tmp_path, way)


def resumes_exactly(tmp_path: Path, way: str) -> None:
    """Two ranks, each on a device of its own, under mpirun with a stager; their collectives use gloo."""
    ranks, steps, pause, saved = 2, 14, 8, 5
    env = late_runtime().environment(policy="lazy", devices=ranks, device_mib=256)
    env["HOLDFAST_ON_FULL"] = "wait"  # steps take a moment here, and none may be declined
    env |= {"HOLDFAST_DEVICE_BYTES_MAX": "0"} if way.endswith("gate") else {}
    env |= {"SHARDED": "1"} if way.startswith("FSDP2") else {}
    undisturbed, killed = (
        Cluster(tmp_path / name, str(tmp_path / name / "store"), env, script=str(_JOB))
        for name in ("undisturbed", "killed")
    )
    for one in (undisturbed, killed):
        one.directory.mkdir()
    with undisturbed.start(ranks, str(steps)) as job:
        job.succeed(SECONDS_MAX)
    with killed.start(ranks, str(steps), str(pause)) as job:
        kill_ranks(killed, job, ranks, 1, saved=saved)
        job.kill()
    with killed.start(ranks, str(steps)) as job:
        job.succeed(SECONDS_MAX)
    for rank in range(ranks):
        wanted = losses(undisturbed.out(1) / f"losses-{rank}")
        assert losses(killed.out(2) / f"losses-{rank}") == {
            step: wanted[step] for step in range(saved + 1, steps)
        }
        ends = (undisturbed.out(1), killed.out(2))
        first, second = (torch.load(out / f"final-{rank}.pt", map_location="cpu") for out in ends)
        assert same(first, second)
