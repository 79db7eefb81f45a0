"""No published checkpoint mixes two steps, however fast training goes on; and the gate is what prevents it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.jobs import fingerprint
from tests.support.job import Job, environment

pytestmark = [pytest.mark.mpi]
SAVES = 200


def _run(tmp_path: Path, saves: int, *arguments: str) -> list[Path]:
    store = tmp_path / "store"
    stager = ["--store", str(store), "--chunk-bytes", "1MiB", "--ring-bytes", "64MiB", "--keep-last", "0"]
    with Job(
        2,
        [fingerprint.__file__, str(saves), *arguments],
        stager,
        env=environment(tmp_path / "runtime"),
        log=tmp_path / "job.log",
    ) as job:
        job.succeed(240)
    return sorted(store.glob("step-*.pt"))


def _stamps(file: Path) -> set[float]:
    """All step numbers that stand anywhere in a checkpoint."""
    state = torch.load(file, weights_only=True)
    stamps = {float(state["progress"]["updates"])}
    tensors = list(state["model"].values())
    for of_parameter in state["optimizer"]["state"].values():
        tensors += of_parameter.values()
    assert len(tensors) == 3 * fingerprint.TENSORS + 1
    for tensor in tensors:
        stamps.update(tensor.unique().tolist())
    return stamps


def test_no_checkpoint_mixes_two_steps(tmp_path: Path) -> None:
    files = _run(tmp_path, SAVES)
    assert len(files) >= SAVES
    for file in files:
        step = int(file.stem.removeprefix("step-"))
        assert _stamps(file) == {float(step + 1)}, file


def test_without_the_gate_checkpoints_are_torn(tmp_path: Path) -> None:
    """The test above can fail: with the hooks removed it would."""
    files = _run(tmp_path, 60, "--no-gate")
    torn = [file for file in files if len(_stamps(file)) > 1]
    assert torn, f"none of {len(files)} checkpoints is torn without the gate: the fingerprint shows nothing"
