"""Whatever changes the state: a published file is the saved instant, bit for bit, or the step was withdrawn by name.

Two ranks, a stager, a flusher and files. Copies are slow, so that changes right after a save come into them.
tests/soak/test_changes.py has all trainings, and more saves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import changing
from tests.support.job import Job, environment

pytestmark = [pytest.mark.mpi]
SAVES, RANKS = 8, 2


class Outcome:
    """What one job has published, withdrawn and said."""

    def __init__(self, tmp_path: Path, kind: str, saves: int, *arguments: str, **settings: str) -> None:
        store, out = tmp_path / "store", tmp_path / "out"
        options = [
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
            HOLDFAST_EVENTS=str(tmp_path / "events"),
            HOLDFAST_ON_FULL="wait",
            HOLDFAST_IN_FLIGHT_MAX="2",
            **settings,
        )
        with Job(
            RANKS,
            [changing.__file__, str(out), kind, str(saves), *arguments],
            options,
            env=env,
            log=tmp_path / "job.log",
        ) as job:
            job.succeed(240 + 2 * saves)
            self.said = job.output()
        self.stats = [json.loads((out / f"stats-{rank}.json").read_text()) for rank in range(RANKS)]
        self.torn: list[int] = []
        self.published: list[int] = []
        for file in sorted(store.glob("step-*.pt")):
            step = int(file.stem.removeprefix("step-"))
            self.published.append(step)
            state = torch.load(file, weights_only=True)
            if changing.sums(state) != json.loads((out / f"{step}.json").read_text()):
                self.torn.append(step)
        self.withdrawn = sorted(set(range(saves)) - set(self.published))

    def is_whole(self) -> None:
        """Nothing torn is published; every rank has counted what was withdrawn, and its tensor was named."""
        assert not self.torn
        for stats in self.stats:
            assert stats["causes"] == ({"torn": len(self.withdrawn)} if self.withdrawn else {})
            assert stats["failed"] == len(self.withdrawn)
            assert stats["saved"] == len(self.published)
        for step in self.withdrawn:
            assert f"gives up step {step}: torn: " in self.said
        assert "drifted" not in self.said, "the ranks tear alike, which is no drift"


@pytest.mark.parametrize("kind", ["Lookahead", "Unhooked", "AverageThroughData"])
def test_a_published_file_is_the_saved_instant(tmp_path: Path, kind: str) -> None:
    outcome = Outcome(tmp_path, kind, SAVES)
    outcome.is_whole()
    assert len(outcome.published) >= SAVES - RANKS, (
        "each rank may have to see it once, where nothing else shows it"
    )


def test_a_torn_step_is_kept_in_no_tier(tmp_path: Path) -> None:
    """Without a stager: not on the machines' disks, and not in the store."""
    out = tmp_path / "out"
    env = environment(
        tmp_path / "runtime",
        HOLDFAST_STORE=str(tmp_path / "store"),
        HOLDFAST_TIERS=f"file:{tmp_path / 'disk'},store",
        HOLDFAST_ON_FULL="wait",
    )
    command = [changing.__file__, str(out), "Best", str(SAVES), "--trusting"]
    with Job(RANKS, command, None, env=env, log=tmp_path / "job.log") as job:
        job.succeed(240)
        said = job.output()
    torn = [step for step in range(SAVES) if f"gives up step {step}: torn: model/" in said]
    assert torn
    for rank in range(RANKS):
        stats = json.loads((out / f"stats-{rank}.json").read_text())
        assert stats["kept_step"] not in torn
        mine = said.count(f"rank {rank} gives up step")
        # A step that the other rank has withdrawn first counts as void.
        assert stats["failed"] == stats["causes"].get("torn", 0) <= mine <= sum(stats["causes"].values())
        assert stats["saved"] + sum(stats["causes"].values()) == SAVES


def test_without_detection_a_torn_file_is_published(tmp_path: Path) -> None:
    """The test above can fail."""
    assert Outcome(tmp_path, "Unhooked", SAVES, "--blind").torn
