"""A file of a plain model, restored into a real job of FSDP2: no rank gathers, and every bit arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import restored_parts
from tests.integration.jobs.restored_parts import adam, net, take_step
from tests.support.cluster import Cluster, same
from tests.support.restoring import publish

pytestmark = [pytest.mark.mpi]
RANKS = 2
SECONDS_MAX = 120


def test_a_plain_file_is_restored_into_fsdp2_and_trained_on(tmp_path: Path) -> None:
    model = net(seed=1)
    optimizer = adam(model)
    for _ in range(2):
        take_step(model, optimizer)
    store = tmp_path / "store"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    manifest = publish(store, 5, saved, chunk_bytes=4096)
    job = Path(restored_parts.__file__)
    env = {"HOLDFAST_STAGER": "own", "HOLDFAST_STORE": str(store)}
    cluster = Cluster(tmp_path, str(store), env, script=str(job))
    with cluster.start(RANKS, stager=False) as running:
        running.succeed(SECONDS_MAX)
    found = torch.load(cluster.out(1) / "whole.pt", weights_only=True)
    assert same(found["before"]["model"], dict(model.state_dict()))
    assert same(found["before"]["optimizer"]["state"], optimizer.state_dict()["state"])
    for rank in range(RANKS):
        said = json.loads((cluster.out(1) / f"rank-{rank}.json").read_text())
        assert said["first"] == 6
        assert said["collectives"] == 0  # of torch: no rank gathers a tensor
        assert manifest.image_bytes * 0.4 < said["bytes_read"] < manifest.image_bytes * 0.75
        assert said["sources"] == [str(store)]
    take_step(model, optimizer)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found["after"][name], tensor)
