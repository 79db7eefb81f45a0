"""`holdfast simulate` against a real run whose ranks are killed by SIGKILL at the times of a trace.

    an undisturbed run, then ONE kill ─► profile ─► replay of the trace ─► predicted
    the same program under `holdfast run`, killed at the times of the same trace ─► real

Losses are simulated (Poisson, seeded), or come from the trace that REALITY_TRACE names. Their mean distance is scaled
to the time of three relaunches, as measured. A window has room for four losses: two minutes on an idle machine.
(If losses came as fast as relaunches, the job would hardly train, and one second more would change the result.) A loss
takes one rank, and a replacement is available at once. The window begins when the first launch trains, in the replay
as well. Computation and update are timed waits, so two cores are enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import jobs
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.run_profile import run_profile
from benchmarks.spread import spread
from benchmarks.supervised import Attempt, Program, Supervised
from operator_side.simulate.profiles import TrainingProfile
from operator_side.simulate.replay import StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import SECOND_US, microseconds
from operator_side.simulate.trace_windows import cut_windows
from operator_side.simulate.traces import Trace, read_trace

__all__ = [
    "ERROR_MAX",
    "TRACE_VARIABLE",
    "came_to",
    "error",
    "grids",
    "losses_of",
    "measure",
    "predicted",
    "written",
]

ERROR_MAX = 0.1
TRACE_VARIABLE = "REALITY_TRACE"
_ROUNDS = 3
_RANKS, _EVERY = 2, 10
_COMPUTE_SECONDS, _UPDATE_SECONDS = 0.08, 0.02
_CYCLES = 9  # of the undisturbed run; the first one, which allocates, is left out
_RELAUNCHES_APART = 3.0
_LOSSES, _LOSSES_QUICK = 4, 1


def measure(options: Options) -> dict[str, Any]:
    model = options.model or "flat-24-48"
    program = Program(model, _RANKS, _EVERY, _COMPUTE_SECONDS, _UPDATE_SECONDS)
    rounds = []
    with jobs.folders(options.folder) as folders:
        for number in range(options.rounds or (1 if options.quick else _ROUNDS)):
            options.progress(f"round {number + 1}: measuring the profile")
            profile = run_profile(program, folders, f"profile-{number}", _CYCLES)
            ways = profile.strategies["holdfast"]
            apart = _RELAUNCHES_APART * (profile.restart_seconds + ways.restore_seconds)
            seconds = apart * options.count(_LOSSES, _LOSSES_QUICK)
            losses = losses_of(seconds, apart, number)
            options.progress(f"round {number + 1}: {len(losses)} kills in {seconds:.0f} s")
            # The replay's window includes the first launch; the compared window begins after it.
            launch_seconds = profile.restart_seconds
            trace = written(losses, launch_seconds, seconds, folders.scratch / f"trace-{number}.csv")
            real = _real(program, losses, seconds, folders, f"real-{number}")
            foreseen = predicted(profile, trace, _EVERY)
            rounds.append(
                {
                    "profile": profile.model_dump(mode="json"),
                    "seconds": seconds,
                    "losses": losses,
                    "real": real,
                    "predicted": foreseen,
                }
            )
            options.progress(f"round {number + 1}: {real['useful']} real, {foreseen['useful']} predicted")
    return document(
        "reality",
        options,
        options.shape(model),
        trace=Path(os.environ.get(TRACE_VARIABLE, "made up")).name,
        every=_EVERY,
        rounds=rounds,
    )


def error(one: dict[str, Any]) -> float:
    """Return the relative error of the predicted number of useful iterations."""
    return float(one["predicted"]["useful"] / max(one["real"]["useful"], 1) - 1)


# -- the trace -------------------------------------------------------------------------------------------------------


def losses_of(seconds: float, apart_seconds: float, number: int) -> list[float]:
    """Return the times of losses with this mean distance, in seconds from the window's start."""
    rng = np.random.default_rng([20, number])
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        count = max(1, int(rng.poisson(seconds / apart_seconds)))
        return sorted(float(at) for at in rng.uniform(0, seconds, size=count).round(3))
    trace = read_trace(Path(path))
    scale = apart_seconds * trace.losses / (trace.end_us / SECOND_US)
    times = trace.time_us[trace.lost > 0] / SECOND_US * scale
    begin = rng.uniform(0, max(0.0, trace.end_us / SECOND_US * scale - seconds))
    return [float(at) for at in (times - begin).round(3) if 0 < at < seconds]


