"""Another way to checkpoint, killed and restarted: resumes from a complete save, whatever files the kill left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.peer_restart import PeerRestart
from benchmarks.supervised import lines
from benchmarks.workload import Workload

WAYS = ("torch.save+fsync", "dcp-thread")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _train(out: Path, way: str, attempt: int, steps: int) -> tuple[int, list[torch.Tensor]]:
    """The step that the attempt began with, and the parameters after its last save was complete."""
    workload = Workload("flat-7-1")
    peer = PeerRestart(way, workload, out, attempt, every=3)
    first = peer.restore()
    for step in range(first, first + steps):
        workload.make_gradients()
        peer.before_update()
        workload.update()
        peer.step(step)
        while peer._open is not None:
            peer.step(step - step % 3)  # looks again, and begins nothing
    return first, [parameter.detach().clone() for parameter in workload.model.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_the_next_attempt_goes_on_from_the_newest_complete_save(tmp_path: Path, way: str) -> None:
    assert _train(tmp_path, way, 1, 6)[0] == 0
    kept = _train(tmp_path, way, 2, 0)
    assert kept[0] == 6
    _, after = _train(tmp_path, way, 3, 3)
    first, again = _train(tmp_path, way, 4, 0)
    assert first == 9
    assert all(torch.equal(one, other) for one, other in zip(after, again, strict=True))
    assert [of["step"] for of in lines(tmp_path / "saves.jsonl")] == [2, 5, 8]


@pytest.mark.parametrize("way", WAYS)
def test_an_attempt_writes_beside_the_newest_save_and_not_over_it(tmp_path: Path, way: str) -> None:
    _train(tmp_path, way, 1, 3)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "peer-1").rglob("*")}
    _train(tmp_path, way, 2, 2)  # killed before its first save
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "peer-1").rglob("*")} == before
    shutil.rmtree(tmp_path / "peer-2")
    assert _train(tmp_path, way, 3, 0)[0] == 3
