"""A real job is resumed twice, with its model in other wrappers each time: every bit comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.jobs import wrapped
from tests.support.cluster import SMALL, Cluster

pytestmark = [pytest.mark.mpi]
RANKS, STEPS, SECONDS_MAX = 2, 2, 240


def test_a_job_is_resumed_with_its_model_in_other_wrappers(tmp_path: Path) -> None:
    env = {"HOLDFAST_ON_FULL": "wait", "RANKS_IMPORT": "torch._dynamo"}
    store = str(tmp_path / "store")
    cluster = Cluster(tmp_path, store, env, script=wrapped.__file__, stager=SMALL, forked=True)
    forms = ["ddp-of-compiled", "one-layer-compiled", "plain"]
    for number, form in enumerate(forms, 1):
        with cluster.start(RANKS, str(STEPS), form) as job:
            job.succeed(SECONDS_MAX)
        cluster.wait_for_flusher()
        for rank in range(RANKS):
            if number > 1:
                saved = torch.load(cluster.out(number - 1) / f"final-{rank}.pt", weights_only=True)
                found = torch.load(cluster.out(number) / f"restored-{rank}.pt", weights_only=True)
                assert [one.shape for one in found] == [one.shape for one in saved], form
                assert all(torch.equal(*pair) for pair in zip(found, saved, strict=True)), form
            else:
                assert not (cluster.out(number) / f"restored-{rank}.pt").exists()
