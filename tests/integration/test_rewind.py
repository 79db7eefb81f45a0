"""A rewound job in real processes: trains bit for bit as before up to the skipped batches, then without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.checkpoints.lease import find_local_writer
from holdfast.store import open_store
from operator_side.commands.ls import ls
from operator_side.commands.rewind import rewind
from tests.integration.jobs import data
from tests.support.cluster import Cluster, losses, wait_until

pytestmark = [pytest.mark.mpi]
RANKS, EVERY, SAMPLES, BATCH = 2, 5, 53, 3  # 20 steps reach a third epoch


def trained(cluster: Cluster, steps: int) -> list[dict[int, Any]]:
    """Train; return each rank's samples by step."""
    arguments = map(str, (steps, EVERY, SAMPLES, BATCH, -1))
    with cluster.start(RANKS, *arguments, runtime=cluster.directory / "runtime") as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    # `rewind` refuses while its process runs, which may take seconds to exit.
    wait_until(lambda: not find_local_writer(open_store(cluster.store)), 60, "the flusher has not exited")
    return [losses(cluster.out(cluster.started) / f"trained-{rank}") for rank in range(RANKS)]


def test_a_job_goes_on_from_an_older_step_without_the_batches_of_a_spike(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, str(tmp_path / "store"), {}, script=data.__file__, forked=True)
    spiked = trained(cluster, 20)
    typed = CliRunner().invoke(
        rewind, [cluster.store, "--to", "4", "--skip-batches", "7..9"], catch_exceptions=False
    )
    assert "branch 2 begins there" in typed.stdout
    branch, later = trained(cluster, 12), trained(cluster, 16)
    for rank in range(RANKS):
        assert sorted(branch[rank]) == list(range(5, 12))
        assert [branch[rank][step] for step in (5, 6)] == [spiked[rank][step] for step in (5, 6)], (
            "other bits"
        )
        samples = [branch[rank][step]["samples"] for step in range(7, 12)]
        assert samples == [spiked[rank][step]["samples"] for step in range(10, 15)]
        assert branch[rank][7]["loss"] != spiked[rank][10]["loss"], "the weights have not seen 7 to 9"
        # The restart continues in the branch, and skips nothing a second time.
        assert sorted(later[rank]) == list(range(10, 16))
        assert [later[rank][step] for step in (10, 11)] == [branch[rank][step] for step in (10, 11)]
        samples = [later[rank][step]["samples"] for step in range(12, 16)]
        assert samples == [spiked[rank][step]["samples"] for step in range(15, 19)]
    listed = json.loads(CliRunner().invoke(ls, [cluster.store, "--json"]).stdout)["checkpoints"]
    assert {(one["step"], one["branch"]): one["current"] for one in listed} == {
        (14, 2): True,
        (9, 2): True,
        (19, 1): False,
        (14, 1): False,
        (9, 1): False,
        (4, 1): True,
    }
