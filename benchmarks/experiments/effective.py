"""Effective training time under kills, and the four parts of the loss: real runs beside the model's prediction.

    each way: an undisturbed run, then ONE kill ─► its costs ─► its best interval ─► the same program, killed at
    the times of one trace ─► real: effective, saving, redone work, restart, waiting
    all costs ─► replay of that trace ─► the same parts, predicted       one failure in 10 min, 3 h, 8 h ─► a model

holdfast runs under `holdfast run`; torch.save and DCP's async_save run under a shell that restarts mpirun. The time
scale is compressed: the mean time between kills is that of three relaunches, so a window of minutes has some kills. The
model extends this to hours, with the costs of these runs. A replacement is available at once, so "waiting for machines"
is the pause before a relaunch. "Saving" is the extra time of the iterations over those of the undisturbed run, with the
noise of both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import jobs
from benchmarks.experiments import Options, document
from benchmarks.experiments.goodput import EFFECTIVE, effective, split_of
from benchmarks.experiments.reality import came_to, losses_of, written
from benchmarks.grid import Grid
from benchmarks.run_profile import run_profile, started
from benchmarks.supervised import Program
from holdfast.policy.interval import best_interval
from operator_side.simulate.profiles import MeasuredCosts, TrainingProfile
from operator_side.simulate.replay import StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import SECOND_US, microseconds
from operator_side.simulate.trace_windows import cut_windows
from operator_side.simulate.traces import Trace

__all__ = ["PARTS", "WAYS", "grids", "measure", "split"]

WAYS = ("holdfast", "torch.save+fsync", "dcp-thread")
PARTS = ("effective", "saving", "redone", "restart", "waiting")
_RANKS, _EVERY, _EVERY_MAX = 2, 10, 1000
_COMPUTE_SECONDS, _UPDATE_SECONDS = 0.08, 0.02
_CYCLES, _CYCLES_QUICK = 9, 4  # of the undisturbed run; the first one is left out
_RELAUNCHES_APART = 3.0
_LOSSES, _LOSSES_QUICK = 4, 1


def measure(options: Options) -> dict[str, Any]:
    model = options.model or "flat-24-48"
    program = Program(model, _RANKS, _EVERY, _COMPUTE_SECONDS, _UPDATE_SECONDS)
    with jobs.folders(options.folder) as folders:
        count = options.rounds or 1
        rounds = [_round(program, folders, number, options) for number in range(count)]
    samples = options.count(40, 8)
    profile = TrainingProfile.model_validate(rounds[0]["profile"])
    return document(
        "effective",
        options,
        options.shape(model),
        rounds=rounds,
        model=[of for mtbf in EFFECTIVE for of in effective(profile, mtbf, samples)],
    )


def _round(program: Program, folders: jobs.Folders, number: int, options: Options) -> dict[str, Any]:
    costs = {}
    for way in WAYS:
        options.progress(f"round {number + 1}: the costs of {way}")
        of_way = replace(program, peer="" if way == "holdfast" else way)
        cycles = options.count(_CYCLES, _CYCLES_QUICK)
        costs[way] = run_profile(of_way, folders, f"costs-{number}-{WAYS.index(way)}", cycles)
    profile = _together(costs)
    relaunch = max(of.restart_seconds + of.strategies[way].restore_seconds for way, of in costs.items())
    apart = _RELAUNCHES_APART * relaunch
    seconds = apart * options.count(_LOSSES, _LOSSES_QUICK)
    losses = losses_of(seconds, apart, number)
    ways = {}
    for way in WAYS:
        own = costs[way]
        cost = own.strategies[way].strategy(way).cost(microseconds(own.iteration_seconds))
        every = best_interval(cost, apart, every_max=_EVERY_MAX)
        options.progress(f"round {number + 1}: {way} every {every}, {len(losses)} kills in {seconds:.0f} s")
        of_way = replace(program, peer="" if way == "holdfast" else way, every=every)
        name = f"real-{number}-{WAYS.index(way)}"
        real = _real(of_way, own.iteration_seconds, losses, seconds, folders, name)
        trace = written(losses, own.restart_seconds, seconds, folders.scratch / f"{name}.csv")
        ways[way] = {"every": every, "real": real, "predicted": predicted(own, way, every, trace)}
    return {
        "profile": profile.model_dump(mode="json"),
        "seconds": seconds,
        "apart_seconds": apart,
        "losses": losses,
        "ways": ways,
    }


# -- costs -----------------------------------------------------------------------------------------------------------


def _together(costs: dict[str, TrainingProfile]) -> TrainingProfile:
    """Merge all ways into one profile with the same iteration and restart, as these do not depend on the way."""
    strategies: dict[str, MeasuredCosts] = {way: of.strategies[way] for way, of in costs.items()}
    return TrainingProfile(
        source="a run without a kill and one kill, for each way",
        iteration_seconds=statistics.median(of.iteration_seconds for of in costs.values()),
        restart_seconds=statistics.median(of.restart_seconds for of in costs.values()),
        strategies=strategies,
    )


# -- reality and prediction --------------------------------------------------------------------------------------------


def _real(
    program: Program,
    iteration_seconds: float,
    losses: Sequence[float],
    seconds: float,
    folders: jobs.Folders,
    name: str,
) -> dict[str, Any]:
    with started(program, folders, name) as run:
        run.wait(lambda: bool(run.attempts()), "the first launch trains")
        begin = run.attempts()[0].begun
        kills = []
        for number, at in enumerate(losses):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            killed = run.kill(number)
            if killed is not None:
                kills.append(killed)
        end = begin + seconds
        time.sleep(max(0.0, end - time.monotonic()))
        last_kill = max(kills, default=begin)
        run.wait(lambda: run.attempts()[-1].begun > last_kill, "training after the last kill")
        attempts = run.attempts()
        paused = sum(of["pause_seconds"] for of in run.status("relaunching"))
    useful, redone, training = came_to(attempts, kills, end)
    return {
        "kills": len(kills),
        "useful": useful,
        **split(
            useful * iteration_seconds,
            redone * iteration_seconds,
            training,
            seconds,
            waited=min(paused, seconds),
        ),
    }


def split(useful: float, redone: float, training: float, whole: float, *, waited: float) -> dict[str, float]:
    """Split `whole` seconds into shares that add up to 1. The rest of `training` after `useful` and `redone` is saving;
    the rest of the time after `waited` is restart.
    """
    down = max(0.0, whole - training)
    waiting = min(waited, down)
    return {
        "effective": useful / whole,
        "saving": (training - useful - redone) / whole,
        "redone": redone / whole,
        "restart": (down - waiting) / whole,
        "waiting": waiting / whole,
    }


def predicted(profile: TrainingProfile, way: str, every: int, trace: Trace) -> dict[str, float]:
    """Return the same shares from a replay of the trace; the window begins after the first launch."""
    launch_us = microseconds(profile.restart_seconds)
    job = TrainingJob(_RANKS, _RANKS, microseconds(profile.iteration_seconds), launch_us)
    strategy = profile.strategies[way].strategy(way)
    windows = cut_windows(trace, length_us=trace.end_us, offsets=1, rng=np.random.default_rng(0))
    outcome = replay(job, [StrategyLane(strategy, every)], windows)
    assert trace.end_us > launch_us, f"a trace of {trace.end_us / SECOND_US:g} s ends before the first launch"
    return split_of(outcome, 0, job, strategy, windows.length_us, first_us=launch_us)


# -- tables ------------------------------------------------------------------------------------------------------------


def grids(document: dict[str, Any]) -> list[Grid]:
    names = ("effective", "saving", "work done again", "restart", "waiting for machines")
    rows = []
    for number, one in enumerate(document["rounds"], 1):
        for way, of in one["ways"].items():
            cells = (f"{100 * of['real'][part]:.1f} / {100 * of['predicted'][part]:.1f}" for part in PARTS)
            rows.append((f"{number}: {way}, kills: {of['real']['kills']}", f"{of['every']}", *cells))
    seconds = statistics.median(one["seconds"] for one in document["rounds"])
    apart = statistics.median(one["apart_seconds"] for one in document["rounds"])
    title = f"Ranks killed every {apart:.0f} s on average, {seconds:.0f} s: percent of the time, measured / predicted"
    real = Grid(title, ("round, way", "every", *names), tuple(rows))
    shares = tuple(
        (
            f"{of['mtbf_hours'] * 60:.0f} min, {of['strategy']}",
            str(of["every"]),
            *(f"{100 * of[part]:.2f}" for part in PARTS),
        )
        for of in document["model"]
    )
    title = "One failure in 10 min, 3 h and 8 h: percent of the time, a model with the costs of these runs"
    return [real, Grid(title, ("MTBF, way", "every", *names), shares)]
