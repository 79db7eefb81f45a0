"""`holdfast simulate` with the profile of one run, against the measured times of that run's trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import results
from benchmarks.cluster import Cluster
from benchmarks.experiments.makespan import Part, Series, overheads
from operator_side.simulate.profiles import TrainingProfile, measured_profile
from operator_side.simulate.replay import StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import SECOND_US, microseconds
from operator_side.simulate.trace_windows import Column, stack
from tests.pages.test_shortest_interval import ITERATION_SECONDS, WRITE_SECONDS, MadeUp

# The replay models a stall, a write and the number in flight, but no contention on two cores.
TOLERANCE = 0.25
WINDOW_SECONDS = 5000


def simulated(profile: TrainingProfile, peer: str, every: int) -> float:
    """Return the simulated seconds of an iteration without lost machines."""
    none = np.zeros(0, dtype=np.int64)
    windows = stack([Column(1, none, none, none, none)], WINDOW_SECONDS * SECOND_US)
    job = TrainingJob(1, 1, microseconds(profile.iteration_seconds), 0)
    outcome = replay(job, [StrategyLane(profile.strategies[peer].strategy(peer), every)], windows)
    return WINDOW_SECONDS / float(outcome.useful[0, 0])


def misfits(document: dict[str, Any], profile: TrainingProfile) -> dict[tuple[str, int], float]:
    """Return simulated / measured by peer and interval, where the ratio exceeds the tolerance."""
    found = {}
    runs = document["runs"]
    for peer, every in sorted(
        {(run["peer"], run["every"]) for run in runs if run["peer"] in profile.strategies}
    ):
        overhead = overheads(runs, peer, every)
        assert overhead is not None
        measured = (1 + overhead.median) * profile.iteration_seconds
        ratio = simulated(profile, peer, every) / measured
        if abs(ratio - 1) > TOLERANCE:
            found[peer, every] = round(ratio, 2)
    return found


def test_the_default_profile_fits_the_trainings_of_its_own_run() -> None:
    document = results.read("makespan")
    assert document is not None
    assert misfits(document, measured_profile()) == {}


@pytest.fixture
def made_up(tmp_path: Path) -> dict[str, Any]:
    """Return a run of simulated peers, in the form that the experiment writes."""
    cluster = MadeUp()
    peers = ("synchronous", "one in flight", "two in flight", "for nothing")
    part = Part({peer: {2: 16, 3: 10, 10: 4} for peer in peers}, rounds_end=1e6, search_end=1e6)
    series = Series(cast("Cluster", cluster), ITERATION_SECONDS, lambda: cluster.clock)
    series.take_rounds(part.saves, 1, part)
    series.search(peers, part)
    names = {
        "synchronous": ("torch.save+fsync",),
        "one in flight": ("checkfreq", "dcp-thread"),
        "two in flight": ("pccheck-like",),
        "for nothing": ("holdfast", "mlc-base"),
    }
    document = {
        "command": "python -m benchmarks makespan",
        "machine": {"cores": 2, "processor": "made up"},
        "iteration_seconds": ITERATION_SECONDS,
        "start_seconds": 5.0,
        "image_bytes": 1 << 30,
        "saves": [
            {
                "stall_seconds": WRITE_SECONDS * (made == "synchronous"),
                "staged_seconds": 0.0,
                **of,
                "peer": name,
            }
            for of in series.saves
            for made in (of["peer"],)
            for name in names[made]
        ],
        "runs": [{**of, "peer": name} for of in series.runs for name in names.get(of["peer"], (of["peer"],))],
        "restores": [{"holdfast": 0.5, "torch.load": 2.0}],
    }
    (tmp_path / "makespan.json").write_text(json.dumps(document))
    return document


def test_a_run_of_known_peers_is_simulated_as_it_was(made_up: dict[str, Any], tmp_path: Path) -> None:
    profile = measured_profile(tmp_path)
    assert profile.restart_seconds == 5.0
    assert misfits(made_up, profile) == {}


def test_a_profile_of_another_disk_does_not_fit(made_up: dict[str, Any], tmp_path: Path) -> None:
    faster = json.loads((tmp_path / "makespan.json").read_text())
    for of in [*faster["saves"], *faster["runs"]]:
        for figure in ("done_seconds", "stall_seconds", "durable_seconds", "makespan_seconds"):
            if figure in of:
                of[figure] /= 3
    (tmp_path / "makespan.json").write_text(json.dumps(faster))
    found = misfits(made_up, measured_profile(tmp_path))
    assert {peer for peer, _ in found} >= {"checkfreq", "torch.save+fsync"}
