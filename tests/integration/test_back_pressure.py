"""A store slower than the checkpoints: all ranks decline the same steps, training does not wait, memory stays flat.

The ranks record the result of each `save()`, their event logs the fate of each step, and rank 0 the memory of all
processes after each step. Resident sizes are the kernel's (`VmHWM`, `VmRSS`), so the ring counts in both the stager and
the flusher, which map it; growth is checked in private memory (`RssAnon`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.integration.jobs import pressure
from tests.support.cluster import load, same, wait_until
from tests.support.events import read_events
from tests.support.job import REPOSITORY, Job, environment
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]
MIB = 1 << 20
RANKS, STEPS = 2, 210
RING_BYTES, CHUNK_BYTES = 32 * MIB, MIB
NOISE_BYTES = 8 * MIB
SMALL: dict[str, Any] = {
    "PRESSURE_NUMEL": "50000",
    "ring_bytes": 8 * MIB,
}  # an image of 14 MiB: streams as well
SITE = REPOSITORY / "tests" / "support" / "throttled_site"


class Pressed:
    """One run of the job, and its records."""

    def __init__(
        self,
        directory: Path,
        scenario: str,
        steps: int,
        *,
        rate: int,
        ring_bytes: int = RING_BYTES,
        **settings: str,
    ) -> None:
        self.out, self.store = directory / "out", f"throttled://{directory / 'store'}"
        self.events_file = directory / "events.jsonl"
        self._scenario = scenario
        self._steps = steps
        self._directory = directory
        self._ring_bytes = ring_bytes
        self._env = environment(
            directory / "runtime",
            THROTTLED_BYTES_PER_SECOND=str(rate),
            HOLDFAST_EVENTS=str(self.events_file),
            **settings,
        ) | {"PYTHONPATH": f"{SITE}{os.pathsep}{REPOSITORY}"}

    def start(self) -> Job:
        stager = [
            "--store",
            self.store,
            "--chunk-bytes",
            str(CHUNK_BYTES),
            "--ring-bytes",
            str(self._ring_bytes),
        ]
        return Job(
            RANKS,
            [pressure.__file__, str(self.out), self._scenario, str(self._steps)],
            [*stager, "--keep-last", "2"],
            env=self._env,
            log=self._directory / "job.log",
        )

    def run(self) -> str:
        with self.start() as job:
            job.succeed(240)
            return job.output()

    def said(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"rank-{rank}.json").read_text())
        return found

    def events(self, *names: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [
            line
            for line in read_events(self.events_file)
            if line["event"] in names
            and (line["role"], line.get("rank")) == (("stager", None) if rank is None else ("trainer", rank))
        ]

    def fates(self, rank: int) -> tuple[set[int], set[int]]:
        """Return the steps that were staged and those that were not, by `rank`'s records."""
        staged = {line["step"] for line in self.events("staged", rank=rank)}
        return staged, {line["step"] for line in self.events("declined", "failed", rank=rank)}


def check_alike(run: Pressed, steps: int) -> int:
    """Check that every rank has staged and declined the same steps and counted them; return the number staged."""
    staged, left_out = run.fates(0)
    assert staged
    assert not staged & left_out
    assert staged | left_out == set(range(steps)), "a step has no verdict"
    for rank in range(RANKS):
        assert run.fates(rank) == (staged, left_out), f"rank {rank} believes otherwise"
        said = run.said(rank)
        # The last one is taken at the end, when there is room.
        assert staged - {steps - 1} <= {step for step, took in enumerate(said["took"]) if took}
        stats = said["stats"]
        assert (stats["saved"], stats["declined"] + stats["failed"]) == (len(staged), len(left_out))
        assert sum(stats["causes"].values()) == len(left_out)
        assert stats["failed"] == 0, "a rank went on without telling the others"
    return len(staged)


