"""Notices in a real job: a metadata server for each rank, mpirun, an optional stager, a flusher; kills are SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.integration.jobs import noticed, train
from tests.support.blocked import environment_without
from tests.support.cluster import Cluster, check_continued, check_loadable, losses, wait_until
from tests.support.events import read_events
from tests.support.fake_metadata import AWS_ACTION, AWS_TOKEN, FakeMetadata
from tests.support.job import HOLDFAST, Job

pytestmark = [pytest.mark.mpi]

STEPS, NEVER, STEP_SECONDS = 240, 10_000, 0.02
_WAIT_SECONDS_MAX = 120


class Spot:
    """A cluster of spot machines: a metadata server for each rank, and the events of all processes."""

    def __init__(self, directory: Path, stack: ExitStack, ranks: int) -> None:
        self.servers = [stack.enter_context(FakeMetadata()) for _ in range(ranks)]
        self.events_path = directory / "events.jsonl"
        self.env = {
            "NOTICED_SERVERS": ",".join(server.url for server in self.servers),
            "HOLDFAST_WATCH": "aws,sigterm",
            "HOLDFAST_WATCH_SECONDS": "0.2",
            "HOLDFAST_EVENTS": str(self.events_path),
            "TRAIN_STEP_SECONDS": str(STEP_SECONDS),
        }
        self.cluster = Cluster(directory, str(directory / "store"), self.env, script=noticed.__file__)
        self.ranks = ranks

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_events(self.events_path) if line["event"] == name]

    def pid(self, rank: int) -> int:
        return int((self.cluster.out(1) / f"pid-{rank}").read_text())

    def train_until(self, job: Job, step: int) -> None:
        """Wait until rank 0 has done that step."""
        path = self.cluster.out(1) / "losses-0"

        def there() -> bool:
            assert job.process.poll() is None, job.output()
            return path.exists() and len(path.read_text().splitlines()) > step

        wait_until(there, _WAIT_SECONDS_MAX, lambda: f"step {step} is not done:\n{job.output()}")

    def wait_for(self, job: Job, name: str) -> dict[str, Any]:
        def there() -> bool:
            assert job.process.poll() is None or self.events(name), job.output()
            return bool(self.events(name))

        wait_until(there, _WAIT_SECONDS_MAX, lambda: f"no event {name}:\n{job.output()}")
        return self.events(name)[0]

    def steps(self) -> list[int]:
        """Return the steps in the store."""
        return sorted(item.step for item in Catalog(open_store(self.cluster.store)).list())


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int], Spot]]:
    with ExitStack() as stack:
        yield lambda ranks: Spot(tmp_path, stack, ranks)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the same training without notices."""
    directory = tmp_path_factory.mktemp("reference")
    cluster = Cluster(directory, str(directory / "store"), {}, script=train.__file__)
    with cluster.start(2, str(STEPS), str(NEVER), forked=True) as job:
        job.succeed(120)
    return cluster.out(1)


def check_resumes(spot: Spot, reference: Path, saved: int) -> None:
    """An undisturbed fresh cluster resumes from `saved`, bit for bit."""
    assert spot.steps() == [saved]
    for server in spot.servers:
        server.action = None
    with spot.cluster.start(2, str(STEPS), str(NEVER), env={"TRAIN_STEP_SECONDS": "0"}) as job:
        job.succeed(120)
    spot.cluster.wait_for_flusher()
    check_continued(reference, spot.cluster, 1, 2, start=saved + 1, steps=STEPS)


