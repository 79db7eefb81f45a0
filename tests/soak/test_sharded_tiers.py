"""Nightly. Slices of split tensors in local tiers are restored on another mesh; each rank keeps its parts of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

pytestmark = [pytest.mark.mpi]
# Not imported: torch's own modules warn.
_JOB = Path(__file__).parents[1] / "integration" / "jobs" / "sharded.py"
SECONDS_MAX = 240


def test_slices_of_fsdp_come_back_under_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "truths").mkdir()
    store = tmp_path / "store"
    env = {"HOLDFAST_TIERS": f"nvme:{tmp_path / 'nvme'}", "HOLDFAST_STORE": str(store)}
    cluster = Cluster(tmp_path, str(store), env, script=str(_JOB))
    for case, steps in (("fsdp", 2), ("tp", 3)):
        with cluster.start(2, case, str(steps), str(tmp_path / "truths"), stager=False) as job:
            job.succeed(SECONDS_MAX)
    assert json.loads((cluster.out(2) / "restored.json").read_text()) == {"step": 1, "differ": []}
    assert not [*store.glob("step-*")]  # nothing else had it
