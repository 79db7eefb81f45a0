"""One rank alone changes its tensors, or their split: all ranks name it at that save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.support.cluster import SMALL, Cluster
from trainer_side.tiers.open_tiers import open_tier

pytestmark = [pytest.mark.mpi]
_JOB = Path(__file__).with_name("jobs") / "split_change.py"
RANKS = 2
SECONDS_MAX = 400

# change → the rank that changes, and what is said of it
CHANGES = {
    "other_rows": (1, "tensor split/w: float32 [16, 2], split, [8:16, 0:2] here before"),
    "other_placement": (1, "tensor sharded/w: float32 [16, 2], split, [8:16, 0:2] here before"),
    "no_split": (1, "tensor split/w: float32 [16, 2], split, [8:16, 0:2] here before"),
    "other_dtype": (0, "tensor plain/b: float32 [5], of rank 0 before, float64 [5], of rank 0 now"),
    "one_more": (1, "tensor plain/c (float32 [3], of rank 0) is new"),
    "one_less": (0, "tensor plain/b (float32 [5], of rank 0) is gone"),
}


@pytest.mark.parametrize("stager", [True, False], ids=["beside a stager", "alone"])
def test_a_changed_split_is_named_at_that_save_and_the_next_one_is_saved(
    tmp_path: Path, stager: bool
) -> None:
    store = tmp_path / "store"
    env = {} if stager else {"HOLDFAST_TIERS": f"file:{tmp_path}", "HOLDFAST_STORE": str(store)}
    cluster = Cluster(
        tmp_path, str(store), {**env, "HOLDFAST_ON_FULL": "wait"}, script=str(_JOB), stager=SMALL
    )
    with cluster.start(RANKS, stager=stager) as job:
        job.succeed(SECONDS_MAX)
        output = " ".join(job.output().split())
    cluster.wait_for_flusher()
    said: list[dict[str, Any]] = [
        json.loads((cluster.out(1) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)
    ]
    for number, (change, (changed, words)) in enumerate(CHANGES.items()):
        heard = said[changed][change]
        # A rank that waits for the others until a deadline would get a PeerLost.
        assert (heard["before"], heard.get("class")) == (True, "StateError"), heard
        same = 1 - changed
        start = f"step {2 * number + 1}: the state of rank {changed} has changed, and that of rank {same} has not: "
        assert heard["message"].startswith(start + words), heard
        assert said[same][change] == {"before": True, "saved": True}
        assert start in output
    kept = {item.step for item in Catalog(open_store(str(store))).list()}
    if not stager:
        kept = {one.seal.step for one in open_tier(f"file:{tmp_path}", str(store)).kept_slices()}
    assert 2 * len(CHANGES) in kept
    assert not {step for step in kept if step % 2}, "nothing of a step that one rank did not save"
