"""Replicas that drift apart on real ranks are found, and named; those that do not are never reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from operator_side.commands.ls import ls
from operator_side.commands.verify import verify
from tests.integration.jobs import drifting
from tests.support.job import Job, environment

pytestmark = [pytest.mark.mpi]
STEPS = 6


class Outcome:
    """What one run of the job left."""

    def __init__(
        self, directory: Path, scenario: str, *, ranks: int, steps: int = STEPS, option: str = "warn"
    ) -> None:
        self.ranks = ranks
        store, events = directory / "store", directory / "events.jsonl"
        stager = ["--store", str(store), "--chunk-bytes", "64KiB", "--ring-bytes", "4MiB", "--keep-last", "0"]
        with Job(
            ranks,
            [drifting.__file__, str(directory / "out"), scenario, str(steps)],
            [*stager, "--on-divergence", option],
            env=environment(directory / "runtime", HOLDFAST_EVENTS=str(events)),
            log=directory / "job.log",
        ) as job:
            job.succeed(180)
            self.output = " ".join(job.output().split())  # the stager's log is broken into lines
        self.store = store
        items = Catalog(open_store(str(store))).list()
        self.published = {item.step for item in items}
        self.states = {item.step: item.state for item in items}
        self.drift = {item.step: item.drift for item in items}
        lines: list[dict[str, Any]] = list(map(json.loads, events.read_text().splitlines()))
        self.saves = [line for line in lines if line["event"] == "save"]
        self.divergences = [line for line in lines if line["event"] == "divergence"]
        self.said = [
            json.loads((directory / "out" / f"rank-{rank}.json").read_text()) for rank in range(ranks)
        ]


def test_the_rank_that_drifted_is_named_by_majority(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "element", ranks=3)
    assert outcome.published == set(range(STEPS)), "warn stages nevertheless"
    assert outcome.states == {
        step: "verified" if step < drifting.DRIFT_AT else "drifted" for step in range(STEPS)
    }
    assert "rank 2 differs from most ranks in model/module.head.weight" in outcome.drift[STEPS - 1]
    listed = CliRunner().invoke(ls, [str(outcome.store)])
    assert "rank 2 differs from most ranks in model/module.head.weight" in " ".join(listed.output.split())
    checked = CliRunner().invoke(verify, [f"{outcome.store}@{STEPS - 1}"])
    assert checked.exit_code == 0, checked.output
    assert "whole, but drifted" in checked.output
    (said,) = outcome.divergences  # once, not at each step
    assert said["step"] == drifting.DRIFT_AT
    assert said["drifted"] == {"2": ["model/module.head.weight"]}
    assert not said["undecided"]
    assert outcome.output.count("rank 2 differs from most ranks in model/module.head.weight") == 1


def test_refuse_publishes_nothing_of_it(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "element", ranks=3, option="refuse")
    assert outcome.published == set(range(drifting.DRIFT_AT))
    assert f"step {drifting.DRIFT_AT}: replicas have drifted apart: rank 2 differs" in outcome.output
    for said in outcome.said:
        assert said == {
            "failed": STEPS - drifting.DRIFT_AT,
            "causes": {"the ranks' states differ": STEPS - drifting.DRIFT_AT},
        }
