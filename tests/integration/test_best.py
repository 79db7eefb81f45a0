"""A real job whose best checkpoint is an early one: retention keeps it, and `restore(best=…)` restores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.best_finder import find_best
from holdfast.checkpoints.catalog import Catalog
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.store.posix import PosixStore
from tests.integration.jobs import best
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.mpi]
KEPT = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "1")
BEST = ("--keep-best", "1", "--best-metric", "val/loss", "--best-mode", "min")
RANKS, METRIC = 2, "val/loss"


def said(cluster: Cluster, number: int) -> list[dict[str, Any]]:
    return [json.loads((cluster.out(number) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def test_the_best_step_stays_and_is_restored_to_the_bit(tmp_path: Path) -> None:
    """The second job's flusher and checkpoints know of the first one's best only from the store."""
    store = tmp_path / "store"
    env = {"HOLDFAST_COPY": "inside"}  # none is kept because others may turn out doubtful
    cluster = Cluster(tmp_path, str(store), env, script=best.__file__, stager=(*KEPT, *BEST), forked=True)
    with cluster.start(RANKS, "0.9", "0.25", "0.5", "0.75", "nan", "0.875") as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    first = said(cluster, 1)
    assert "step 4: the metric val/loss is not finite" in job.output()
    catalog = Catalog(PosixStore(store))
    assert [item.order for item in catalog.list()] == [CheckpointId(1, 5), CheckpointId(1, 1)]
    assert catalog.get(1).metrics == {METRIC: 0.25}, "as rank 0 said"

    with cluster.start(RANKS, "0.5", "0.625", "--best", METRIC) as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    for rank, second in enumerate(said(cluster, 2)):
        assert second["first"] == 2
        assert second["restored"] == first[rank]["after"]["1"]
        # The same training from the same bits: the optimizer's state came back, too.
        assert second["after"]["2"] == first[rank]["after"]["2"]
    assert [item.order for item in catalog.list()] == [CheckpointId(2, 3), CheckpointId(1, 1)]
    assert find_best(catalog, METRIC).order == CheckpointId(1, 1)
