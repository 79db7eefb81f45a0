"""nanoGPT's loop, which draws a batch before each checkpoint, is killed, and resumes with that batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster, kill_ranks, load, losses, same
from tests.support.job import REPOSITORY
from tests.support.torchrun import by_torchrun

pytestmark = [pytest.mark.mpi]
SCRIPT = str(REPOSITORY / "tests/integration/jobs/nanogpt.py")
RANKS, EVERY, SAVED, PAUSE_AT = 2, 4, 3, 6
WAITS = {"HOLDFAST_ON_FULL": "wait"}  # no step is declined, however slow the machine is
# Rank 0 evaluates at steps 0, 2, 4, …: right before the save, and between it and the next batch.
OPTIONS = ("--steps", "10", "--eval-every", "2", "--width", "16", "--layers", "1", "--block-size", "16")


def test_a_killed_loop_without_a_loader_trains_on_the_batches_and_bits_of_the_plain_script(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, str(tmp_path / "store"), WAITS, script=SCRIPT)
    options = (*OPTIONS, "--data", str(tmp_path / "data"))
    with cluster.start(RANKS, "-1", "train", *options, stager=False, rewrite=by_torchrun(RANKS)) as job:
        job.succeed(120)
    resumable = ("train_resumable", *options, "--every", str(EVERY))
    with cluster.start(RANKS, str(PAUSE_AT), *resumable, forked=True) as job:
        kill_ranks(cluster, job, RANKS, cluster.started, saved=SAVED)
        job.wait(60)
    cluster.wait_for_flusher()
    with cluster.start(RANKS, "-1", *resumable, forked=True) as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    for rank in range(RANKS):
        plain, killed, resumed = (losses(cluster.out(start) / f"losses-{rank}") for start in (1, 2, 3))
        assert killed == {step: plain[step] for step in range(PAUSE_AT)}, "the script draws other batches"
        assert resumed == {step: plain[step] for step in range(SAVED + 1, 10)}, "it resumes with others"
        assert len({line["batch"] for line in plain.values()}) == 10
        finals = [load(cluster.out(start) / f"final-{rank}.pt") for start in (1, 3)]
        assert same(*finals)
