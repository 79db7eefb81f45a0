"""A rank dies or stops in mid-checkpoint: the stager notices, fails that checkpoint, and keeps the others.

step 0, 1 staged ── step 2: rank 1 has sent some frames ── killed  ─► rank_lost, step 2 failed, the rest durable
                                                        └─ stopped ─► rank_silent … continued ─► rank_back, step 4, 5
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import faultpoint
from holdfast.config import StagerConfig
from holdfast.ring.directory import runtime_directory
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from tests.integration.jobs import last_call, transfer
from tests.support.cluster import assert_nothing_left, wait_until
from tests.support.events import read_events
from tests.support.job import Job, environment

pytestmark = [pytest.mark.mpi]

CHUNK_BYTES, RING_CHUNKS = 65536, 16
IMAGE_BYTES = 3_000_000  # 46 chunks: streams through the ring
SECONDS_MAX = 120.0


class UlfmJob:
    """Two ranks that send images, a stager and a flusher that outlives them; a fault hits rank 1 in step 2."""

    def __init__(
        self, tmp_path: Path, scenario: str, *, steps: int, action: str, settings: tuple[str, ...]
    ) -> None:
        self.path = tmp_path
        self.store, self.runtime, self.out = tmp_path / "store", tmp_path / "runtime", tmp_path / "out"
        self.fired = tmp_path / "fired"
        for directory in (self.out, self.fired):
            directory.mkdir()
        self.plan = transfer.layout(IMAGE_BYTES, CHUNK_BYTES, 2)
        frames = sum(1 for _ in self.plan.sent_frames(1))
        self.fault = f"rank:1@frame_sent#{2 * frames + 5}"
        env = environment(
            self.runtime,
            **{faultpoint.VARIABLE: f"{self.fault}={action}", faultpoint.FIRED_VARIABLE: str(self.fired)},
        )
        trainer = [transfer.__file__, str(self.out), scenario, str(IMAGE_BYTES), str(steps)]
        stager = [
            *("--store", str(self.store), "--keep-last", "0", "--no-verify", "--linger"),
            *("--chunk-bytes", str(CHUNK_BYTES), "--ring-bytes", str(RING_CHUNKS * CHUNK_BYTES)),
            *("--events", str(tmp_path / "events"), *settings),
        ]
        self.job = Job(2, trainer, stager, env=env, log=tmp_path / "log")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the stager's events with this name."""
        lines = read_events(self.path / "events")
        return [line for line in lines if line["event"] == name and line["role"] == "stager"]

    def wait_for(self, event: str) -> dict[str, Any]:
        def there() -> bool:
            assert self.job.process.poll() is None or self.events(event), self.job.output()
            return bool(self.events(event))

        wait_until(there, SECONDS_MAX, lambda: f"no {event}:\n{self.job.log.read_text(errors='replace')}")
        return self.events(event)[0]

    def struck(self) -> Path:
        """Return the fault's mark, which holds the pid and whose mtime is the time of the fault."""
        return self.fired / self.fault

    def steps(self, rank: int) -> dict[int, str]:
        said = json.loads((self.out / f"rank-{rank}.json").read_text())
        return {int(step): how["state"] for step, how in said["steps"].items()}

    def good(self, rank: int) -> set[int]:
        """Return the steps that were at least staged."""
        return {step for step, state in self.steps(rank).items() if state in {"staged", "durable"}}

    def assert_files(self, steps: set[int]) -> None:
        """The store has exactly these steps, bit for bit as the ranks sent them."""
        files = {int(path.stem.removeprefix("step-")): path for path in self.store.glob("step-*.pt")}
        assert set(files) == steps == {int(path.stem[5:]) for path in self.store.glob("step-*.json")}
        for step, path in files.items():
            assert path.read_bytes() == transfer.image(self.plan, step, patched=True), f"step {step}"

    def assert_ring_empty(self) -> None:
        """The flusher still holds the ring: every slot is free, and no checkpoint is recorded."""
        with Ring.attach(runtime_directory(str(self.store), self.runtime)) as ring:
            assert {record.state for record in ring.records()} == {SlotState.FREE}
            assert ring.checkpoint_ids() == []


