"""The host of all ranks vanishes in mid-checkpoint: no reset, no goodbye, only silence, seen from both ends.

step 3 staged ── step 7: rank 0 stops after some frames ── the wire is cut ── rank 0 continues
  stager:   declares both ranks silent at the deadline, fails step 7 by name, makes step 3 durable
  trainers: declare the stager silent at the deadline, report that once, train to the end
then a fresh job on the same store resumes from step 3, bit for bit
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import faultpoint
from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_continued, load, losses, same, wait_until
from tests.support.events import read_events
from tests.support.two_hosts import TwoHosts, two_hosts, why_not

pytestmark = [pytest.mark.mpi]

STEPS, EVERY = 14, 4
SECONDS_MAX = 120.0
FAULT = "rank:0@frame_sent#20"  # it sends 10 to 16 frames of each checkpoint: in the middle of the second
SILENCE_SECONDS_MAX = 15.0
RUN = (str(STEPS), str(EVERY))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_hosts(tmp_path) as made:
        yield made


class Story:
    """One job over two hosts, its processes' records, and an uninterrupted run to compare with."""

    def __init__(self, tmp_path: Path) -> None:
        self.events = tmp_path / "events"
        self.fired = tmp_path / "fired"
        self.fired.mkdir()
        size = {"TRAIN_WIDTH": "2048"}
        (tmp_path / "reference").mkdir()
        reference = Cluster(tmp_path / "reference", str(tmp_path / "other"), size, script=train.__file__)
        with reference.start(2, *RUN, forked=True) as job:
            job.succeed(SECONDS_MAX)
        self.reference = reference.out(1)
        env = {
            **size,
            faultpoint.VARIABLE: f"{FAULT}=stop",
            faultpoint.FIRED_VARIABLE: str(self.fired),
            "HOLDFAST_EVENTS": str(self.events),
            "HOLDFAST_STAGER_SECONDS_MAX": str(SILENCE_SECONDS_MAX),
            "HOLDFAST_RANK_SECONDS_MAX": str(SILENCE_SECONDS_MAX),
            "HOLDFAST_CLOSE_SECONDS_MAX": "60",  # until the silence is noticed, which ends the waiting
            "TRAIN_STAGED_SECONDS_MAX": "10",
            "HOLDFAST_ON_NOT_DURABLE": "warn",
        }
        self.cluster = Cluster(tmp_path, str(tmp_path / "store"), env, script=train.__file__)

    def of(self, event: str, role: str = "stager") -> list[dict[str, Any]]:
        """Lines of the event log, which all share: it is on this machine's disk, not behind the wire."""
        return [line for line in read_events(self.events) if line["event"] == event and line["role"] == role]

    def struck(self) -> Path:
        """Return the fault's mark, with the pid of the stopped rank."""
        return self.fired / FAULT

    def assert_trained_on(self, number: int) -> None:
        """Start `number` ran every step, with exactly the losses of the uninterrupted run."""
        for rank in range(2):
            out = self.cluster.out(number)
            assert losses(out / f"losses-{rank}") == losses(self.reference / f"losses-{rank}")
            assert same(load(out / f"final-{rank}.pt"), load(self.reference / f"final-{rank}.pt"))


def test_a_host_that_vanishes_is_noticed_by_deadline_from_both_ends(tmp_path: Path, hosts: TwoHosts) -> None:
    story = Story(tmp_path)
    cluster = story.cluster
    with cluster.start(2, *RUN, rewrite=hosts.rewrite) as job:
        wait_until(story.struck().exists, SECONDS_MAX, lambda: f"the fault did not strike:\n{job.output()}")
        wait_until(lambda: bool(story.of("staged")), SECONDS_MAX, lambda: f"nothing staged:\n{job.output()}")
        hosts.cut()
        os.kill(int(story.struck().read_text()), signal.SIGCONT)

        # From the stager's end.
        wait_until(
            lambda: len(story.of("rank_silent")) == 2, SECONDS_MAX, lambda: f"not noticed:\n{job.output()}"
        )
        silent = story.of("rank_silent")
        assert {line["silent_rank"] for line in silent} == {0, 1}
        assert all(f"on host {hosts.name}" in line["name"] for line in silent)
        (failed,) = story.of("failed")
        assert failed["step"] == 7
        # Both fell silent at once: either may be looked at first.
        assert any(f"{line['name']} has been silent for" in failed["message"] for line in silent)
        assert [line["step"] for line in story.of("staged")] == [3]
        wait_until(lambda: bool(story.of("durable", "flusher")), SECONDS_MAX, "step 3 is not durable")
        # It comes through mpirun, and the wire is cut.
        wait_until(lambda: "has been silent for" in " ".join(job.output().split()), SECONDS_MAX, job.output)

        # From the trainers' end: over there nothing of holdfast is left to wait for, and they go on.
        wait_until(
            lambda: all((cluster.out(1) / f"final-{rank}.pt").exists() for rank in range(2)),
            SECONDS_MAX,
            f"the training did not go on to its end:\n{job.output()}",
        )
        lost = story.of("stager_lost", "trainer")
        assert sorted(line["rank"] for line in lost) == [0, 1], "said once by each rank"
        assert all("heard nothing from the stager" in line["message"] for line in lost)
        wait_until(
            lambda: not _ranks(hosts), SECONDS_MAX, lambda: f"ranks hang at their end: {_ranks(hosts)}"
        )
    story.assert_trained_on(1)
    cluster.wait_for_flusher()

    with cluster.start(2, *RUN) as job:
        job.succeed(SECONDS_MAX)
    cluster.wait_for_flusher()
    check_continued(story.reference, cluster, 1, 2, start=4, steps=STEPS)


def _ranks(hosts: TwoHosts) -> list[str]:
    """Return the training processes on the other host."""
    found = []
    for pid in hosts.pids():
        try:
            command = psutil.Process(pid).cmdline()
        except psutil.NoSuchProcess:
            continue
        if train.__file__ in command:
            found.append(f"{pid}: {' '.join(command)}")
    return found
