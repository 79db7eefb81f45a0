"""Nightly. A state saved on any mesh is restored onto any other one, bit for bit: all pairs.

One job for each mesh saves a state; then one job for each number of ranks restores all of them onto each of its meshes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_sharded import SECONDS_MAX, Meshes
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.mpi]
# Not imported: torch's modules warn.
_JOB = Path(__file__).parents[1] / "integration" / "jobs" / "mesh_pairs.py"
MESHES_OF = {
    1: ("whole", "fsdp"),
    2: ("whole", "fsdp", "columns", "tp", "pp"),
    3: ("fsdp",),
    4: ("whole", "fsdp", "hsdp", "tp", "fsdp-tp", "pp-fsdp"),
}
_ALL = [(case, ranks) for ranks, cases in MESHES_OF.items() for case in cases]


@pytest.mark.timeout(3000)
def test_state_saved_on_any_mesh_comes_back_on_every_mesh(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for case, ranks in _ALL:
        (run := runs / f"{case} of {ranks}").mkdir(parents=True)
        assert Meshes(run).train(case, ranks, 1) is None
    cluster = Cluster(tmp_path, str(tmp_path / "none"), {}, script=str(_JOB))
    for number, (ranks, cases) in enumerate(MESHES_OF.items(), 1):
        with cluster.start(ranks, str(runs), *cases, stager=False) as job:
            job.succeed(2 * SECONDS_MAX)
        pairs = json.loads((cluster.out(number) / "pairs.json").read_text())
        assert set(pairs) == {f"{case} of {of} onto {onto}" for case, of in _ALL for onto in cases}
        assert {pair: differ for pair, differ in pairs.items() if differ} == {}
