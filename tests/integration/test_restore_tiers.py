"""Restore from local tiers over real MPI after a kill of every rank: the nearest first, the rest from other ranks."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.mpirun import mpirun_command
from tests.integration.jobs import tiers as job
from tests.support.job import environment

pytestmark = [pytest.mark.mpi]


class Cluster:
    """Machines whose processes die, and whose disks survive."""

    def __init__(self, root: Path) -> None:
        self.run, self.tiers, self.root = root / "run", root / "tiers", root

    def launch(
        self, ranks: int, *words: str, ulfm: bool = True, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            mpirun_command(ranks, [sys.executable, job.__file__, *words], ulfm=ulfm),
            env=environment(self.root / "runtime", **more),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def save(self, ranks: int, *steps: int) -> None:
        """Save these steps, all complete but the last; then every rank dies."""
        words = map(str, (self.run, self.tiers, self.root, *steps))
        done = self.launch(ranks, "save", *words, ulfm=False)
        assert done.returncode not in (0, 1), (done.stdout, done.stderr)

    def restore(self, ranks: int) -> list[dict[str, Any]]:
        done = self.launch(ranks, "restore", str(self.run), str(self.tiers), str(self.root))
        assert done.returncode == 0, (done.stdout, done.stderr)
        reports = [json.loads((self.root / f"{rank}.json").read_text()) for rank in range(ranks)]
        assert all(all(report["same"]) for report in reports)
        assert len({report["step"] for report in reports}) == 1
        return reports

    def tier(self, rank: int) -> str:
        return f"{'nvme' if rank else 'memory'}:{self.tiers}/machine-{rank}/tier"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_after_sigkill_two_ranks_go_on_from_their_own_tiers_without_the_stores_bytes(
    cluster: Cluster,
) -> None:
    job.saved(3, ranks=2).publish(cluster.run)
    cluster.save(2, 3, 5, 7)
    reports = cluster.restore(2)
    made = job.saved(5, ranks=2)
    for rank, report in enumerate(reports):
        assert (report["step"], report["attempt"], report["own"]) == (5, 1, rank)
        assert report["sources"] == {cluster.tier(rank): made.layout.slice_bytes(rank)}
        assert report["store_requests"] == 0
        assert report["mended"] == []
        (skipped,) = report["skipped"]
        assert "step 7 (attempt 1): the local tiers have 1 of its 2 slices" in skipped
        events = [json.loads(line) for line in (cluster.root / f"events-{rank}").read_text().splitlines()]
        assert events[-1]["event"] == "restore"
        assert events[-1]["sources"][cluster.tier(rank)]["bytes"] == report["bytes_read"]


def check_a_rank_that_is_killed_while_it_restores_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.save(2, 5, 6)
    words = ("restore", str(cluster.run), str(cluster.tiers), str(cluster.root))
    fired = tmp_path / "fired"
    fired.mkdir()
    done = cluster.launch(
        2, *words, HOLDFAST_FAULT="rank:1@restore_read#4=kill", HOLDFAST_FAULT_FIRED=str(fired)
    )
    assert done.returncode != 0
    assert [path.name for path in fired.iterdir()] == ["rank:1@restore_read#4"]
    assert [report["step"] for report in cluster.restore(2)] == [5, 5]


def test_a_lost_machine_is_made_good_by_the_store_and_by_the_other_rank(cluster: Cluster) -> None:
    made = job.saved(5, ranks=2)
    made.publish(cluster.run)
    cluster.save(2, 5, 6)
    shutil.rmtree(cluster.tiers / "machine-1")
    reports = cluster.restore(2)
    assert [(report["step"], report["own"]) for report in reports] == [(5, 0), (5, 1)]
    assert set(reports[0]["sources"]) <= {cluster.tier(0), str(cluster.run)}
    assert set(reports[1]["sources"]) == {str(cluster.run)}
    read_bytes = sum(report["bytes_read"] for report in reports)
    assert read_bytes == made.layout.image_bytes
    assert reports[0]["sources"][cluster.tier(0)] > 0
