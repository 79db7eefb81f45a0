"""Goodput by interval under losses of spot machines (PCcheck figs. 2, 9), total time by MTBF (LightCheck table II,
fig. 9), and how much of a job's time trains it: a MODEL, computed by `holdfast simulate`.

    published/pccheck-vgg16.json ─► replay of the trace that GOODPUT_TRACE names, with notices of 0, 30 and 120 s
    the profile of this tree     ─► total time by MTBF; effective training time, and what its loss consists of

A trace is read in place and not kept. Without one, losses are simulated, as frequent as in PCcheck's trace.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from operator_side.simulate.profiles import TrainingProfile, load_profile, measured_profile
from operator_side.simulate.replay import ReplayOutcome, StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import HOUR_US, Strategy, microseconds
from operator_side.simulate.study import goodput, lanes_of, total_times
from operator_side.simulate.trace_windows import TraceWindows, cut, poisson
from operator_side.simulate.traces import read_trace

__all__ = [
    "EFFECTIVE",
    "PUBLISHED",
    "TENTH",
    "TRACE_VARIABLE",
    "best",
    "effective",
    "grids",
    "measure",
    "split_of",
]

TRACE_VARIABLE = "GOODPUT_TRACE"
PUBLISHED = Path(__file__).parents[1] / "published" / "pccheck-vgg16.json"
_LEADS_SECONDS = (0.0, 30.0, 120.0)
_INTERVALS = (1, 10, 25, 50, 100, 250, 500, 1000)
_SEED = 39
_NODES = 14
_LOSSES, _LOSSES_HOURS = 26, 3.75
_MTBF_HOURS = (0.5, 2.0, 8.0)
_TOTAL_HOURS = 8.0
# MTBF in hours, and the target share of effective training time.
EFFECTIVE = {1 / 6: 0.94, 3.0: 0.97, 8.0: 0.99}
_STAGED_PART = 10  # the interval is this many times the seconds that the image takes to stage
TENTH = "holdfast, staged in a tenth"  # of the interval: the job that EFFECTIVE's targets are about


def measure(options: Options) -> dict[str, Any]:
    samples = options.count(40, 4)
    published, own = load_profile(PUBLISHED), measured_profile()
    path = os.environ.get(TRACE_VARIABLE)
    options.progress("goodput by interval")
    nodes, windows = _windows(Path(path) if path else None, samples)
    rows, _ = goodput(_job(published, nodes), published.lanes(_LEADS_SECONDS), _INTERVALS, windows)
    options.progress("total time by MTBF")
    totals = []
    job = TrainingJob(
        _NODES,
        _NODES,
        microseconds(own.iteration_seconds),
        microseconds(own.restart_seconds),
        round(_TOTAL_HOURS * 3600 / own.iteration_seconds),
    )
    for mtbf in _MTBF_HOURS:
        for of in total_times(
            job, lanes_of(own.lanes((0.0,)), _INTERVALS), mtbf_hours=mtbf, samples=samples, seed=_SEED
        ):
            hours = None if of.hours is None else of.hours.median
            totals.append(
                {"strategy": of.strategy.name, "every": of.every, "mtbf_hours": mtbf, "hours": hours}
            )
    options.progress("effective training time")
    return document(
        "goodput",
        options,
        options.shape("gpt2"),
        trace=Path(path).name if path else f"made up, {_LOSSES} losses in {_LOSSES_HOURS} h",
        published=published.source,
        profile=own.source,
        goodput=[{"strategy": of.strategy.name, "every": of.every, "share": of.share} for of in rows],
        totals=totals,
        effective=[of for mtbf in EFFECTIVE for of in effective(own, mtbf, samples)],
    )


def _windows(path: Path | None, samples: int) -> tuple[int, TraceWindows]:
    rng = np.random.default_rng(_SEED)
    length_us = round(_LOSSES_HOURS / 2 * HOUR_US)
    if path is not None:
        trace = read_trace(path)
        return trace.count_max, cut(trace, length_us=trace.end_us // 2, offsets=samples, rng=rng)
    mtbf_us = round(_LOSSES_HOURS / _LOSSES * HOUR_US)
    return _NODES, poisson(
        nodes=_NODES, mtbf_us=mtbf_us, provision_us=0, length_us=length_us, samples=samples, rng=rng
    )


def _job(profile: TrainingProfile, nodes: int) -> TrainingJob:
    return TrainingJob(
        nodes, 1, microseconds(profile.iteration_seconds), microseconds(profile.restart_seconds)
    )


def effective(profile: TrainingProfile, mtbf_hours: float, samples: int) -> list[dict[str, Any]]:
    """Return the effective share of a job's time and the lost shares, by way to checkpoint.

    Each way has its best interval. `TENTH` is holdfast at the interval that is ten times the staging time of its image.
    A lost machine is replaced at once, so no time is lost to waiting for machines.
    """
    job = TrainingJob(
        _NODES, _NODES, *map(microseconds, (profile.iteration_seconds, profile.restart_seconds))
    )
    windows = poisson(
        nodes=_NODES,
        mtbf_us=round(mtbf_hours * HOUR_US),
        provision_us=0,
        length_us=round(200 * mtbf_hours * HOUR_US),
        samples=max(2, samples // 4),
        rng=np.random.default_rng(_SEED),
    )
    intervals = [round(1.25**power) for power in range(4, 45)]
    lanes = [(measured.strategy(name), intervals) for name, measured in profile.strategies.items()]
    ours = profile.strategies["holdfast"]
    every = max(1, round(_STAGED_PART * (ours.staged_seconds or 0) / profile.iteration_seconds))
    lanes.append((ours.strategy(TENTH), [every]))
    return [
        {"mtbf_hours": mtbf_hours, **_best_of(job, strategy, of_lane, windows)} for strategy, of_lane in lanes
    ]


def _best_of(
    job: TrainingJob, strategy: Strategy, intervals: Sequence[int], windows: TraceWindows
) -> dict[str, Any]:
    outcome = replay(job, [StrategyLane(strategy, every) for every in intervals], windows)
    row = int(outcome.useful.sum(axis=1).argmax())
    split = split_of(outcome, row, job, strategy, windows.length_us)
    return {"strategy": strategy.name, "every": intervals[row], **split}


def split_of(
    outcome: ReplayOutcome,
    row: int,
    job: TrainingJob,
    strategy: Strategy,
    length_us: int,
    *,
    first_us: int = 0,
) -> dict[str, float]:
    """Return the shares of the time that a lane of a replay has trained and lost. `first_us`: length of the first
    launch, left out at the start of each window.
    """
    whole = (length_us - first_us) * outcome.useful.shape[1]
    useful, redone = (int(of[row].sum()) * job.iteration_us for of in (outcome.useful, outcome.redone))
    training = int(outcome.training_us[row].sum())
    paused = int(outcome.interruptions[row].sum()) * (job.restart_us + strategy.restore_near_us)
    return {
        "effective": useful / whole,
        "saving": (training - useful - redone) / whole,
        "redone": redone / whole,
        "restart": min(paused, whole - training) / whole,
        "waiting": max(0, whole - training - paused) / whole,
    }


def best(document: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Return the best interval of each way to checkpoint, and its share of the ideal there."""
    found: dict[str, tuple[int, float]] = {}
    for of in document["goodput"]:
        if of["share"]["median"] >= found.get(of["strategy"], (0, -1.0))[1]:
            found[of["strategy"]] = of["every"], of["share"]["median"]
    found.pop("ideal", None)
    return found


