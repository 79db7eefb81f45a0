"""The transfer alone, with real mpirun, stager and flusher: synthetic images in, the same bytes in the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.errors import ConfigError
from holdfast.mpirun import mpirun_command
from tests.integration.jobs import transfer
from tests.support.job import REPOSITORY, Job, environment

pytestmark = [pytest.mark.mpi]

CHUNK_BYTES, RING_CHUNKS = 65536, 8
IMAGE_BYTES = 3_000_000  # 46 chunks: streams through the ring several times over
SECONDS_MAX = 120.0


class Ran:
    """A finished job: each rank's report, and the content of the store."""

    def __init__(
        self,
        tmp_path: Path,
        scenario: str,
        *,
        steps: int,
        ranks: int = 2,
        stager: dict[str, str] | None = None,
    ) -> None:
        self.store, out, self.runtime = tmp_path / "store", tmp_path / "out", tmp_path / "runtime"
        out.mkdir()
        self.ranks = ranks
        settings = {
            "store": str(self.store),
            "chunk-bytes": str(CHUNK_BYTES),
            "ring-bytes": str(RING_CHUNKS * CHUNK_BYTES),
            "keep-last": "0",
            "events": str(tmp_path / "events"),
            **(stager or {}),
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        trainer = [transfer.__file__, str(out), scenario, str(IMAGE_BYTES), str(steps)]
        env = environment(self.runtime, XDG_STATE_HOME=str(tmp_path / "state"))
        # The images are no zip files, so reading them back would only say that.
        with Job(ranks, trainer, [*arguments, "--no-verify"], env=env, log=tmp_path / "log") as job:
            self.code = job.wait(SECONDS_MAX)
            self.output = job.output()
        self.said = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
        events = tmp_path / "events"
        self.events = (
            [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        )

    def steps(self, rank: int) -> dict[int, str]:
        return {int(step): how["state"] for step, how in self.said[rank]["steps"].items()}

    def files(self) -> dict[int, Path]:
        return {int(path.stem.removeprefix("step-")): path for path in self.store.glob("step-*.pt")}

    def assert_files(self, steps: set[int]) -> None:
        """The store has exactly these steps, each bit for bit the image that the ranks sent, with CRCs."""
        assert set(self.files()) == steps, self.output
        plan = transfer.layout(IMAGE_BYTES, CHUNK_BYTES, self.ranks)
        for step, path in self.files().items():
            assert path.read_bytes() == transfer.image(plan, step, patched=True), f"step {step}"

    def assert_nothing_left(self) -> None:
        """Assert that no process of the job lives, and the ring is gone."""
        deadline = time.monotonic() + 60
        while (orphans := self.orphans()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not orphans, orphans
        assert not [path for path in self.runtime.rglob("*") if path.is_file()]

    def orphans(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOLDFAST_RUNTIME_DIR") == str(self.runtime):
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def _of(ran: Ran, event: str) -> list[dict[str, Any]]:
    return [line for line in ran.events if line["event"] == event and line["role"] == "stager"]


def check_images_larger_than_the_ring_arrive_bit_for_bit(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "plain", steps=4)
    assert ran.code == 0, ran.output
    for rank in range(2):
        assert ran.steps(rank).keys() == set(range(4))
        assert set(ran.steps(rank).values()) <= {
            "staged",
            "durable",
        }  # the news of a fast store may come first
        assert (ran.said[rank]["durable_step"], ran.said[rank]["problem"]) == (3, "")
        assert ran.said[rank]["agreement"] == [196608, {"rng": 8192}]
    ran.assert_files({0, 1, 2, 3})
    assert [line["step"] for line in _of(ran, "staged")] == [0, 1, 2, 3]
    record = json.loads((ran.store / "step-000000002.json").read_text())["record"]
    sent_bytes = [record["ranks"][str(rank)]["sent_bytes"] for rank in range(2)]
    assert sum(sent_bytes) == IMAGE_BYTES
    ran.assert_nothing_left()


def test_a_declined_step_is_left_out_on_every_rank(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "decline", steps=3)
    assert ran.code == 0, ran.output
    assert ran.steps(0) == {0: "staged", 1: "declined", 2: "staged"}
    assert "rank 1: outgrown" in ran.said[0]["steps"]["1"]["reason"]
    assert [said["new_pickle_reserve_bytes"] for said in ran.said] == [458752, 458752]
    ran.assert_files({0, 2})
    ran.assert_nothing_left()


def test_ranks_with_other_tensors_are_refused(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "differ", steps=3)
    for said in ran.said:
        assert said["error"]["code"] == "state"
        for words in ("rank 1", "archive/data/1", "expected (uint8", "got (float64"):
            assert words in said["error"]["message"]
    ran.assert_files(set())
    ran.assert_nothing_left()


def check_a_killed_flusher_costs_no_step(tmp_path: Path) -> None:
    """The images are larger than the ring: a step that the kill interrupts waits for the next flusher, which goes on
    with what the dead one had written.
    """
    ran = Ran(tmp_path, "flusher", steps=4)
    assert ran.code == 0, ran.output
    for rank in range(2):
        assert set(ran.steps(rank)) == set(range(4))
        assert set(ran.steps(rank).values()) <= {"staged", "durable"}, ran.output
    assert len(_of(ran, "flusher_lost")) == 1
    (replaced,) = _of(ran, "flusher_replaced")
    assert replaced["resumed"] is True
    assert not _of(ran, "failed") + _of(ran, "declined"), "the trainers hear nothing of it"
    assert [said["problem"] for said in ran.said] == ["", ""], "the stager was there all the time"
    ran.assert_files(set(range(4)))
    ran.assert_nothing_left()


def test_a_wrong_setting_of_the_stager_is_told_to_every_trainer(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "plain", steps=1, stager={"chunk-bytes": "1000"})
    assert ran.code == ConfigError.exit_code, ran.output
    assert [said["error"]["code"] for said in ran.said] == ["config", "config"]
    assert "chunk_bytes" in ran.said[0]["error"]["message"]
    ran.assert_nothing_left()
