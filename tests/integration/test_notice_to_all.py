"""SIGTERM to every process of a job, as from Slurm and pods: loaders' workers die first, and the loader raises.

That exception leaves the training loop; all ranks save the last finished step, or report why not.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.integration.jobs import grouped
from tests.support.cluster import Cluster, load, same, wait_until
from tests.support.job import Job, environment
from tests.support.standing_stager import standing_stager
from tests.support.torchrun import by_torchrun

pytestmark = [pytest.mark.mpi]
SECONDS_MAX = 150.0
LAST = grouped.STANDS_AT - 1


class Place:
    """A cluster with one kind of launcher."""

    def __init__(self, directory: Path, launcher: str, address: str) -> None:
        env = {"HOLDFAST_WATCH": "sigterm", "HOLDFAST_EVENTS": str(directory / "events")}
        if address:
            env["HOLDFAST_STAGER"] = address
        if launcher == "tiers":
            env |= {"HOLDFAST_TIERS": f"file:{directory}", "HOLDFAST_STORE": str(directory / "store")}
        self.cluster = Cluster(directory, str(directory / "store"), env, script=grouped.__file__)
        self._launcher = launcher

    def start(self, how: str) -> Job:
        if self._launcher in ("mpirun", "tiers"):
            return self.cluster.start(2, how, stager=self._launcher == "mpirun")
        return self.cluster.start(2, how, stager=False, rewrite=by_torchrun(2))

    def end_all(self, job: Job) -> None:
        """Send SIGTERM to each rank and all its children, once both ranks pause."""
        out = self.cluster.out(self.cluster.started)
        marks = [out / f"standing-{rank}" for rank in range(2)]
        wait_until(lambda: all(mark.exists() for mark in marks), SECONDS_MAX, job.output)
        groups = {os.getpgid(int(mark.read_text())) for mark in marks}
        assert os.getpgrp() not in groups
        for group in groups:
            os.killpg(group, signal.SIGTERM)

    def steps(self) -> list[int]:
        return sorted(item.step for item in Catalog(open_store(self.cluster.store)).list())


@contextlib.contextmanager
def place(directory: Path, launcher: str) -> Iterator[Place]:
    if launcher in ("mpirun", "tiers"):
        yield Place(directory, launcher, "")
        return
    (directory / "store").mkdir()
    with standing_stager(
        str(directory / "store"), environment(directory / "runtime-stager"), directory / "stager.log"
    ) as stager:
        yield Place(directory, launcher, stager.address)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the final state of each rank of a run without a notice."""
    with place(tmp_path_factory.mktemp("plain"), "mpirun") as here:
        with here.cluster.start(2, "plain", forked=True) as job:
            job.succeed(SECONDS_MAX)
        return [load(here.cluster.out(1) / f"final-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_the_last_finished_step_is_saved_with_the_sampler_and_random_numbers_of_that_step(
    tmp_path: Path, plain: list[dict[str, Any]], launcher: str
) -> None:
    saves_the_last_finished_step(tmp_path, plain, launcher)


def saves_the_last_finished_step(tmp_path: Path, plain: list[dict[str, Any]], launcher: str) -> None:
    """Send a notice that makes the loop raise; the resumed run must end like the one without a notice."""
    safe = "kept in local tiers" if launcher == "tiers" else "staged"
    with place(tmp_path, launcher) as here:
        with here.start("early") as job:
            here.end_all(job)
            assert job.wait(SECONDS_MAX) != 0
            said = job.output()
        for rank in range(2):
            assert f"rank {rank}: RuntimeError: DataLoader worker" in said, said
            assert (
                f"rank {rank}: step {LAST}, the last finished one, is {safe}: it was saved because of the notice"
                in said
            )
        if launcher != "tiers":
            wait_until(lambda: here.steps() == [LAST], SECONDS_MAX, f"it is not durable:\n{said}")
        with here.start("plain") as job:
            job.succeed(SECONDS_MAX)
        resumed = [load(here.cluster.out(2) / f"final-{rank}.pt") for rank in range(2)]
    assert [final["start"] for final in resumed] == [LAST + 1] * 2
    assert same([{**final, "start": 0} for final in resumed], plain), "it is not the run that nobody told"


def test_in_the_middle_of_a_step_that_has_updated_nothing_is_saved_and_it_is_said_why(tmp_path: Path) -> None:
    with place(tmp_path, "mpirun") as here:
        with here.start("late") as job:
            here.end_all(job)
            assert job.wait(SECONDS_MAX) != 0
            said = job.output()
        here.cluster.wait_for_flusher()
        assert here.steps() == []
    for rank in range(2):
        assert (
            f"rank {rank}: step {LAST}, the last finished one, is not saved after the notice: the exception came in "
            f"the middle of the next one, and an update of step {LAST + 1} had begun"
        ) in said, said
    assert "no checkpoint of this job is staged" in said
    assert "is saved" not in said
