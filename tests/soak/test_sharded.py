"""Any mesh resumes from any other, and the same mesh continues with the same bits after a kill."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.integration.test_sharded import SECONDS_MAX, Meshes

pytestmark = [pytest.mark.mpi]
# Each resumes from the one before.
CHAIN = [
    ("whole", 1),
    ("fsdp", 2),
    ("fsdp", 4),
    ("hsdp", 4),
    ("fsdp-tp", 4),
    ("tp", 2),
    ("columns", 2),
    ("fsdp", 3),
    ("tp", 4),
    ("hsdp", 4),
    ("fsdp", 1),
    ("fsdp-tp", 4),
    ("whole", 2),
    ("pp", 2),
    ("pp-fsdp", 4),
    ("whole", 2),
    ("pp-fsdp", 4),
    ("fsdp", 3),
    ("pp", 2),
]


@pytest.mark.timeout(2000)
def test_each_mesh_resumes_from_the_one_before(tmp_path: Path) -> None:
    meshes = Meshes(tmp_path)
    for number, (case, ranks) in enumerate(CHAIN):
        found = meshes.train(case, ranks, number + 1)
        assert found == (None if number == 0 else {"step": number - 1, "differ": []}), (case, ranks)
    assert len(meshes.compare()) == len(CHAIN)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["fsdp", "tp", "pp"])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, case: str) -> None:
    steps = 12
    (tmp_path / "whole").mkdir()
    whole = Meshes(tmp_path / "whole")
    assert whole.train(case, 2, steps) is None
    (tmp_path / "killed").mkdir()
    killed = Meshes(tmp_path / "killed")
    with killed.start(2, case, str(steps), str(killed.truths)) as job:
        deadline = time.monotonic() + SECONDS_MAX
        while len(list(Path(killed.store).glob("step-*[0-9].json"))) < 3:
            assert time.monotonic() < deadline, job.output()
            assert job.process.poll() is None, job.output()
            time.sleep(0.01)
        job.kill()
    found = killed.train(case, 2, steps)
    assert found is not None
    assert found["differ"] == []
    assert 2 <= found["step"] < steps
    last = f"{steps - 1}.pt"
    left = torch.load(whole.truths / last, weights_only=True)
    right = torch.load(killed.truths / last, weights_only=True)
    assert left["net"].keys() == right["net"].keys()
    for name, tensor in left["net"].items():
        assert torch.equal(tensor, right["net"][name]), name
