"""State that is split among the ranks becomes one file of whole tensors, and comes back on any mesh, bit for bit.

The files are opened by plain `torch.load(weights_only=True)` in a process without holdfast, and compared there with
what torch gathered itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoints.catalog import Catalog
from holdfast.command import cli
from holdfast.store import open_store
from tests.support.cluster import SMALL, Cluster
from tests.support.job import REPOSITORY
from trainer_side.state.tree import tensor_paths

pytestmark = [pytest.mark.mpi]
_JOB = Path(__file__).with_name("jobs") / "sharded.py"  # not imported: torch's own modules for it warn
_DCP_JOB = "tests.integration.jobs.dcp_fsdp"
SECONDS_MAX = 240
_COMPARE = """
import sys, torch
from pathlib import Path
assert not any(name.partition(".")[0] in ("holdfast", "trainer_side") for name in sys.modules)
def leaves(value, path=""):
    if isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}/{key}")
    else:
        yield path, value
store, out = map(Path, sys.argv[1:])
for file in sorted(store.glob("step-*.pt")):
    saved = torch.load(file, weights_only=True, mmap=True)
    truth = dict(leaves(torch.load(out / f"{int(file.name[5:14])}.pt", weights_only=True)))
    tied = saved["net"]["head.weight"].data_ptr() == saved["net"]["embed.weight"].data_ptr()
    assert tied == (0 in saved["optimizer"]["state"]), "tied, but for stages"
    del saved["rng"]
    mine = dict(leaves(saved))
    assert mine.keys() == truth.keys(), mine.keys() ^ truth.keys()
    for path, one in mine.items():
        other = truth[path]
        same = torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(one) else one == other
        assert same, (file.name, path)
    print(file.name)
"""


class Meshes(Cluster):
    """Jobs on one store, each with its own ranks and mesh."""

    def __init__(self, directory: Path) -> None:
        env = {"HOLDFAST_ON_FULL": "wait"}
        super().__init__(
            directory, str(directory / "store"), env, script=str(_JOB), stager=SMALL, forked=True
        )
        self.truths = directory / "truths"
        self.truths.mkdir()

    def train(self, case: str, ranks: int, steps: int) -> dict[str, Any] | None:
        """Train up to `steps` from the newest checkpoint; return a restored job's report."""
        with self.start(ranks, case, str(steps), str(self.truths)) as job:
            job.succeed(SECONDS_MAX)
        self.wait_for_flusher()
        found = self.out(self.started) / "restored.json"
        return json.loads(found.read_text()) if found.exists() else None

    def placements(self, step: int, paths: Collection[str]) -> dict[str, str]:
        """Return the placements of some tensors of a checkpoint, as `holdfast inspect` shows them."""
        manifest = Catalog(open_store(self.store)).get(step=step)
        return {
            tensor.path: "" if tensor.split is None else manifest.splits[tensor.split].describe()
            for tensor in manifest.tensors
            if tensor.path in paths
        }

    def export(self, name: str, *, step: int, to: str = "safetensors") -> Path:
        """Export a checkpoint."""
        path = self.directory / name
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", f"{self.store}@{step}", str(path), "--to", to])
        assert ended.value.code == 0
        return path

    def compare(self) -> list[str]:
        """Compare all files with the truth in a process without holdfast; return their names."""
        command = [
            sys.executable,
            "-c",
            _COMPARE,
            str(self.directory / "store"),
            str(self.truths),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.directory)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()


def test_the_file_has_whole_tensors_as_torch_gathers_them_and_another_mesh_goes_on_from_it(
    tmp_path: Path,
) -> None:
    """An export of it is exact, too: safetensors reads it, and DCP loads it into FSDP2 on two ranks."""
    meshes = Meshes(tmp_path)
    assert meshes.train("fsdp", 3, 2) is None
    assert meshes.train("fsdp-tp", 4, 3) == {"step": 1, "differ": []}
    placements = {
        "net/blocks.0.up.weight": "split in 4 along dim 0",
        "net/blocks.0.down.weight": "2 x 2 blocks",
        "net/blocks.0.down.bias": "split in 2 along dim 0, replicated x 2",
        "net/embed.weight": "split in 2 along dim 0, replicated x 2",
        "net/seen": "",
        "experts/up": "split in 4 along dim 0",
    }
    assert meshes.placements(2, placements) == placements
    meshes.export("fsdp.safetensors", step=1)
    found = load_file(meshes.directory / "fsdp.safetensors")
    truth = torch.load(meshes.truths / "1.pt", weights_only=True)
    for path, tensor in tensor_paths(truth):
        assert torch.equal(found[path.replace("/", ".")], tensor), path
    folder = meshes.export("folder", step=1, to="dcp")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        _DCP_JOB,
        "load",
        str(folder),
        str(meshes.truths / "1.pt"),
    ]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    # Stages of a pipeline, whole again, and what all of these files hold.
    assert meshes.train("pp", 2, 4) == {"step": 2, "differ": []}
    assert meshes.train("whole", 1, 4) == {"step": 3, "differ": []}
    assert meshes.compare() == [
        "step-000000000.pt",
        "step-000000001.pt",
        "step-000000002-a002.pt",
        "step-000000003-a003.pt",
    ]
