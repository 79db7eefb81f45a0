"""No published checkpoint mixes two steps at any speed of training; the gate prevents it.

For more saves: `TORN_SAVES=1000 pytest tests/integration/test_torn.py`.
The fingerprints of replicas are of the same instant as the copy: a torn fingerprint would raise a false alarm.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.image.manifest import State
from holdfast.store.posix import PosixStore
from tests.integration.jobs import changing, fingerprint
from tests.support.forked_job import ForkedJob
from tests.support.job import environment
from trainer_side.state.tree import tensor_paths

pytestmark = [pytest.mark.mpi]
SAVES_IN_LAYERS = int(os.environ.get("TORN_SAVES", "60"))
EDITED_SAVES = 12


def _run(
    tmp_path: Path, saves: int, *arguments: str, areas: int = 1
) -> tuple[list[Path], list[dict[str, Any]]]:
    store, events = tmp_path / "store", tmp_path / "events.jsonl"
    stager = ["--store", str(store), "--chunk-bytes", "1MiB", "--ring-bytes", "64MiB", "--keep-last", "0"]
    with ForkedJob(
        2,
        [fingerprint.__file__, str(saves), *arguments],
        stager,
        env=environment(
            tmp_path / "runtime",
            HOLDFAST_COPY_INSIDE_MS_MAX="0",
            HOLDFAST_EVENTS=str(events),
            HOLDFAST_IN_FLIGHT_MAX=str(areas),
            # A job that saves in every step may find no room for the last one, and trains on.
            HOLDFAST_ON_NOT_DURABLE="warn",
        ),
        log=tmp_path / "job.log",
    ) as job:
        job.succeed(240 + saves)
    return sorted(store.glob("step-*.pt")), list(map(json.loads, events.read_text().splitlines()))


def _alarms(events: list[dict[str, Any]]) -> list[int]:
    """Return the steps at which replicas were reported to differ."""
    return [line["step"] for line in events if line["event"] == "divergence"]


@pytest.mark.timeout(300 + SAVES_IN_LAYERS)
def test_no_checkpoint_mixes_two_steps_that_are_updated_layer_by_layer(tmp_path: Path) -> None:
    check_layers(tmp_path)


def check_layers(tmp_path: Path, *split: str) -> None:
    """Use three staging areas: the next copy begins while earlier ones are still being sent."""
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


class OneRankEdits:
    """A job in which one rank alone changes a few rows by hand, with a record of each rank's state at each save.

    Attributes:
        torn: Published steps with a value that no rank held at the save.
        edited: Number of values in all files that only the editing rank held.
        doubtful, verified: Published steps marked as doubtful; steps that were read back and count as good.
    """

    def __init__(self, tmp_path: Path, kind: str, *options: str, **settings: str) -> None:
        store, out = tmp_path / "store", tmp_path / "out"
        stager = [
            "--store",
            str(store),
            "--chunk-bytes",
            "64KiB",
            "--ring-bytes",
            "16MiB",
            "--keep-last",
            "0",
        ]
        env = environment(
            tmp_path / "runtime",
            HOLDFAST_ON_FULL="wait",
            HOLDFAST_IN_FLIGHT_MAX="2",
            HOLDFAST_COPY_INSIDE_MS_MAX="0",
            **settings,
        )
        command = [changing.__file__, str(out), kind, str(EDITED_SAVES), "--only", "1", *options]
        with ForkedJob(2, command, stager, env=env, log=tmp_path / "job.log") as job:
            job.succeed(300)
            self.said = job.output()
        manifests = [item.manifest for item in Catalog(PosixStore(store)).list() if item.manifest is not None]
        self.published = sorted(manifest.step for manifest in manifests)
        self.doubtful = {manifest.step for manifest in manifests if manifest.doubt}
        self.verified = {manifest.step for manifest in manifests if manifest.state is State.VERIFIED}
        self.torn: set[int] = set()
        self.edited = 0
        for manifest in manifests:
            truths = [torch.load(out / f"truth-{manifest.step}-{rank}.pt") for rank in range(2)]
            theirs, mine = (dict(tensor_paths(truth)) for truth in truths)
            for path, value in tensor_paths(torch.load(store / manifest.file, weights_only=True)):
                own = (value == mine[path]) & (value != theirs[path])
                self.edited += int(own.sum())
                if not ((value == theirs[path]) | own).all():
                    self.torn.add(manifest.step)


def test_rows_that_one_rank_changes_by_hand_tear_no_checkpoint(tmp_path: Path) -> None:
    outcome = OneRankEdits(tmp_path, "RowsOfAllByNumpy", HOLDFAST_ON_DIVERGENCE="warn")
    assert outcome.published == [*range(EDITED_SAVES)]
    assert outcome.edited, "the rank's own rows are in no file"
    assert not outcome.torn
    assert re.search(r"rank 1: \S+ was changed after save\(0\), in a way that torch does not", outcome.said)
    assert "rank 0: save() returns only when its copy is done from now on, as rank 1 has seen" in outcome.said
    assert outcome.verified == {0}, "the ranks drift apart, and that is seen"


def test_a_step_torn_by_one_rank_before_detection_is_doubtful(tmp_path: Path) -> None:
    """The edits begin when all is proven; the save after which the whole state is compared comes later."""
    options = ["--from", "4", "--drawn", "2,9"]
    outcome = OneRankEdits(tmp_path, "RowsOfAll", *options, HOLDFAST_ON_DIVERGENCE="off")
    assert outcome.published == [*range(EDITED_SAVES)]
    assert outcome.torn, "without a torn one nothing is shown"
    assert outcome.torn <= outcome.doubtful
    assert not outcome.doubtful & outcome.verified
    assert {0, 1, 2} <= outcome.verified
