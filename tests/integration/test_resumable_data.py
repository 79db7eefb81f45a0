"""A run whose loader has workers and prefetch is killed twice at random, and resumes, in the end with other ranks: the
steps that count train on each sample exactly once per epoch.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import data
from tests.support.cluster import Cluster, losses
from trainer_side import ResumableSampler

pytestmark = [pytest.mark.mpi]
EVERY, SAMPLES, BATCH = 5, 53, 3  # an epoch is not a whole number of batches, with 2 ranks or 1
STEPS, LAST_STEPS = (
    30,
    40,
)  # most steps of an attempt; the last one completes a fourth epoch even after early kills

_Lines = dict[int, list[Any]]


def attempt(cluster: Cluster, ranks: int, *, steps: int, dies_at: int = -1) -> _Lines:
    """Run an attempt; return the ranks' records by step, without step `dies_at`."""
    arguments = map(str, (steps, EVERY, SAMPLES, BATCH, dies_at))
    with cluster.start(ranks, *arguments, runtime=cluster.directory / "runtime") as job:
        assert (job.wait(120) == 0) == (dies_at < 0), job.output()
        said = job.output()
    lines = [losses(cluster.out(cluster.started) / f"trained-{rank}") for rank in range(ranks)]
    assert all(set(of_rank) == set(lines[0]) for of_rank in lines), "not all ranks took the same steps"
    assert max(lines[0]) + 1 == (steps if dies_at < 0 else dies_at), said
    return {step: [of_rank[step] for of_rank in lines] for step in lines[0]}


def test_each_sample_is_trained_on_once_per_epoch(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, str(tmp_path / "store"), {}, script=data.__file__, forked=True)
    kills, first = [], 0
    for _ in range(2):  # not right after a save, so that some steps are redone
        kills.append(
            random.choice([step for step in range(first + EVERY, first + STEPS) if step % EVERY > 1])
        )
        first = kills[-1]
    lines = [
        attempt(cluster, 2, steps=first + STEPS, dies_at=kills[0]),
        attempt(cluster, 2, steps=first + STEPS, dies_at=kills[1]),
        attempt(cluster, 1, steps=first + LAST_STEPS),
    ]
    starts = [min(of_attempt) for of_attempt in lines]
    assert starts[0] == 0 < starts[1] <= kills[0] < starts[2] <= kills[1], (starts, kills)
    again = [step for step in lines[0] if step >= starts[1]]
    assert [lines[0][step] for step in again] == [lines[1][step] for step in again], (
        "as many ranks, other bits"
    )
    assert again, "nothing was done again: the test has shown nothing of the bits"
    counted = [
        step
        for of_attempt, end in zip(lines, [*starts[1:], first + LAST_STEPS], strict=True)
        for step in (of_attempt[number] for number in range(min(of_attempt), end))
    ]
    samples = [sample for step in counted for of_rank in step for sample in of_rank["samples"]]
    epochs = [samples[begin : begin + SAMPLES] for begin in range(0, len(samples), SAMPLES)]
    assert len(epochs) > 3
    for epoch in epochs[:-1]:
        assert Counter(epoch) == Counter(range(SAMPLES)), (starts, kills)
    order = ResumableSampler(SAMPLES, seed=data.SEED, rank=0, ranks=1).batches(1)
    assert samples == [next(order)[0] for _ in samples]
