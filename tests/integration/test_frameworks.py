"""The loops that people have: an example is killed by SIGKILL and goes on bit for bit, at night."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.support.cluster import Cluster, kill_ranks, load, losses, same
from tests.support.job import REPOSITORY

pytestmark = [pytest.mark.mpi]
RANKS = 2
# A step is two batches of 16 on 2 ranks: an epoch has 24 steps. An evaluation follows each save.
STEPS, SAVES = ("--steps", "40", "--every", "5"), {4, 9, 14, 19, 24, 29, 34, 39}
WAITS = {"HOLDFAST_ON_FULL": "wait"}  # so that no step is declined on a slow machine
SECONDS_MAX = 400  # per job: a framework's imports are slow on a busy machine


def trained(
    cluster: Cluster, pause_at: int, arguments: tuple[str, ...], *, saved: int = -1
) -> list[dict[int, Any]]:
    """Train; return each rank's records by step. With `pause_at`, kill the ranks there once `saved` is durable."""
    with cluster.start(RANKS, str(pause_at), *arguments) as job:
        if pause_at < 0:
            job.succeed(SECONDS_MAX)
        else:
            kill_ranks(cluster, job, RANKS, cluster.started, saved=saved)
            job.wait(60)
    cluster.wait_for_flusher()
    return [losses(cluster.out(cluster.started) / f"losses-{rank}") for rank in range(RANKS)]


@pytest.mark.timeout(4 * SECONDS_MAX)
def check_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    check_goes_on(tmp_path, "accelerate", STEPS, SAVES, saved=29, pause_at=33)


def check_goes_on(
    tmp_path: Path, name: str, arguments: tuple[str, ...], saves: set[int], *, saved: int, pause_at: int
) -> None:
    """Train uninterrupted, train and kill, resume; compare losses, samples and the final state of each rank."""
    script = str(REPOSITORY / f"tests/integration/jobs/digits_{name}.py")
    through = Cluster(tmp_path / "through", str(tmp_path / "through/store"), WAITS, script=script)
    through.directory.mkdir()
    whole = trained(through, -1, arguments)
    killed = Cluster(tmp_path, str(tmp_path / "store"), WAITS, script=script)
    before = trained(killed, pause_at, arguments, saved=saved)
    after = trained(killed, -1, arguments)
    for rank in range(RANKS):
        assert min(after[rank]) == saved + 1, "it did not resume from the newest checkpoint"
        assert {**before[rank], **after[rank]} == whole[rank], (
            "losses or samples differ from the uninterrupted run's"
        )
        final, expected = (
            load(cluster.out(cluster.started) / f"final-{rank}.pt") for cluster in (killed, through)
        )
        assert list(final) == list(expected)
        assert [part for part in final if not same(final[part], expected[part])] == []
    for cluster in (through, killed):
        assert {item.step for item in Catalog(open_store(cluster.store)).list()} == saves
