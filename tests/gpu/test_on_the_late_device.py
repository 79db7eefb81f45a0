"""The other tests of this folder, and those of the device itself, on a CUDA device that is not there (tests/late)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.jobs import on_devices
from tests.late.control import is_late
from tests.late.provision import LateRuntime, NoLateRuntime, install
from tests.support.cluster import Cluster, kill_ranks, losses, same

SECONDS_MAX = 900
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(is_late(), reason="this is that device")


@pytest.mark.parametrize("policy", ["side_lazy", "lazy", "eager", "dice:1"])
def test_copies_are_right_whenever_the_device_does_its_work(policy: str) -> None:
    _pytest("--policies", policy, "tests/gpu")


def test_the_rules_of_the_device_hold() -> None:
    _pytest("tests/late")


@pytest.mark.mpi
@pytest.mark.parametrize("mirror", ["0", ""], ids=["behind the gate", "mirror"])
@pytest.mark.parametrize("more", [{}, {"SHARDED": "1"}], ids=["replicas", "FSDP2"])
def test_ranks_on_devices_are_killed_and_go_on_exactly(
    tmp_path: Path, mirror: str, more: dict[str, str]
) -> None:
    """Two ranks, each on a device of its own, under mpirun with a stager; what they exchange goes through gloo."""
    ranks, steps, pause, saved = 2, 14, 8, 5
    env = _runtime().environment(policy="lazy", devices=ranks, device_mib=256)
    env["HOLDFAST_ON_FULL"] = "wait"  # steps take a moment here, and none may be declined
    env |= {"HOLDFAST_DEVICE_BYTES_MAX": mirror} if mirror else {}
    env |= more
    undisturbed, killed = (
        Cluster(tmp_path / name, str(tmp_path / name / "store"), env, script=on_devices.__file__)
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


def _runtime() -> LateRuntime:
    try:
        return install()
    except NoLateRuntime as reason:
        pytest.skip(str(reason))


def _pytest(*arguments: str) -> None:
    _runtime()
    done = subprocess.run(
        [sys.executable, "-m", "tests.late", *arguments, "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout, done.stdout
