"""`every="auto"` in a real job: a store that becomes slow and fast again, mpirun, a stager, a flusher."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import read_failure_count
from holdfast.policy.advice import advise
from holdfast.policy.cost import Cost
from holdfast.policy.hazard import Hazard
from holdfast.ring.directory import runtime_directory
from holdfast.store import open_store
from operator_side.status.run_watch import RunWatch
from tests.integration.jobs import pacing
from tests.support.cluster import SMALL, Cluster, wait_until
from tests.support.events import read_events
from tests.support.job import REPOSITORY, Job
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]

RANKS, WAIT_SECONDS_MAX, STEP_SECONDS = 2, 120, 0.01
SITE = REPOSITORY / "tests" / "support" / "throttled_site"


class Paced:
    """A job that trains until stopped, and its processes' records."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.slow, self.events_path = directory / "slow", directory / "events.jsonl"
        env = {
            "THROTTLED_BYTES_PER_SECOND": "1e9",
            "THROTTLED_SECONDS": str(self.slow),
            "PACING_STEP_SECONDS": str(STEP_SECONDS),
            "HOLDFAST_EVENTS": str(self.events_path),
            "PYTHONPATH": f"{SITE}{os.pathsep}{REPOSITORY}",
            **settings,
        }
        self.cluster = Cluster(
            directory, f"throttled://{directory / 'store'}", env, script=pacing.__file__, stager=SMALL
        )

    def events(self, *names: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [
            line
            for line in read_events(self.events_path)
            if line["event"] in names and (rank is None or line.get("rank") == rank)
        ]

    def wait_for(self, job: Job, count: int, *, longer: bool, than: int) -> dict[str, Any]:
        """Wait for an interval, after the first `count`, that is longer or shorter than `than`; return it."""

        def found() -> list[dict[str, Any]]:
            assert job.process.poll() is None, job.output()
            intervals = self.events("interval")[count:]
            return [line for line in intervals if (line["every"] > than) == longer and line["every"] != than]

        wait_until(lambda: bool(found()), WAIT_SECONDS_MAX, lambda: f"no other interval:\n{job.output()}")
        return found()[0]

    def train_until(self, job: Job, step: int) -> None:
        path = self.cluster.out(1) / "step"

        def there() -> bool:
            assert job.process.poll() is None, job.output()
            text = path.read_text() if path.exists() else ""
            return bool(text) and int(text) >= step

        wait_until(there, WAIT_SECONDS_MAX, job.output)

    def interval_of(self, job: Job) -> dict[str, Any]:
        """Wait for this job's first new interval, and return it."""
        count = len(self.events("interval"))
        return self.wait_for(job, count, longer=True, than=0)

    def costs(self) -> Cost:
        """Return the costs measured by the newest job."""
        said = self.events("profile")[-1]
        names = ("iteration_seconds", "stall_seconds", "staged_seconds", "durable_seconds")
        return Cost(*(said[name] for name in names))

    def kill(self, job: Job) -> None:
        """Send SIGKILL to every rank; only the store is left."""
        for rank in range(RANKS):
            path = self.cluster.out(self.cluster.started) / f"pid-{rank}"
            os.kill(int(path.read_text()), signal.SIGKILL)
        job.wait(WAIT_SECONDS_MAX)
        self.cluster.wait_for_flusher()

    def stop(self, job: Job) -> str:
        (self.cluster.out(1) / "stop").touch()
        job.succeed(60)
        return job.output()

    def tried(self, rank: int) -> list[int]:
        """Return the steps at which this rank saved, or tried to."""
        return sorted({line["step"] for line in self.events("save", "declined", rank=rank)})


def test_a_slow_store_makes_the_interval_longer_and_a_quick_one_shorter_on_all_ranks_at_one_step(
    tmp_path: Path,
) -> None:
    # With failures this frequent the shortest interval within the bound is the best one.
    run = Paced(tmp_path, HOLDFAST_MTBF_HOURS="0.001")
    with run.cluster.start(RANKS) as job:
        first = run.wait_for(job, 0, longer=True, than=0)
        # One request takes as long as two intervals: on a busy machine the first interval may be a long one already.
        run.slow.write_text(str(max(0.1, 2 * first["every"] * STEP_SECONDS)))
        slow = run.wait_for(job, 1, longer=True, than=2 * first["every"])
        count = len(run.events("interval"))
        run.slow.unlink()
        relief = run.wait_for(job, count, longer=False, than=slow["every"])
        run.train_until(job, relief["first_step"] + 3 * relief["every"])
        shown = RunWatch(runtime_directory(run.cluster.store, run.cluster.runtime)).poll().interval
        assert shown is not None
        assert shown.why in {line["why"] for line in run.events("interval")}
        said = run.stop(job)
    run.cluster.wait_for_flusher()
    intervals = run.events("interval")
    tried, trained = run.tried(0), int((run.cluster.out(1) / "step").read_text()) + 1
    assert run.tried(1) == tried, "the ranks have saved at different steps"
    assert tried[:2] == [15, 31]  # before any word
    for line, following in zip(intervals, [*intervals[1:], None], strict=True):
        end = min(
            trained, trained if following is None else following["at_step"]
        )  # what is said last may come too late
        expected = [
            step
            for step in range(line["first_step"], end)
            if (step - line["first_step"]) % line["every"] == 0
        ]
        assert [step for step in tried if line["at_step"] <= step < end] == expected
        assert said.count(f"from step {line['at_step']} on {line['why']}") == 1
    kept = [item.step for item in Catalog(open_store(run.cluster.store)).list()]
    assert len(kept) > 3
    assert set(kept) <= set(tried)
    (profile,) = run.events("profile")
    assert profile["rank"] == 0
    assert profile["iterations"] >= 5
    refused = run.events("interval_kept", "interval_loose")
    # the end may come while the ranks are being asked for one more
    assert [line for line in refused if line["reason"] not in {"rank 0 has left", "rank 1 has left"}] == []


def test_kills_of_the_ranks_are_counted_in_the_store_and_shorten_the_interval(tmp_path: Path) -> None:
    # The stall, not the bound, decides.
    run = Paced(tmp_path, PACING_STALL_SECONDS="0.1", HOLDFAST_OVERHEAD_MAX="0.5")
    kills = 3
    for failures in range(kills + 1):
        with run.cluster.start(RANKS) as job:
            line = run.interval_of(job)
            shown = RunWatch(runtime_directory(run.cluster.store, run.cluster.runtime)).poll().failures
            run.kill(job)
        assert shown in line["why"]
        assert shown.startswith(f"failures: {failures} in ")
        assert " observed, prior 1 in 3 h → one in " in shown
        # By the costs that this job has measured, which waver with the load of the machine.
        assert line["every"] == pytest.approx(best_every(run.costs(), 3.0 / (1 + failures)), rel=0.05)
    assert line["every"] < 0.6 * best_every(run.costs(), 3.0), "four times the hazard, half the interval"
    seen = read_failure_count(open_store(run.cluster.store))
    assert seen.failures == kills + 1
    assert seen.seconds > 0
    with run.cluster.start(RANKS, env={"HOLDFAST_MTBF_HOURS": "3"}) as job:
        typed = run.interval_of(job)
        run.kill(job)
    assert typed["why"].endswith("; failures: one in 3 h, as set (mtbf_hours)")
    assert typed["every"] == pytest.approx(best_every(run.costs(), 3.0), rel=0.05)


def best_every(cost: Cost, mtbf_hours: float) -> int:
    return advise(cost, Hazard.from_mtbf(mtbf_hours), overhead_max=0.5).every
