"""A real job without a stager is killed, and its tiers alone prove the resume.

first run, killed after step 5; step 3 is in memory and on a disk ─┬─► resumed: verified
                                                                    ├─► resumed with shuffled batches: exit code 12
                                                                    └─► the proofs of rank 1 are gone: not proven
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ResumeDiffers
from tests.integration.jobs import proven
from tests.support.forked_job import ForkedJob
from tests.support.job import environment

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
SECONDS_MAX = 120
RANKS, STEPS, SAVED = 2, "8", 3


class Machine:
    """One machine with two tiers, which outlive its jobs."""

    def __init__(self, directory: Path) -> None:
        self.memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="holdfast-test-"))
        self._directory, self.disk, self._before = directory, directory / "disk", directory / "before"
        self.disk.mkdir()

    def run(self, name: str, kill_at: int, *faults: str) -> int:
        env = {
            "HOLDFAST_TIERS": f"memory:{self.memory},nvme:{self.disk}",
            "HOLDFAST_TIER_SLOTS": "2",
            "HOLDFAST_TIER_WRITERS": "1",
            "HOLDFAST_CHUNK_BYTES": "65536",
            "HOLDFAST_STORE": str(self._directory / "store"),
            "HOLDFAST_ON_UNPROVEN": "stop",
            "HOLDFAST_EVENTS": str(self._directory / f"{name}.jsonl"),
        }
        env = environment(self._directory / f"{name}-runtime", **env)
        arguments = [proven.__file__, STEPS, str(kill_at), *faults]
        log = self._directory / f"{name}.log"
        with ForkedJob(RANKS, arguments, None, env=env, log=log) as job:
            return job.wait(SECONDS_MAX)

    def output(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def proof(self, name: str) -> tuple[str, str]:
        """The verdict and its sentence; the log has it as well."""
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in (self._directory / f"{name}.jsonl").read_text().splitlines()
        ]
        (said,) = [line for line in lines if line["event"] == "resume_proof"]
        assert (said["attempt"], said["step"]) == (1, SAVED)
        assert said["text"] in self.output(name)
        return said["verdict"], said["text"]

    def remember(self) -> None:
        for tier in (self.memory, self.disk):
            shutil.copytree(tier, self._before / tier.name)

    def as_before(self) -> None:
        """As the kill has left it."""
        for tier in (self.memory, self.disk):
            shutil.rmtree(tier)
            shutil.copytree(self._before / tier.name, tier)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path)
    yield found
    shutil.rmtree(found.memory)


def test_the_tiers_of_a_killed_job_prove_its_resume(machine: Machine) -> None:
    assert machine.run("first", 5) != 0
    assert "resumed from" not in machine.output("first")
    machine.remember()

    assert machine.run("again", -1) == 0, machine.output("again")
    verified = "resume verified: data, random numbers, learning rate and loss are those of the run before"
    assert machine.proof("again") == ("verified resume", verified)
    assert {f"rank {rank}: verified resume" for rank in range(RANKS)} <= set(
        machine.output("again").splitlines()
    )

    machine.as_before()
    assert machine.run("shuffled", -1, "shuffled") == ResumeDiffers.exit_code == 12
    verdict, text = machine.proof("shuffled")
    assert verdict == "differs"
    assert "data differ on every rank (the batch has CRC-32 " in text

    machine.as_before()
    for tier in (machine.memory, machine.disk):
        (lost,) = tier.rglob("rank-00001-*.proof")
        lost.unlink()
    assert machine.run("lost", -1) == 0, machine.output("lost")
    compared = "data, random numbers, learning rate and loss are those of the run before on rank 0"
    assert machine.proof("lost") == (
        "not proven",
        f"resume not proven: nothing is recorded of rank 1; {compared}",
    )