def written(losses: Sequence[float], launch_seconds: float, seconds: float, path: Path) -> Trace:
    """Write a trace of machines that are replaced the moment they are lost, and load it like any trace."""
    rows = [f"0,add,node{number}" for number in range(_RANKS)]
    for number, at in enumerate(losses):
        moment = f"{1000 * (launch_seconds + at):.0f}"
        rows += [f"{moment},remove,node{number}", f"{moment},add,node{number + _RANKS}"]
    path.write_text("\n".join([*rows, f"{1000 * (launch_seconds + seconds):.0f},add,last"]) + "\n")
    return read_trace(path)


def predicted(profile: TrainingProfile, trace: Trace, every: int) -> dict[str, Any]:
    job = TrainingJob(
        _RANKS, _RANKS, microseconds(profile.iteration_seconds), microseconds(profile.restart_seconds)
    )
    windows = cut_windows(trace, length_us=trace.end_us, offsets=1, rng=np.random.default_rng(0))
    outcome = replay(job, [StrategyLane(profile.strategies["holdfast"].strategy("holdfast"), every)], windows)
    return {
        "useful": int(outcome.useful[0, 0]),
        "redone": int(outcome.redone[0, 0]),
        "interruptions": int(outcome.interruptions[0, 0]),
        "training_seconds": float(outcome.training_us[0, 0] / SECOND_US),
    }


# -- reality ---------------------------------------------------------------------------------------------------------


def _real(
    program: Program, losses: Sequence[float], seconds: float, folders: jobs.Folders, name: str
) -> dict[str, Any]:
    with Supervised(program, folders, name) as run:
        run.wait(lambda: bool(run.attempts()), "the first launch trains")
        begin = run.attempts()[0].begun
        kills, hit_nothing = [], 0
        for number, at in enumerate(losses):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            killed = run.kill(number)
            if killed is None:
                hit_nothing += 1
            else:
                kills.append(killed)
        end = begin + seconds
        time.sleep(max(0.0, end - time.monotonic()))
        last_kill = max(kills, default=begin)
        # If the window ends between attempts, the next one's first step says how much counts.
        run.wait(lambda: run.attempts()[-1].begun > last_kill, "training after the last kill")
        attempts = run.attempts()
        phases = run.status("training")
    useful, redone, training = came_to(attempts, kills, end)
    return {
        "useful": useful,
        "redone": redone,
        "interruptions": len(kills),
        "hit_nothing": hit_nothing,
        "training_seconds": training,
        "relaunches": [{key: of[key] for key in of if key.endswith("seconds")} for of in phases],
        "kills": [killed - begin for killed in kills],
        "begun": [of.begun - begin for of in attempts],
        "first_steps": [of.first_step for of in attempts],
    }


def came_to(attempts: Sequence[Attempt], kills: Sequence[float], end: float) -> tuple[int, int, float]:
    """Return useful iterations, redone iterations, and seconds of training in the window."""
    redone, training = 0, 0.0
    for number, one in enumerate(attempts):
        until = min([killed for killed in kills if killed > one.begun] + [end])
        training += max(0.0, until - one.begun)
        if number + 1 < len(attempts) and until < end:
            redone += one.steps_by(until) - attempts[number + 1].first_step
    last = attempts[-1]
    useful = last.first_step if last.begun > end else last.steps_by(end)
    return useful, redone, training


# -- tables ----------------------------------------------------------------------------------------------------------


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for number, one in enumerate(document["rounds"], 1):
        real, predicted = one["real"], one["predicted"]
        profile = one["profile"]
        rows.append(
            (
                f"{number}: {real['interruptions']} kills in {one['seconds']:.0f} s",
                f"{real['useful'] / one['seconds']:.2f}",
                f"{predicted['useful'] / one['seconds']:.2f}",
                f"{100 * error(one):+.1f}",
                f"{real['redone']} / {predicted['redone']}",
                f"{real['training_seconds']:.0f} / {predicted['training_seconds']:.0f}",
                f"{profile['restart_seconds'] + profile['strategies']['holdfast']['restore_seconds']:.1f}",
            )
        )
    errors = spread([error(one) for one in document["rounds"]])
    rows.append(("median (least–greatest)", "", "", errors.text(1, times=100), "", "", ""))
    title = f"Useful iterations per second, {document['trace']} losses"
    names = (
        "round",
        "real",
        "predicted",
        "difference %",
        "redone, real / predicted",
        "training s, real / predicted",
        "relaunch and restore, s",
    )
    return [Grid(title, names, tuple(rows))]
