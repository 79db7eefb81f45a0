"""Ranks are stopped while they read the stager's ring themselves; the ring changes before they continue.

reader: reads the record of a slot ─► SIGSTOP                                       SIGCONT ─► copies, reads it again
others:                                    another job refills the slot, or removes
                                           the ring and creates a new one
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE
from holdfast.process import boot_id
from holdfast.ring.directory import runtime_directory
from holdfast.ring.near_ring import RingLocation, open_near_ring
from holdfast.ring.ring import Ring
from tests.integration.jobs import hot
from tests.support.cluster import Cluster, wait_until
from tests.support.job import REPOSITORY, Job, environment
from tests.support.standing_stager import StandingProcess
from tests.support.torchrun import by_torchrun

ATTEMPT, STEP, CHUNK, SLOT, CHUNK_BYTES = 3, 5, 2, 1, 65536
BYTES, OTHERS = b"right" * 13107, b"wrong" * 13107
READER = f"""
import sys
from holdfast.faultpoint import identify
from holdfast.ring.near_ring import open_near_ring
identify("rank:1")
near = open_near_ring(sys.argv[1].encode())
data = bytearray({len(BYTES)})
print(near.read({ATTEMPT}, {STEP}, {CHUNK}, [(0, memoryview(data))]), bytes(data[:5]).decode("latin-1"))
"""


def _fill(ring: Ring, attempt: int, step: int, data: bytes) -> None:
    ring.mark_filling(SLOT, attempt, step, CHUNK)
    ring.slot_memory(SLOT)[: len(data)] = data
    ring.mark_full(SLOT, [(0, 77)], len(data))


def _made(directory: Path, data: bytes) -> Ring:
    ring = Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=4, attempt=ATTEMPT)
    ring.hold(ATTEMPT)
    _fill(ring, ATTEMPT, STEP, data)
    ring.free(SLOT)
    return ring


def _left_alone(ring: Ring) -> None:
    """Change nothing."""


def _given_to_another_step(ring: Ring) -> None:
    _fill(ring, ATTEMPT, STEP + 1, OTHERS)


def _being_filled(ring: Ring) -> None:
    ring.mark_filling(SLOT, ATTEMPT + 1, STEP, CHUNK)
    ring.slot_memory(SLOT)[: len(OTHERS) // 2] = OTHERS[: len(OTHERS) // 2]


def _given_up_again(ring: Ring) -> None:
    _being_filled(ring)
    ring.free(SLOT)


def _removed(ring: Ring) -> None:
    Ring.remove(ring.directory)


@pytest.mark.parametrize(
    ("meanwhile", "given"),
    [
        (_left_alone, True),
        (_given_to_another_step, False),
        (_being_filled, False),
        (_given_up_again, False),
        (_removed, True),
    ],
)
def test_a_reader_that_stood_still_gives_right_bytes_or_none(
    tmp_path: Path, meanwhile: Callable[[Ring], None], given: bool
) -> None:
    with _made(tmp_path / "run", BYTES) as ring, _standing_reader(ring) as reader:
        meanwhile(ring)
        said, first = _woken(reader)
    assert said == str(given)
    assert not given or first == "right"


def test_a_ring_that_was_made_anew_is_another_one(tmp_path: Path) -> None:
    """A reader with the old ring open keeps reading that one, which is no longer filled, and never sees the new one."""
    with _made(tmp_path / "run", BYTES) as ring, _standing_reader(ring) as reader:
        place = _place(ring)
        Ring.remove(ring.directory)
        with _made(ring.directory, OTHERS) as other:
            assert _woken(reader) == ["True", "right"]
            assert open_near_ring(place) is None
            assert open_near_ring(_place(other)) is not None


def test_a_reader_that_is_killed_keeps_nothing(tmp_path: Path) -> None:
    with _made(tmp_path / "run", BYTES) as ring:
        with _standing_reader(ring) as reader:
            reader.kill()
        _given_to_another_step(ring)
        ring.free(SLOT)
        ring.release()
        assert not ring.is_held()
        Ring.remove(ring.directory)
        assert not [*ring.directory.iterdir()]


def _place(ring: Ring) -> bytes:
    return RingLocation(str(ring.directory), ATTEMPT, ring.token, boot_id()).to_bytes()


@contextlib.contextmanager
def _standing_reader(ring: Ring) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has read the slot's record, and is stopped."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, _place(ring).decode()],
        env={**os.environ, VARIABLE: "rank:1@ring_seen=stop", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(reader.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        yield reader
    finally:
        reader.kill()
        reader.communicate(timeout=60)


def _woken(reader: subprocess.Popen[str]) -> list[str]:
    reader.send_signal(signal.SIGCONT)
    out, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0
    return out.split()


# -- whole jobs ------------------------------------------------------------------------------------------------------

RANKS = 2
STAGER = ("--chunk-bytes", "64KiB", "--ring-bytes", "512KiB", "--keep-last", "0", "--no-verify", "--linger")
RING = "the stager's ring"


class RingMachine:
    """The machine with the ring: jobs come and go, the flusher stays."""

    def __init__(self, root: Path, *, tcp: bool) -> None:
        self.runtime, self.markers, self._tcp = root / "machine", root / "markers", tcp
        self.markers.mkdir()
        self.cluster = Cluster(root, str(root / "store"), {}, script=hot.__file__, stager=STAGER)
        self.stagers: list[StandingProcess] = []

    def start(self, *words: str, fault: str = "") -> Job:
        """Start a job, over TCP with a stager of its own."""
        env = {FIRED_VARIABLE: str(self.markers), **({VARIABLE: fault} if fault else {})}
        if not self._tcp:
            return self.cluster.start(RANKS, *words, runtime=self.runtime, env=env)
        log = self.cluster.directory / f"stager-{len(self.stagers)}.log"
        self.stagers.append(StandingProcess(self.cluster.store, environment(self.runtime), log, STAGER))
        env["HOLDFAST_STAGER"] = self.stagers[-1].address
        rewrite = by_torchrun(RANKS)
        return self.cluster.start(RANKS, *words, runtime=self.runtime, env=env, stager=False, rewrite=rewrite)

    def save(self, *steps: str) -> None:
        """Run a job that ends when the last of these steps is durable."""
        with self.start("save", "durable", *steps) as job:
            number = self.cluster.started
            job.wait(200)
            assert all((self.cluster.out(number) / f"done-{rank}").exists() for rank in range(RANKS)), (
                job.output()
            )
        if self._tcp:
            self.stagers[-1].kill()

    def kill_stager(self, job: Job) -> None:
        if self._tcp:
            self.stagers[-1].kill()
            return
        children = psutil.Process(job.process.pid).children(recursive=True)
        (pid,) = [child.pid for child in children if "stager" in child.cmdline()]
        os.kill(pid, signal.SIGKILL)

    @property
    def directory(self) -> Path:
        return runtime_directory(self.cluster.store, self.runtime)

    def steps_in_ring(self) -> set[int]:
        with Ring.attach(self.directory) as ring:
            return {record.step for record in ring.remains()}

    def end(self) -> None:
        for stager in self.stagers:
            stager.kill()
        pid = self.directory / "flusher.pid"
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGTERM)
            ring = self.directory / "ring"
            wait_until(lambda: not ring.exists(), 60, "the flusher has not taken its ring away")


@pytest.mark.mpi
def test_a_rank_that_stood_still_while_another_job_filled_the_ring_restores_what_it_was_to(
    tmp_path: Path,
) -> None:
    machine = RingMachine(tmp_path, tcp=False)
    try:
        restores_after_another_job_filled_the_ring(machine)
    finally:
        machine.end()


def restores_after_another_job_filled_the_ring(machine: RingMachine) -> None:
    """The stager is killed meanwhile, so that another job can start: the rank reads missing bytes from the store."""
    machine.save("3")
    fault = "rank:1@ring_seen#9"
    with machine.start("restore", fault=f"{fault}=stop") as job:
        out = machine.cluster.out(machine.cluster.started)
        pid = _wait_until_standing(machine.markers / fault, job)
        machine.kill_stager(job)
        assert 3 in machine.steps_in_ring()
        machine.save("6", "7")
        assert 3 not in machine.steps_in_ring(), (
            "some of its slots were not filled again: this would show nothing"
        )
        os.kill(pid, signal.SIGCONT)
        found = [out / f"restored-{rank}.json" for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in found), 120, "no restore:\n" + job.output())
        job.wait(60)
    reports: list[dict[str, Any]] = [json.loads(path.read_text())[0] for path in found]
    assert [(one["step"], one["same"]) for one in reports] == [(3, True)] * RANKS, reports
    assert [one["own"] for one in reports] == [{"rank": rank, "step": 3} for rank in range(RANKS)]
    assert any(RING in reason for one in reports for reason in one["mended"]), reports
    assert sum(one["sources"].get(machine.cluster.store, 0) for one in reports) > 0


def _wait_until_standing(marker: Path, job: Job) -> int:
    def reached() -> bool:
        assert job.process.poll() is None, job.output()
        return marker.exists() and marker.read_text().endswith("\n")

    wait_until(reached, 120, f"{marker.name} was not reached")
    process = psutil.Process(int(marker.read_text()))
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 30, "it does not stand still")
    return process.pid
