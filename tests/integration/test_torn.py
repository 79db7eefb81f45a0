"""No published checkpoint mixes two steps, however fast training goes on; and the gate is what prevents it.

More of them: `TORN_SAVES=1000 pytest tests/integration/test_torn.py`.
The fingerprints of the replicas are of the same instant as the copy: a torn one would be a false alarm.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.jobs import fingerprint
from tests.support.job import Job, environment

pytestmark = [pytest.mark.mpi]
SAVES_IN_LAYERS = int(os.environ.get("TORN_SAVES", "60"))


def _run(
    tmp_path: Path, saves: int, *arguments: str, areas: int = 1
) -> tuple[list[Path], list[dict[str, Any]]]:
    store, events = tmp_path / "store", tmp_path / "events.jsonl"
    stager = ["--store", str(store), "--chunk-bytes", "1MiB", "--ring-bytes", "64MiB", "--keep-last", "0"]
    with Job(
        2,
        [fingerprint.__file__, str(saves), *arguments],
        stager,
        env=environment(
            tmp_path / "runtime",
            HOLDFAST_COPY_INSIDE_MS_MAX="0",
            HOLDFAST_EVENTS=str(events),
            HOLDFAST_IN_FLIGHT_MAX=str(areas),
        ),
        log=tmp_path / "job.log",
    ) as job:
        job.succeed(240 + saves)
    return sorted(store.glob("step-*.pt")), list(map(json.loads, events.read_text().splitlines()))


def _alarms(events: list[dict[str, Any]]) -> list[int]:
    """Steps at which replicas were said to differ."""
    return [line["step"] for line in events if line["event"] == "divergence"]


@pytest.mark.timeout(300 + SAVES_IN_LAYERS)
def test_no_checkpoint_mixes_two_steps_that_are_updated_layer_by_layer(tmp_path: Path) -> None:
    check_layers(tmp_path)


def check_layers(tmp_path: Path, *split: str) -> None:
    """With three staging areas: the next copy begins while the ones before are still being sent."""
    files, events = _run(tmp_path, SAVES_IN_LAYERS, "--layers", *split, areas=3)
    assert len(files) >= SAVES_IN_LAYERS
    assert not _alarms(events), "a false alarm: the ranks held the same"
    # Momentum 1 and gradients of -1: the moment counts updates down, the parameter is the sum of the counts.
    sums = np.add.accumulate(np.arange(fingerprint.STEPS_MAX + 2, dtype=np.float32))
    for file in files:
        updates = int(file.stem.removeprefix("step-")) + 1
        state = torch.load(file, weights_only=True)
        assert state["progress"]["updates"] == updates
        assert len(state["model"]) == len(state["optimizer"]["state"]) + 1 == fingerprint.TENSORS + 1
        for name, value in state["model"].items():
            wanted = updates if name == "seen" else float(sums[updates])
            assert value.unique().tolist() == [wanted], f"{file}: {name}"
        for of_parameter in state["optimizer"]["state"].values():
            assert of_parameter["momentum_buffer"].unique().tolist() == [-updates], file
        file.unlink()
    held = [line["gate_seconds"] for line in events if line["event"] == "save"]
    in_flight = max(line["in_flight"] for line in events if line["event"] == "save")
    print(
        f"{len(files)} checkpoints; {sum(map(bool, held))} of {len(held)} updates waited; {in_flight} in flight"
    )
    assert any(held), "no update ever waited: this shows nothing"
