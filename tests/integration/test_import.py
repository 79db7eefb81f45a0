"""A training that saved with torch.save moves to holdfast: its file is imported, and a real job resumes from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.command import cli
from holdfast.store import open_store
from tests.integration.jobs import dcp_fsdp, train
from tests.integration.jobs.sharded import differences
from tests.support.cluster import Cluster, load, same
from tests.support.job import HOLDFAST, REPOSITORY, environment
from trainer_side import ResumableSampler

pytestmark = [pytest.mark.mpi]


def old_file(path: Path, *, steps: int) -> Path:
    """Write a file like that of tests/integration/jobs/train.py before it used holdfast."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(
        torch.nn.Linear(train.FEATURES, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.GELU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(64, train.FEATURES),
    )
    model = torch.nn.ModuleDict({"module": net})  # DistributedDataParallel's name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    sampler = ResumableSampler(train.SAMPLES, seed=3, rank=0, ranks=2)
    batches = sampler.batches(train.BATCH)
    for _ in range(steps):
        next(batches)
        optimizer.zero_grad()
        net(torch.randn(train.BATCH, train.FEATURES)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": sampler}
    torch.save({"epoch": 1, **{name: value.state_dict() for name, value in state.items()}}, path)
    return path


def saved_under_fsdp(directory: Path, *, rows: int) -> Path:
    """Make a folder by dcp.save on two ranks."""
    folder, truth = directory / "old", directory / "truth.pt"
    job = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        dcp_fsdp.__name__,
        "save",
        str(folder),
        str(truth),
        str(rows),
    ]
    subprocess.run(job, check=True, cwd=REPOSITORY)
    return folder


def assert_imported(directory: Path, rows: int) -> None:
    """Assert that the run has the ranks' state, whole and bit for bit."""
    found = torch.load(directory / "run" / "step-000000007.pt", weights_only=True, mmap=True)
    for number in range(dcp_fsdp.LARGE):
        assert torch.equal(found["large"][str(number)], dcp_fsdp.large_tensor(number, rows)), number
    del found["large"]
    assert differences(found, torch.load(directory / "truth.pt", weights_only=True)) == []


def test_a_job_goes_on_from_what_torch_saved(tmp_path: Path) -> None:
    file = old_file(tmp_path / "old.pt", steps=3)
    cluster = Cluster(
        tmp_path, str(tmp_path / "store"), {"TRAIN_MAY_LACK": "rng"}, script=train.__file__, forked=True
    )
    command = [HOLDFAST, "import", str(file), cluster.store, "--step", "2", "--drop", "epoch"]
    subprocess.run(command, env=environment(tmp_path / "runtime"), check=True)
    with cluster.start(2, "6", "3") as job:
        job.succeed(120)
        said = job.output()
    cluster.wait_for_flusher()
    assert "so they keep the script's values: 'rng'" in said
    saved = load(file)
    for rank in range(2):
        assert load(cluster.out(1) / f"final-{rank}.pt")["start"] == 3
        restored = load(cluster.out(1) / f"restored-{rank}.pt")
        for name in ("model", "optimizer", "scheduler", "data"):
            assert same(restored[name], saved[name]), (rank, name)
    items = Catalog(open_store(cluster.store)).list()
    assert [(item.step, item.state) for item in items] == [(5, "verified"), (2, "verified")]
    assert "rng" in load(tmp_path / "store" / "step-000000005-a002.pt"), "from now on it is there"


def test_killed_it_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "old.pt"
    torch.save({"x": torch.arange(5000.0)}, file)
    command = [HOLDFAST, "import", str(file), str(tmp_path / "run"), "--step", "7"]
    killed = subprocess.run(
        command, env={**os.environ, "HOLDFAST_FAULT": "tool@image_named=kill"}, check=False
    )
    assert killed.returncode == -9
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    store = open_store(str(tmp_path / "run"))
    manifest = Catalog(store).get()
    assert (manifest.attempt, manifest.step, manifest.state) == (2, 7, "verified")
    assert torch.equal(torch.load(tmp_path / "run" / manifest.file)["x"], torch.arange(5000.0))


def test_a_folder_of_a_sharded_run_becomes_whole_tensors(tmp_path: Path) -> None:
    rows = 7  # uneven on two ranks
    folder = saved_under_fsdp(tmp_path, rows=rows)
    assert len(list(folder.glob("*.distcp"))) == dcp_fsdp.RANKS
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", str(folder), str(tmp_path / "run"), "--step", "7"])
    assert ended.value.code == 0
    assert_imported(tmp_path, rows)
