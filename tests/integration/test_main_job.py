"""The main job resumed by fewer and by more ranks, and with a damaged newest checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.story.test_main_job import local
from tests.support.cluster import Cluster, load, same
from tests.support.main_job import RUN, SAVED, Finished

pytestmark = [pytest.mark.mpi]


@pytest.fixture
def after(finished: Finished, local: Cluster) -> Cluster:
    """A fresh cluster whose store holds what the finished one published."""
    shutil.copytree(finished.store, local.store)
    return local


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_world_size_takes_up_the_same_state(after: Cluster, ranks: int) -> None:
    newest = load(max(Path(after.store).glob("*.pt")))
    with after.start(ranks, *RUN, forked=True) as job:
        job.succeed(120)
        said = job.output()
    assert said.count(f"step 11 was saved by 2 ranks, and this job has {ranks}:") == 1, said
    for rank in range(ranks):
        restored = load(after.out(1) / f"restored-{rank}.pt")
        for name in ("model", "optimizer", "scheduler", "data"):
            assert same(restored[name], newest[name]), (rank, name)


def test_a_damaged_checkpoint_is_passed_over_with_the_reason(after: Cluster) -> None:
    newest = max(Path(after.store).glob("*.pt"))
    assert newest.name == "step-000000011.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0x10
    newest.write_bytes(content)
    with after.start(2, *RUN, forked=True) as job:
        job.succeed(120)
        said = job.output()
    for rank in range(2):
        assert load(after.out(1) / f"final-{rank}.pt")["start"] == SAVED + 1
    assert "11" in said, said
    assert "step 7" in said, said
