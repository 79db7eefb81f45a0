"""Nightly, more of tests/integration/test_torn.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import fingerprint
from tests.integration.test_torn import SAVES_IN_LAYERS, _alarms, _run, check_layers

pytestmark = [pytest.mark.mpi]

SAVES = int(os.environ.get("TORN_SAVES", "100"))


def _stamps(file: Path) -> set[float]:
    """All step numbers anywhere in a checkpoint."""
    state = torch.load(file, weights_only=True)
    stamps = {float(state["progress"]["updates"])}
    tensors = list(state["model"].values())
    for of_parameter in state["optimizer"]["state"].values():
        tensors += of_parameter.values()
    assert len(tensors) == 3 * fingerprint.TENSORS + 1
    for tensor in tensors:
        stamps.update(tensor.unique().tolist())
    return stamps


@pytest.mark.timeout(300 + SAVES)
def test_no_checkpoint_mixes_two_steps(tmp_path: Path) -> None:
    files, events = _run(tmp_path, SAVES)
    print(f"{len(files)} checkpoints")
    assert len(files) >= SAVES
    compared = [line for line in events if line["event"] == "save" and "fingerprint_seconds" in line]
    assert len(compared) >= 2 * SAVES
    assert not _alarms(events), "a false alarm: the ranks held the same"
    for file in files:
        step = int(file.stem.removeprefix("step-"))
        assert _stamps(file) == {float(step + 1)}, file
        file.unlink()  # many files need space


@pytest.mark.parametrize("split", [(), ("--sharded",)], ids=["whole", "sharded"])
def test_without_the_gate_checkpoints_are_torn(tmp_path: Path, split: tuple[str, ...]) -> None:
    """Shows that the test above can fail: without the hooks, checkpoints are torn."""
    files, events = _run(tmp_path, 60, "--no-gate", *split)
    torn = [file for file in files if len(_stamps(file)) > 1]
    assert torn, f"none of {len(files)} checkpoints is torn without the gate: the fingerprint shows nothing"
    if split:
        return  # no value is there twice to be compared
    assert _alarms(events), "no fingerprint is torn without the gate: that none is with it shows nothing"


@pytest.mark.timeout(300 + SAVES_IN_LAYERS)
def test_no_checkpoint_of_split_tensors_mixes_two_steps(tmp_path: Path) -> None:
    check_layers(tmp_path, "--sharded")