def check_a_rank_that_is_told_and_then_killed_loses_nothing_before_its_step(
    make: Callable[[int], Spot], reference: Path
) -> None:
    spot = make(2)
    with spot.cluster.start(2, str(STEPS), str(NEVER)) as job:
        spot.train_until(job, 10)
        spot.servers[1].interrupt(120)
        staged = spot.wait_for(job, "emergency_staged")
        saved = staged["saved_step"]
        spot.train_until(job, saved + 5)  # trains on until the kill
        os.kill(spot.pid(1), signal.SIGKILL)
        job.wait(60)
        said = job.output()
    spot.cluster.wait_for_flusher()
    assert staged["seconds_left"] > 0
    assert saved > 10
    assert [event["choice"] for event in spot.events("emergency")] == ["take"]
    assert "rank 1 on host" in said
    assert "instance-action terminate" in said
    check_resumes(spot, reference, saved)


def check_a_notice_that_comes_too_late_is_said_and_breaks_nothing(
    make: Callable[[int], Spot], reference: Path
) -> None:
    spot = make(2)
    with spot.cluster.start(2, str(STEPS), str(NEVER)) as job:
        spot.train_until(job, 10)
        spot.servers[1].interrupt(-3)
        decided = spot.wait_for(job, "emergency")
        job.succeed(120)
        said = job.output()
    spot.cluster.wait_for_flusher()
    assert decided["choice"] == "skip"
    assert "nothing can be saved (the deadline passed" in said
    assert spot.steps() == []
    for rank in range(2):
        assert losses(spot.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")


@pytest.fixture
def memory() -> Iterator[Path]:
    """Provide a directory in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as directory:
        yield Path(directory)


def test_without_a_stager_the_ranks_save_one_step_among_themselves(
    make: Callable[[int], Spot], reference: Path, memory: Path
) -> None:
    check_saved_among_themselves(make(2), reference, f"memory:{memory}", told=0)


def check_saved_among_themselves(spot: Spot, reference: Path, tier: str, told: int) -> None:
    """Send a cloud's notice to the rank that does not lead, SIGTERM to the leader; then kill all ranks."""
    spot.env |= {
        "HOLDFAST_TIERS": tier,
        "HOLDFAST_STORE": spot.cluster.store,
        "HOLDFAST_CHUNK_BYTES": "65536",
    }
    with spot.cluster.start(2, str(STEPS), str(NEVER), stager=False) as job:
        spot.train_until(job, 10)
        if told:
            spot.servers[told].interrupt(120)
        else:
            os.kill(spot.pid(told), signal.SIGTERM)
        staged = spot.wait_for(job, "emergency_staged")
        saved = staged["saved_step"]
        spot.train_until(job, saved + 5)
        for rank in range(2):
            os.kill(spot.pid(rank), signal.SIGKILL)
        job.wait(60)
        said = job.output()
    assert saved > 10
    assert staged["seconds_left"] > 0
    assert (staged["role"], staged["rank"]) == ("trainer", 0)
    assert [event["choice"] for event in spot.events("emergency")] == ["take"]
    assert f"saved because rank {told} on host" in said
    assert sorted((line["rank"], line["step"]) for line in spot.events("kept")) == [(0, saved), (1, saved)]
    for server in spot.servers:
        server.action = None
    with spot.cluster.start(2, str(STEPS), str(NEVER), stager=False, env={"TRAIN_STEP_SECONDS": "0"}) as job:
        job.succeed(120)
    check_continued(reference, spot.cluster, 1, 2, start=saved + 1, steps=STEPS)


def test_a_metadata_server_that_hangs_disturbs_nothing(make: Callable[[int], Spot], reference: Path) -> None:
    spot, every = make(2), 60
    for server in spot.servers:
        server.hanging.set()
    with spot.cluster.start(2, str(STEPS), str(every)) as job:
        job.succeed(120)
        said = job.output()
    spot.cluster.wait_for_flusher()
    assert all(server.asked[AWS_TOKEN] >= 2 and not server.asked[AWS_ACTION] for server in spot.servers)
    assert said.count("the watch cannot ask aws") == 2  # once per rank, however often the request fails
    assert spot.steps() == [59, 119, 179, 239]
    assert spot.events("notice") == spot.events("declined") == []
    for rank in range(2):
        assert losses(spot.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")
