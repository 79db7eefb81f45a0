"""Our modules never come from the folder in which a job is started, whatever files it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.support.job import environment

pytestmark = pytest.mark.mpi
_OURS = ("holdfast", "trainer_side", "stager", "flusher", "operator_side")
_SCRIPT = """
import torch
from trainer_side import Checkpointer

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
with Checkpointer({"model": model}) as checkpointer:
    checkpointer.restore()
    checkpointer.save(1)
"""


def test_packages_of_our_names_in_the_working_directory_are_not_run(tmp_path: Path) -> None:
    folder, elsewhere, seen = tmp_path / "work", tmp_path / "script", tmp_path / "seen"
    for name in _OURS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"open({str(seen)!r}, 'a').write(__name__)\nraise SystemExit(0)\n"
        )
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text(_SCRIPT)
    store = tmp_path / "store"
    holdfast = str(Path(sys.executable).with_name("holdfast"))
    done = subprocess.run(
        [
            holdfast,
            "run",
            "-n",
            "2",
            "--store",
            str(store),
            "--",
            sys.executable,
            str(elsewhere / "train.py"),
        ],
        cwd=folder,
        env=environment(tmp_path / "runtime"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not seen.exists(), f"{seen.read_text()} of the folder was run"
    assert done.returncode == 0, done.stderr
    newest = Catalog(open_store(str(store))).newest_good()
    assert newest is not None
    assert newest.step == 1