@contextlib.contextmanager
def run(
    tmp_path: Path, scenario: str, *, steps: int, action: str, settings: tuple[str, ...] = ()
) -> Iterator[UlfmJob]:
    """Start a job; at the end stop its flusher, and check that nothing is left."""
    ran = UlfmJob(tmp_path, scenario, steps=steps, action=action, settings=settings)
    with ran.job:
        yield ran
    pid = (runtime_directory(str(ran.store), ran.runtime) / "flusher.pid").read_text()
    psutil.Process(int(pid)).terminate()
    assert_nothing_left(ran.runtime, SECONDS_MAX)


def test_a_killed_rank_is_noticed_at_once_and_costs_one_step(tmp_path: Path) -> None:
    with run(tmp_path, "plain", steps=3, action="kill") as ran:
        ran.job.wait(SECONDS_MAX)
        lost = ran.wait_for("rank_lost")
        noticed_seconds = lost["time"] - ran.struck().stat().st_mtime
        print(f"the stager noticed the death after {noticed_seconds:.3f} s")
        assert noticed_seconds < StagerConfig.model_fields["rank_seconds_max"].default, "as any silent rank"
        assert not ran.events("rank_silent")
        assert lost["lost_rank"] == 1
        assert f"process {ran.struck().read_text().strip()})" in lost["reason"], (
            "who it was, for whoever looks for it"
        )
        assert ran.good(0) == {0, 1}
        assert ran.steps(0)[2] == "failed"
        survivor = json.loads((ran.out / "rank-0.json").read_text())
        assert "rank 1 is dead" in survivor["steps"]["2"]["reason"]
        assert survivor["problem"] == "", "the stager lives"
        assert [line["step"] for line in ran.events("failed")] == [2]
        assert ran.events("stager_ended")
        ran.assert_files({0, 1})
        ran.assert_ring_empty()


def check_a_stopped_rank_is_named_and_when_it_goes_on_so_do_checkpoints(tmp_path: Path) -> None:
    settings = ("--rank-seconds-max", "5")
    with run(tmp_path, "wait-at-3", steps=6, action="stop", settings=settings) as ran:
        wait_until(ran.struck().exists, SECONDS_MAX, "the fault did not strike")
        pid = int(ran.struck().read_text())
        try:
            silent = ran.wait_for("rank_silent")
            assert silent["silent_rank"] == 1
            assert f"(process {pid})" in silent["name"]
            failed = ran.wait_for("failed")
            assert failed["step"] == 2
            assert f"{silent['name']} has been silent for 5 s" in failed["message"]
            declined = ran.wait_for("declined")
            assert declined["step"] == 3, "rank 0 goes on, and is told at once"
            assert silent["name"] in declined["reason"]
        finally:
            os.kill(pid, signal.SIGCONT)
        ran.wait_for("rank_back")
        (tmp_path / "go-on").mkdir()
        ran.job.succeed(SECONDS_MAX)
        for rank in range(2):
            assert ran.good(rank) == {0, 1, 4, 5}, ran.steps(rank)
        assert not ran.events("rank_lost")
        ran.assert_files({0, 1, 4, 5})
        ran.assert_ring_empty()


@pytest.mark.parametrize("module", ["trainer_side.ranks.mpi_world", "stager.mpi"])
def test_the_end_of_mpi_is_left_when_another_process_never_comes_to_it(tmp_path: Path, module: str) -> None:
    env = environment(tmp_path / "runtime")
    with Job(2, [last_call.__file__, module, str(tmp_path)], None, env=env, log=tmp_path / "log") as job:
        job.wait(SECONDS_MAX)
        assert (tmp_path / "saw-it-leave").read_text() == "True", job.output()
        assert "MPI_Finalize did not return within 0.5 s" in job.output()
