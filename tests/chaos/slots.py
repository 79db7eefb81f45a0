"""Kills at every point of a slot's life, in a real job with local tiers only; relaunched and compared.

two ranks, two slots each in memory and on disk; saves 2, 5, 8: the third one reuses the slots of the first
killed in the third save ─► the relaunch begins after step 5 or 8, never earlier, and is the same bit for bit
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE, Point
from holdfast.wire.step_proof import ProofVerdict
from tests.chaos import job as training
from tests.chaos.cells import EVERY, RANKS, SAVES, STEPS
from tests.chaos.place import DirectoryPlace
from tests.support.cluster import load, losses, same, wait_until
from tests.support.events import read_events
from tests.support.forked_job import ForkedJob
from tests.support.job import Job, environment

_LIMIT_SECONDS = 120.0


class SlotCell(NamedTuple):
    """One run: rank 1 reaches `point` for the `number`-th time, and the victims are killed."""

    point: Point
    number: int
    tier: str
    all_ranks: bool
    regular: bool = False

    @property
    def name(self) -> str:
        """In test ids."""
        return f"{self.point} in {self.tier} x {'all ranks' if self.all_ranks else 'a rank'}"


# Two tiers reach each point in each save, memory mostly first; 12 frames a save in each. Only sealed ones get unsealed.
_PLACES = (
    (Point.SLOT_RECYCLED, 5, 6),
    (Point.SLOT_UNSEALED, 1, 2),
    (Point.SLOT_WRITTEN, 53, 70),
    (Point.SLOT_SEALED, 5, 6),
    (Point.SLOT_FLUSHED, 5, 6),
    (Point.SLOT_RECORDED, 7, 8),
    (Point.SLOT_COMMITTED, 5, 6),
    (Point.PROOF_DUE, 5, 6),
)
_REGULAR = {
    "slot_written in memory x all ranks",
    "slot_unsealed in the second x a rank",
    "slot_committed in memory x all ranks",
}
SLOT_CELLS = [
    cell._replace(regular=cell.name in _REGULAR)
    for point, first, second in _PLACES
    for number, tier in ((first, "memory"), (second, "the second"))
    for cell in (
        SlotCell(point, number, tier, all_ranks=False),
        SlotCell(point, number, tier, all_ranks=True),
    )
]


class Machine:
    """Jobs without a stager on one machine, which keeps its memory and its disk."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.directory, self._jobs = directory, 0
        self.markers = directory / "markers"
        self.disk = directory / "disk"
        self.events_path = directory / "events"
        self.markers.mkdir()
        self.disk.mkdir()
        self._tiers = f"memory:{memory},file:{self.disk}"

    def start(self, fault: str = "") -> Job:
        self._jobs += 1
        env = {
            **DirectoryPlace.size,
            "HOLDFAST_TIERS": self._tiers,
            "HOLDFAST_TIER_SLOTS": "2",
            "HOLDFAST_TIER_WRITERS": "1",
            "HOLDFAST_STORE": str(self.directory / "store"),
            "HOLDFAST_CHUNK_BYTES": "65536",
            "HOLDFAST_EVENTS": str(self.events_path),
            FIRED_VARIABLE: str(self.markers),
            **({VARIABLE: fault} if fault else {}),
        }
        return ForkedJob(
            RANKS,
            [training.__file__, str(self.out(self._jobs)), str(STEPS), str(EVERY)],
            None,
            env=environment(self.directory / "machine", **env),
            log=self.directory / f"job-{self._jobs}.log",
        )

    def out(self, number: int) -> Path:
        return self.directory / f"out-{number}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_events(self.events_path) if line["event"] == kind]

    def kill(self, cell: SlotCell) -> None:
        fault = f"rank:1@{cell.point}#{cell.number}"
        with self.start(f"{fault}={'stop' if cell.all_ranks else 'kill'}") as job:
            marker = self.markers / fault

            def reached() -> bool:
                ended = job.process.poll() is not None  # before the look: its last act may be the marker
                if marker.exists() and marker.read_text().endswith("\n"):
                    return True
                assert not ended, f"{fault} was never reached:\n{job.output()}"
                return False

            wait_until(reached, _LIMIT_SECONDS, lambda: f"{fault} was not reached:\n{job.output()}")
            if cell.all_ranks:
                process = psutil.Process(int(marker.read_text()))
                wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 30, "it does not stand still")
                for rank in range(RANKS):
                    os.kill(int((self.out(1) / f"pid-{rank}").read_text()), signal.SIGKILL)
            job.wait(_LIMIT_SECONDS)


def play(cell: SlotCell, machine: Machine, directory_reference: Path) -> None:
    """Kill, relaunch, compare."""
    machine.kill(cell)
    begun = {event["step"] for event in machine.events("save")}
    assert SAVES[1] in begun, "the kill came before there was anything to keep"
    with machine.start() as job:
        job.succeed(_LIMIT_SECONDS)
    starts = set()
    for rank in range(RANKS):
        final = load(machine.out(2) / f"final-{rank}.pt")
        starts.add(final["start"])
        expected = load(directory_reference / "out" / f"final-{rank}.pt")
        assert same({**final, "start": 0}, expected), "the final state differs from the uninterrupted run's"
        took = {
            **losses(machine.out(1) / f"losses-{rank}"),
            **losses(machine.out(2) / f"losses-{rank}"),
        }
        assert took == losses(directory_reference / "out" / f"losses-{rank}"), "losses or samples differ"
    (start,) = starts
    assert start - 1 in SAVES[1:], (
        f"it begins at step {start}, though step {SAVES[1]} was complete:\n{job.output()}"
    )
    verdicts = {event["verdict"] for event in machine.events("resume_proof")}
    assert verdicts <= {ProofVerdict.VERIFIED, ProofVerdict.NOT_PROVEN}, job.output()
    for event in machine.events("restore"):
        assert event["sources"]
        assert all(name.startswith(("memory", "file")) for name in event["sources"]), event["sources"]
    assert not list((machine.directory / "store").glob("*.pt"))
