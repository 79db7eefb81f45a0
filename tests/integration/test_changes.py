"""Changes of the state during a copy: a published file equals the saved instant bit for bit, or the step is withdrawn.

Two ranks, a stager, a flusher and files. Copies are slow, so that changes right after a save could enter them.
tests/soak/test_changes.py has all trainings, and more saves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from holdfast.checkpoints.catalog import Catalog
from holdfast.image.manifest import State
from holdfast.store.posix import PosixStore
from operator_side.commands.ls import ls
from tests.integration.jobs import changing
from tests.support.forked_job import ForkedJob
from tests.support.job import Job, environment
from trainer_side.tiers.open_tiers import open_tier

pytestmark = [pytest.mark.mpi]
SAVES, RANKS = 8, 2


class Outcome:
    """Published files, withdrawn steps and output of one job."""

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
        with ForkedJob(
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
        items = Catalog(PosixStore(store)).list()
        self.manifests = {item.step: item.manifest for item in reversed(items) if item.manifest is not None}

    def inside(self, step: int) -> list[bool]:
        """Return, by rank, whether the copy of this step was finished inside `save()`."""
        ranks = self.manifests[step].record["ranks"]
        return [ranks[str(rank)]["copied_inside"] for rank in range(RANKS)]

    def is_whole(self) -> None:
        """No torn file is published; every rank has counted the withdrawn steps, and the changed tensor is named."""
        assert not self.torn
        for stats in self.stats:
            assert stats["causes"] == ({"torn": len(self.withdrawn)} if self.withdrawn else {})
            assert stats["failed"] == len(self.withdrawn)
            assert stats["saved"] == len(self.published)
        for step in self.withdrawn:
            assert f"gives up step {step}: torn: " in self.said
        assert "drifted" not in self.said, "the ranks tear alike, which is no drift"


@pytest.mark.parametrize("kind", ["Lookahead", "AverageThroughData"])
def test_a_published_file_is_the_saved_instant(tmp_path: Path, kind: str) -> None:
    outcome = Outcome(tmp_path, kind, SAVES)
    outcome.is_whole()
    assert len(outcome.published) >= SAVES - RANKS, (
        "each rank may have to see it once, where nothing else shows it"
    )


def test_a_copy_before_a_few_changed_bytes_were_found_is_doubtful(tmp_path: Path) -> None:
    """The changes begin at step 5, in a part of a tensor that only one rank sends. The other rank is told."""
    saves, drawn = 14, 10
    options = ["--from", "5", "--drawn", f"3,{drawn}"]
    outcome = Outcome(tmp_path, "RowsThroughData", saves, *options, HOLDFAST_COPY_INSIDE_MS_MAX="0")
    assert outcome.published == list(range(saves))
    doubtful = [step for step, manifest in outcome.manifests.items() if manifest.doubt]
    assert outcome.torn, "without a torn one nothing is shown"
    assert set(outcome.torn) <= set(doubtful)
    # A rank may begin a save before it is told; then it doubts that save, too.
    late = [step for step in range(drawn + 1, saves) if not all(outcome.inside(step))]
    assert doubtful == [*range(4, drawn), *late]
    assert outcome.inside(saves - 1) == [True] * RANKS, "every rank copies inside from then on"
    for step, manifest in outcome.manifests.items():
        # Torn copies may differ between ranks, and no later sample shows that the replicas do not.
        if manifest.drift:
            assert int(manifest.drift.partition("apart at step ")[2].partition(",")[0] or step) in doubtful
        has_caveat = step in doubtful or bool(manifest.drift)
        assert manifest.state is (State.DURABLE if has_caveat else State.VERIFIED), step
        assert manifest.is_copied_inside == (step in {0, 3, drawn} or (step > drawn and step not in late))
    assert outcome.said.count("in a way that torch does not count, and not in a step") >= 1
    said = CliRunner().invoke(ls, [str(tmp_path / "store"), "--json"], catch_exceptions=False).stdout
    listed = {one["step"]: one for one in json.loads(said)["checkpoints"]}
    assert {step for step, one in listed.items() if one["state"] == "doubtful"} == set(doubtful)
    assert all("may have come into the copy" in listed[step]["doubt"] for step in doubtful)


def test_without_a_stager_the_council_tells_all_ranks_and_slices_are_marked(tmp_path: Path) -> None:
    """The rank that detects the change tells rank 0, which tells all; the slices on disk are marked."""
    out, store, disk = tmp_path / "out", tmp_path / "store", tmp_path / "disk"
    env = environment(
        tmp_path / "runtime",
        HOLDFAST_STORE=str(store),
        HOLDFAST_TIERS=f"file:{disk}",
        HOLDFAST_TIER_SLOTS="8",
        HOLDFAST_ON_FULL="wait",
        HOLDFAST_COPY_INSIDE_MS_MAX="0",
    )
    # The comparison after save(10) is the last: no newer step replaces the earlier ones in their slots.
    command = [changing.__file__, str(out), "RowsThroughData", "11", "--from", "5", "--drawn", "3,10"]
    with Job(RANKS, command, None, env=env, log=tmp_path / "job.log") as job:
        job.succeed(240)
        said = job.output()
    heard = [line for line in said.splitlines() if "save() returns only when its copy is done" in line]
    assert len({line.split("rank ")[1][0] for line in heard}) == RANKS, said
    (directory,) = disk.iterdir()
    for rank in range(RANKS):
        assert (directory / f"rank-{rank:05}.doubts").exists(), "each machine has the mark"
    tier = open_tier(f"file:{disk}", str(store))
    doubts = {kept.seal.step: kept.doubt for kept in tier.kept_slices()}
    tier.close()
    assert all(bool(doubt) == (4 <= step <= 9) for step, doubt in doubts.items()), doubts
    assert any("was changed after save(10)" in doubt for doubt in doubts.values()), doubts


def test_a_torn_step_is_kept_in_no_tier(tmp_path: Path) -> None:
    """Without a stager, the machines' disks do not keep the step."""
    out = tmp_path / "out"
    env = environment(
        tmp_path / "runtime",
        HOLDFAST_STORE=str(tmp_path / "store"),
        HOLDFAST_TIERS=f"file:{tmp_path / 'disk'}",
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
        # A step that the other rank withdrew first counts as void.
        assert stats["failed"] == stats["causes"].get("torn", 0) <= mine <= sum(stats["causes"].values())
        assert stats["saved"] + sum(stats["causes"].values()) == SAVES
