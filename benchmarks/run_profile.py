"""Measures the costs of a training and its checkpoints in one killed run, as a profile for `holdfast simulate`."""

from __future__ import annotations

import statistics

from benchmarks import jobs
from benchmarks.peer_restart import SAVES
from benchmarks.supervised import Attempt, BareMpirun, Program, Supervised, lines
from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from operator_side.simulate.profiles import MeasuredCosts, TrainingProfile

__all__ = ["run_profile", "started"]


def started(program: Program, folders: jobs.Folders, name: str) -> Supervised:
    return (BareMpirun if program.peer else Supervised)(program, folders, name)


def run_profile(program: Program, folders: jobs.Folders, name: str, cycles: int) -> TrainingProfile:
    """Run `cycles` undisturbed intervals, kill rank 0 in the middle of the next, and run one more interval."""
    with started(program, folders, name) as run:
        wanted = cycles * program.every + program.every // 2
        run.wait(lambda: any(len(of.ends) >= wanted for of in run.attempts()), f"{wanted} iterations")
        killed = run.kill(0)
        assert killed is not None
        run.wait(
            lambda: len(run.attempts()) > 1 and len(run.attempts()[1].ends) > program.every, "a relaunch"
        )
        before, after = run.attempts()[:2]
        pauses = run.status("relaunching")
        staged, durable = _saves(run, program)
    found = _profile_of(
        before,
        after,
        every=program.every,
        killed=killed,
        pause_seconds=pauses[0]["pause_seconds"] if pauses else 0.0,
        staged_seconds=staged,
        durable_seconds=durable,
    )
    measured = found.strategies["holdfast"]
    if program.peer:
        measured = measured.model_copy(
            update={"stager": False, "staged_seconds": None, "restore_staged_seconds": None}
        )
    return found.model_copy(update={"strategies": {program.peer or "holdfast": measured}})


def _saves(run: Supervised, program: Program) -> tuple[float, float]:
    """Return the median seconds until a save was staged, and until it was durable."""
    if program.peer:
        seconds = statistics.median(of["seconds"] for of in lines(run.store.parent / SAVES))
        return seconds, seconds
    store = open_store(str(run.store))
    manifests = [item.manifest for item in Catalog(store).list() if item.manifest is not None]
    return (
        statistics.median(of.pgt1_seconds for of in manifests),
        statistics.median(of.pgt2_seconds for of in manifests),
    )


def _profile_of(
    before: Attempt,
    after: Attempt,
    *,
    every: int,
    killed: float,
    pause_seconds: float,
    staged_seconds: float,
    durable_seconds: float,
) -> TrainingProfile:
    """The profile from an attempt that was killed once, and the one after it.

    An iteration is the median of those without a checkpoint; the stall is the extra time of an interval over that many
    of them. The pause before the relaunch is left out, as it only follows an attempt without a newer checkpoint.
    """
    starts = (before.begun, *before.ends[:-1])
    lasted = [end - start for start, end in zip(starts, before.ends, strict=True)]
    # The step that ends in a save, and the two after it, may each hold a part of its stall.
    quiet = [
        of for number, of in enumerate(lasted) if number >= every and (number + 1) % every not in {0, 1, 2}
    ]
    iteration = statistics.median(quiet)
    whole = [sum(lasted[at : at + every]) for at in range(every, len(lasted) - every + 1, every)]
    stall = max(0.0, statistics.median(whole) - every * iteration)
    relaunch = after.begun - killed - after.restore_seconds
    return TrainingProfile(
        source="one run without a kill, one kill",
        iteration_seconds=iteration,
        restart_seconds=max(0.0, relaunch - pause_seconds),
        strategies={
            "holdfast": MeasuredCosts(
                stall_seconds=stall,
                staged_seconds=staged_seconds,
                durable_seconds=durable_seconds,
                restore_seconds=after.restore_seconds,
                restore_staged_seconds=after.restore_seconds,
                stager=True,
            )
        },
    )
