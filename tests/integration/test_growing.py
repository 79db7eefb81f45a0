"""A state that changes its shape during the run: planned again, one staging buffer at a time, no mixed step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.jobs import growing
from tests.support.forked_job import ForkedJob
from tests.support.job import environment

pytestmark = [pytest.mark.mpi]


def test_new_tensors_and_growing_values(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stager = ["--store", str(store), "--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "0"]
    env = environment(tmp_path / "runtime")
    with ForkedJob(2, [growing.__file__], stager, env=env, log=tmp_path / "job.log") as job:
        job.succeed(120)
    assert sorted(path.name for path in store.glob("*.pt")) == [f"step-{step:09d}.pt" for step in (0, 1, 3)]
    first, second, last = (torch.load(store / f"step-{step:09d}.pt", weights_only=True) for step in (0, 1, 3))
    assert first["optimizer"]["state"] == {}
    assert sorted(second["optimizer"]["state"]) == [0, 1]
    assert last["notes"]["text"] == "y" * growing.GROWN
    assert [blob.dtype for blob in last["mine"]] == [torch.uint8, torch.uint8]