def test_a_slow_store_declines_alike_and_memory_stays_flat(tmp_path: Path) -> None:
    run = Pressed(tmp_path, "together", STEPS, rate=160 * MIB)
    output = run.run()
    staged = check_alike(run, STEPS)
    declined = STEPS - staged
    assert declined > 20, "the store was not slow enough to show anything"
    assert staged > 5
    for rank in range(RANKS):
        said = run.said(rank)
        assert said["stats"]["wait_seconds"] == 0, "save() has waited for room"
        assert all(line["wait_seconds"] == 0 for line in run.events("save", rank=rank))
        assert f"rank {rank}: {declined} of {STEPS} steps were not checkpointed: " in output
        # The slice: half of the parameters and moments, and little more.
        slice_bytes = run.events("plan", rank=rank)[0]["slice_bytes"]
        grown = said["memory"][-1]["rank"]["VmHWM"] - said["baseline"]["VmRSS"]
        print(
            f"rank {rank}: slice {slice_bytes / MIB:.1f} MiB, peak above the baseline {grown / MIB:.1f} MiB"
        )
        assert grown <= slice_bytes + 64 * MIB
        check_flat(f"rank {rank}", [line["rank"]["RssAnon"] for line in said["memory"]])
    samples = run.said(0)["memory"]
    for name, limit in (("stager", RING_BYTES + 200 * MIB), ("flusher", RING_BYTES + 200 * MIB)):
        peak = max(line[name]["VmHWM"] for line in samples)
        print(f"{name}: peak {peak / MIB:.1f} MiB, ring {RING_BYTES / MIB:.0f} MiB of it")
        assert peak <= limit
        check_flat(name, [line[name]["RssAnon"] for line in samples])
    print(f"{staged} of {STEPS} steps staged, {declined} declined: {run.said(0)['stats']['causes']}")
    assert [item.step for item in Catalog(open_store(run.store)).list()][:1] == [run.said(0)["durable_step"]]


def check_flat(name: str, resident: list[int]) -> None:
    """Check for no growth from the 50th checkpoint to the 200th, beyond fluctuation."""
    early, late = min(resident[40:70]), min(resident[-30:])
    print(f"{name}: {early / MIB:.1f} MiB after 50 saves, {late / MIB:.1f} MiB after {len(resident)}")
    assert late - early <= NOISE_BYTES, f"{name} grows: {[value // MIB for value in resident[::10]]} MiB"


def test_ranks_of_unequal_speed_never_disagree(tmp_path: Path) -> None:
    """The ranks never meet: one declines while others have offered, long before or long after."""
    run = Pressed(tmp_path, "apart", 60, rate=40 * MIB, **SMALL)
    run.run()
    staged = check_alike(run, 60)
    assert 0 < staged < 60
    taken_back = [
        sum(took and step not in run.fates(rank)[0] for step, took in enumerate(run.said(rank)["took"]))
        for rank in range(RANKS)
    ]
    print(f"{staged} of 60 staged; begun here and declined elsewhere: {taken_back}")


def check_a_missed_wait_says_who_waited_for_whom(tmp_path: Path) -> None:
    """The store accepts nothing for a while, then recovers."""
    stall = tmp_path / "stall"
    steps = 4
    run = Pressed(
        tmp_path,
        "together",
        steps,
        rate=1024 * MIB,
        HOLDFAST_ON_FULL="wait",
        HOLDFAST_FULL_SECONDS_MAX="1.5",
        HOLDFAST_CLOSE_SECONDS_MAX="120",
        THROTTLED_STALL=str(stall),
        **SMALL,
    )
    with run.start() as job:
        wait_until(
            lambda: any(run.events("declined", rank=0)) or job.process.poll() is not None, 120, "never missed"
        )
        stall.unlink()
        job.succeed(120)
        output = " ".join(job.output().split())  # the stager's log is broken into lines
    check_alike(run, steps)
    late = [line for line in run.events("declined") if "late: " in line["reason"]]
    assert late
    assert re.search(
        r"rank \d waited 1.5 s for step 0 to be staged, and the stager had room for \d+ of its \d+", output
    )
    assert "Find out why the store is slow" in output


def check_a_killed_stager_costs_the_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    steps = 30
    undisturbed = Pressed(tmp_path / "undisturbed", "together", steps, rate=1024 * MIB, **SMALL)
    undisturbed.run()
    run = Pressed(tmp_path / "lost", "lost", steps, rate=1024 * MIB, **SMALL)
    with run.start() as job:
        job.wait(200)  # mpirun itself reports the death
        output = job.output()
    for rank in range(RANKS):
        said = run.said(rank)
        assert same(load(run.out / f"final-{rank}.pt"), load(undisturbed.out / f"final-{rank}.pt"))
        assert (
            output.count(f"rank {rank}: the stager is lost, and no more checkpoints are taken in this job")
            == 1
        ), output
        assert len(run.events("stager_lost", rank=rank)) == 1
        assert len(said["lost_save_seconds"]) > 0
        assert max(said["lost_save_seconds"]) < 20  # nothing is waited for; the limit is the machine's
        assert said["close_seconds"] < 60
        in_a_save = said["stats"]["causes"]["stager lost"] - len(said["lost_save_seconds"])
        assert in_a_save in {0, 1}, "it may be lost in the middle of one"
