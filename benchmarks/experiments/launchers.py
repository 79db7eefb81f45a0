"""torchrun with a standing stager, against mpirun with the stager in the job.

stall       a job of each kind at the same time; they save in turn
relaunch    all ranks are killed once they have a checkpoint in the ring; time until the first new step is done.
            `holdfast run` restarts ranks and stager; torchrun restarts only the ranks, which rejoin the stager
bare        the same script without holdfast is killed in the same way in each round, and mpirun or torchrun restarts
            it; the difference is what holdfast adds
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.cluster import Shape, running, turn
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.jobs import folders
from benchmarks.spread import Spread, columns, ratios, spread
from benchmarks.supervised import BareMpirun, BareTorchrun, Elastic, Program, Supervised

__all__ = ["MPIRUN", "TORCHRUN", "added", "grids", "measure", "relaunch", "stall"]

MPIRUN, TORCHRUN = "mpirun", "torchrun"
_LAUNCHERS = (MPIRUN, TORCHRUN)
_BARE = {MPIRUN: "mpirun, bare", TORCHRUN: "torchrun, bare"}
_KINDS = {
    MPIRUN: Supervised,
    TORCHRUN: Elastic,
    _BARE[MPIRUN]: BareMpirun,
    _BARE[TORCHRUN]: BareTorchrun,
}
_SAVES, _KILLS = 10, 5
_RING_BYTES = 2 << 30  # all of GPT-2's image, so that the newest checkpoint can be restored from it
_EVERY, _COMPUTE_SECONDS, _UPDATE_SECONDS = 4, 0.25, 0.05


def measure(options: Options) -> dict[str, Any]:
    options.clusters.close()  # two jobs at once are enough
    shape = options.shape("gpt2")
    saves = []
    with contextlib.ExitStack() as stack:
        shapes = {name: dataclasses.replace(shape, launcher=name) for name in _LAUNCHERS}
        jobs = {name: stack.enter_context(running(of, options.progress)) for name, of in shapes.items()}
        for job in jobs.values():
            job.prepare("holdfast")
        for number in range(options.rounds_of(_SAVES)):
            figures = {}
            for name in turn(_LAUNCHERS, number):
                options.progress(f"round {number + 1}: a save under {name}")
                figures[name] = jobs[name].save("holdfast")
            saves.append(figures)
    kills = []
    for number in range(options.rounds_of(_KILLS)):
        options.progress(f"round {number + 1}: all ranks are killed")
        kills.append({name: _relaunch(name, shape, options) for name in turn(tuple(_KINDS), number)})
    return document("launchers", options, shape, saves=saves, kills=kills)


def _relaunch(launcher: str, shape: Shape, options: Options) -> dict[str, float]:
    program = Program(shape.model, shape.ranks, _EVERY, _COMPUTE_SECONDS, _UPDATE_SECONDS)
    with (
        folders(options.folder) as place,
        _KINDS[launcher](program, place, "job", ring_bytes=_RING_BYTES) as job,
    ):
        if is_bare := launcher in _BARE.values():
            job.wait(lambda: any(len(run.ends) >= _EVERY for run in job.attempts()), "the first steps")
        else:
            job.wait(lambda: any(job.store.glob(f"step-{_EVERY - 1:09d}*.json")), "the first checkpoint")
        killed = job.kill_all()
        job.wait(lambda: len(job.attempts()) > 1 and bool(job.attempts()[1].ends), "the first step after it")
        again = job.attempts()[1]
        if not (again.first_step or is_bare):
            raise RuntimeError(f"{launcher}: the job started at step 0 instead of resuming from a checkpoint")
    return {
        "seconds": again.ends[0] - killed,
        "restore_seconds": again.restore_seconds,
        "start_seconds": again.begun - again.restore_seconds - killed,
    }


def stall(document: Mapping[str, Any]) -> Spread:
    """Return the stall of a save under torchrun as a ratio to that under mpirun, by round."""
    return _parts(document["saves"], "stall_seconds")


def relaunch(document: Mapping[str, Any]) -> Spread:
    """Return the time from the kill to the first new step under `holdfast run` as a ratio to torchrun's."""
    rounds = document["kills"]
    return ratios(columns(rounds, MPIRUN, "seconds"), columns(rounds, TORCHRUN, "seconds"))


def added(document: Mapping[str, Any], figure: str) -> dict[str, Spread]:
    """Return what holdfast adds to a figure, by launcher and round; empty without bare runs.

    Args:
        document: This experiment's document.
        figure: `seconds`, `start_seconds` or `restore_seconds`, which for a bare script is a barrier.
    """
    found = {}
    for name, bare in _BARE.items():
        rounds = [of for of in document["kills"] if bare in of]
        if rounds:
            found[name] = spread([of[name][figure] - of[bare][figure] for of in rounds])
    return found


def _parts(rounds: list[dict[str, Any]], figure: str) -> Spread:
    return ratios(columns(rounds, TORCHRUN, figure), columns(rounds, MPIRUN, figure))


def grids(document: dict[str, Any]) -> list[Grid]:
    saves, kills = document["saves"], document["kills"]
    of_saves = ("stall_seconds", "staged_seconds", "done_seconds")
    of_kills = ("seconds", "start_seconds", "restore_seconds")
    differences = {figure: added(document, figure) for figure in of_kills}
    return [
        Grid(
            f"A save, seconds: median (least–greatest) of {len(saves)} rounds",
            ("launcher", "stall", "staged", "durable"),
            tuple(
                (name, *(spread(columns(saves, name, figure)).text(3) for figure in of_saves))
                for name in _LAUNCHERS
            ),
        ),
        Grid(
            f"All ranks killed, seconds: median (least–greatest) of {len(kills)} kills",
            ("launcher", "until the first new step", "until the script asks for a restore", "restore"),
            tuple(
                (name, *(spread(columns(kills, name, figure)).text(2) for figure in of_kills))
                for name in _KINDS
                if name in kills[0]
            )
            + tuple(
                (f"{name}, added by holdfast", *(differences[figure][name].text(2) for figure in of_kills))
                for name in differences["seconds"]
            ),
        ),
    ]
