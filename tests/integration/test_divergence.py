"""Replicas that drift apart on real ranks are found and named; equal replicas are never reported."""

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
from tests.support.forked_job import ForkedJob
from tests.support.job import environment
from trainer_side.tiers.open_tiers import open_tier

pytestmark = [pytest.mark.mpi]
STEPS = 6


class Outcome:
    """Files and output of one run. Without a stager its ranks write slices to the store and to a local disk."""

    def __init__(
        self,
        directory: Path,
        scenario: str,
        *,
        ranks: int,
        steps: int = STEPS,
        option: str = "warn",
        stager: bool = True,
    ) -> None:
        self.ranks = ranks
        store, events = directory / "store", directory / "events.jsonl"
        options = [
            "--store",
            str(store),
            "--chunk-bytes",
            "64KiB",
            "--ring-bytes",
            "4MiB",
            "--keep-last",
            "0",
        ]
        alone = {
            "HOLDFAST_TIERS": f"file:{directory / 'disk'}",
            "HOLDFAST_STORE": str(store),
            "HOLDFAST_CHUNK_BYTES": "64KiB",
            "HOLDFAST_ON_DIVERGENCE": option,
        }
        (directory / "disk").mkdir()
        with ForkedJob(
            ranks,
            [drifting.__file__, str(directory / "out"), scenario, str(steps)],
            [*options, "--on-divergence", option] if stager else None,
            env=environment(
                directory / "runtime",
                HOLDFAST_EVENTS=str(events),
                HOLDFAST_ON_NOT_DURABLE="warn",
                **({} if stager else alone),
            ),
            log=directory / "job.log",
        ) as job:
            job.succeed(180)
            self.output = " ".join(job.output().split())  # the stager wraps its log lines
        self.store = store
        self.on_disk: dict[int, set[str]] = {}  # step → the verdicts on replicas in its seals
        for kept in open_tier(f"file:{directory / 'disk'}", str(store)).kept_slices():
            self.on_disk.setdefault(kept.seal.step, set()).add(str(kept.seal.save_record.replicas_digest))
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

    def check_named_once(self) -> None:
        (said,) = self.divergences  # once, not at each step
        assert said["step"] == drifting.DRIFT_AT
        assert said["drifted"] == {"2": ["model/module.head.weight"]}
        assert not said["undecided"]
        assert self.output.count("rank 2 differs from most ranks in model/module.head.weight") == 1

    def check_refused(self) -> None:
        assert f"step {drifting.DRIFT_AT}: replicas have drifted apart: rank 2 differs" in self.output
        for said in self.said:
            assert said == {
                "failed": STEPS - drifting.DRIFT_AT,
                "causes": {"the ranks' states differ": STEPS - drifting.DRIFT_AT},
            }


def check_the_rank_that_drifted_is_named_by_majority(tmp_path: Path) -> None:
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
    outcome.check_named_once()


def test_refuse_publishes_nothing_of_it(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "element", ranks=3, option="refuse")
    assert outcome.published == set(range(drifting.DRIFT_AT))
    outcome.check_refused()


def check_without_a_stager_rank_0_says_it_once(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "element", ranks=3, stager=False)
    outcome.check_named_once()
    assert {said["failed"] for said in outcome.said} == {0}
    assert max(outcome.on_disk) == STEPS - 1, "warn keeps it nevertheless"


def test_without_a_stager_refuse_keeps_nothing_of_it(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "element", ranks=3, stager=False, option="refuse")
    outcome.check_refused()
    whole = set(range(drifting.DRIFT_AT))
    assert not outcome.published
    # A slot keeps its bytes until the next write: the complete step is there, and restore prefers it.
    assert max(whole) in outcome.on_disk
    # The refused step has the seals of the ranks that finished before they were told.
    assert all(len(said) == 1 for step, said in outcome.on_disk.items() if step in whole)