def grids(document: dict[str, Any]) -> list[Grid]:
    by_interval: dict[str, list[str]] = {}
    for of in document["goodput"]:
        if of["strategy"] != "ideal":
            by_interval.setdefault(of["strategy"], []).append(f"{100 * of['share']['median']:.1f}")
    title = f"Goodput in percent of the ideal, a model; VGG-16 as published, trace: {document['trace']}"
    names = ("way", *(f"every {every}" for every in _INTERVALS))
    result = [Grid(title, names, tuple((name, *row) for name, row in by_interval.items()))]
    rows = []
    totals = document["totals"]
    for name in dict.fromkeys(of["strategy"] for of in totals):
        cells = []
        for mtbf in _MTBF_HOURS:
            chosen = [
                of
                for of in totals
                if of["strategy"] == name and of["mtbf_hours"] == mtbf and of["hours"] is not None
            ]
            least = min(chosen, key=lambda of: float(of["hours"]), default=None)
            cells.append(f"{least['hours']:.2f} (every {least['every']})" if least else "never done")
        rows.append((name, *cells))
    title = f"Hours of a training of {_TOTAL_HOURS:.0f} h, a model; each way at its best interval, this tree's profile"
    result.append(Grid(title, ("way", *(f"MTBF {mtbf:g} h" for mtbf in _MTBF_HOURS)), tuple(rows)))
    parts = ("effective", "saving", "redone", "restart", "waiting")
    shares = tuple(
        (
            f"{of['mtbf_hours'] * 60:.0f} min, {of['strategy']}",
            str(of["every"]),
            *(f"{100 * of[part]:.2f}" for part in parts),
        )
        for of in document["effective"]
    )
    title = "Effective training time and losses in percent of a job's time, a model of this tree's profile"
    names = (
        "MTBF, way",
        "every",
        "effective",
        "saving",
        "work done again",
        "restart",
        "waiting for machines",
    )
    return [*result, Grid(title, names, shares)]
