"""How the launch decides on the ranks' transport, and which launches are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from tests.support.blocked import environment_without
from trainer_side.ranks import distributed, joined
from trainer_side.ranks.joined import join_world, launched_without_mpi
from trainer_side.ranks.world import World

_LAUNCHERS = ("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "HOLDFAST_", "MASTER_", "LOCAL_")
_RANKS = {"RANK": "0", "WORLD_SIZE": "2"}

# A script of one rank; it fails if anything of MPI is imported on the way.
_WITHOUT_MPI = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mpi4py" or name.startswith("trainer_side.ranks.mpi"):
            print("imported", name, flush=True)

sys.meta_path.insert(0, Finder())
import trainer_side
rank, ranks = trainer_side.init_torch_distributed("gloo")
state = {"x": __import__("torch").ones(3)}
with trainer_side.Checkpointer(state, every=1) as checkpointer:
    checkpointer.restore()
    checkpointer.step(0)
from trainer_side.ranks.joined import joined_world
print(rank, ranks, type(joined_world()).__name__)
"""


def outside_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name in _RANKS or name.startswith(_LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environ", "stager", "without_mpi"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, None, True),
        ({"TORCHELASTIC_RUN_ID": "none", "PMIX_RANK": "0"}, "host:1", True),  # torchrun under srun
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None, False),
        ({"PMIX_RANK": "0"}, None, False),
        ({"PMI_RANK": "0", **_RANKS}, None, False),  # init_torch_distributed() has set them there
        (_RANKS, None, True),
        ({"RANK": "0"}, "host:1", True),
    ],
)
def test_the_launcher_decides(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], stager: str | None, without_mpi: bool
) -> None:
    outside_any_launcher(monkeypatch)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launched_without_mpi(TrainerConfig(stager=stager)) == without_mpi


def test_a_stager_to_connect_to_is_refused_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    outside_any_launcher(monkeypatch)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"stager: expected none under mpirun, got 'host:1'.*HOLDFAST_STAGER"
    ):
        launched_without_mpi(TrainerConfig(stager="host:1"))


@pytest.mark.parametrize("theirs", [1, 2, 3])
def test_torch_distributed_of_other_ranks_than_the_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, theirs: int
) -> None:
    world = cast(World, SimpleNamespace(ranks=2))
    monkeypatch.setattr(joined, "_world", world)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: theirs)
    if theirs == 2:
        assert join_world(TrainerConfig()) is world
    else:
        with pytest.raises(ConfigError, match=rf"torch\.distributed has {theirs} ranks, the job .* has 2"):
            join_world(TrainerConfig())


@pytest.mark.parametrize("hidden", [False, True], ids=["mpi4py", "no-mpi4py"])
def test_a_launch_without_mpi_imports_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden: bool
) -> None:
    outside_any_launcher(monkeypatch)
    if not hidden:  # a process by itself looks whether there is MPI
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("HOLDFAST_TIERS", f"file:{tmp_path}")
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "store"))
    env = environment_without(tmp_path / "blocked", ("mpi4py",)) if hidden else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MPI],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    *imported, last = done.stdout.splitlines()
    assert last == "0 1 C10dWorld"
    looked_for = ["imported trainer_side.ranks.mpi_world", "imported mpi4py"]
    assert imported == (looked_for if hidden else []), imported


@pytest.mark.parametrize("devices", [0, 2])
def test_nccl_without_a_device_of_its_own_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setattr(distributed, "join_world", lambda _: SimpleNamespace(rank=6, local_rank=2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(
        ConfigError, match=f"rank 6 is number 2 .* finds {devices} here. Leave the backend out"
    ):
        distributed.init_torch_distributed("nccl")
