"""Checks of a run over several attempts: the same bits, and each sample exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.hosts.cluster import STEPS, Cluster
from tests.integration.jobs.train import SAMPLES
from tests.support.cluster import load, losses, same
from trainer_side import ResumableSampler

__all__ = ["check_done_twice", "check_same_bits", "check_samples", "resumed_at"]

_SEED = 3  # train.py's


def resumed_at(cluster: Cluster, *, ranks: int) -> int:
    """The first step of the second attempt; checks that it follows the newest staged step, so that none is lost."""
    (restored,) = [line for line in cluster.status("restored") if line["attempt"] == 2]
    (launched,) = [line for line in cluster.status("launched") if line["attempt"] == 2]
    assert launched["ranks"] == ranks
    start = int(restored["step"]) + 1
    assert 0 < start < STEPS, "the first attempt saved nothing, or had done everything"
    for rank in range(ranks):
        assert set(_lines(cluster, 2, rank)) == set(range(start, STEPS)), "it took other steps"
    return start


def check_same_bits(cluster: Cluster, reference: Path, start: int) -> None:
    """With as many ranks as before, losses, samples and the final state equal those of an undisturbed run."""
    for rank in range(3):
        want = losses(reference / f"losses-{rank}")
        assert len(want) == STEPS
        before = {step: line for step, line in _lines(cluster, 1, rank).items() if step < start}
        assert {**before, **_lines(cluster, 2, rank)} == want
        final = load(cluster.out(2) / f"final-{rank}.pt")
        assert final["start"] == start
        assert same({**final, "start": 0}, load(reference / f"final-{rank}.pt"))


def check_done_twice(cluster: Cluster, start: int, *, ranks: int, steps: int = 2) -> None:
    """Repeated steps had the same samples and losses, bit for bit; there were at least `steps` of them."""
    for rank in range(ranks):
        before, after = _lines(cluster, 1, rank), _lines(cluster, 2, rank)
        again = [step for step in before if step >= start]
        assert len(again) >= steps, "it was struck too soon after a checkpoint: the test has shown nothing"
        assert [before[step] for step in again] == [after[step] for step in again]


def check_samples(cluster: Cluster, start: int, ranks: tuple[int, int]) -> None:
    """With any number of ranks, the steps that count took the epochs' orders without a gap or a repetition."""
    taken: list[int] = []
    for step in range(STEPS):
        attempt = 1 if step < start else 2
        for rank in range(ranks[attempt - 1]):
            taken += _lines(cluster, attempt, rank)[step]["samples"]
    alone = ResumableSampler(SAMPLES, seed=_SEED, rank=0, ranks=1).batches(1)
    assert taken == [next(alone)[0] for _ in taken]


def _lines(cluster: Cluster, attempt: int, rank: int) -> dict[int, Any]:
    return losses(cluster.out(attempt) / f"losses-{rank}")
