"""A scheduler suspends a job, and resumes it later (LightCheck, ICCD 2023, table III).

    suspend: SIGTERM ─► step agreed ─► saved and safe ─► processes have exited
    resume:  mpirun ─► imports, model built ─► restored ─► first step done

Each way in turn, several times: holdfast into a tier in memory, without a stager; into the stager's memory; and
torch.save with fsync to a disk, then torch.load.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import jobs
from benchmarks.cluster import Shape, turn
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import ratios, spread
from benchmarks.switching_rank import WAYS
from holdfast.mpirun import mpirun_command

__all__ = ["grids", "measure"]

_RANKS = 2
_ROUNDS = 5
_ITERATION_SECONDS = 0.1
_STEPS_SECONDS = 0.5  # training time before the next suspension
_SECONDS_MAX = 180.0
_LOOK_SECONDS = 0.005
_PHASES = ("safe", "suspend", "start", "restore", "resume")


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2").fitted()
    rounds: list[dict[str, dict[str, float]]] = []
    with jobs.folders(options.folder) as folders:
        # The first launch restores nothing; it makes the checkpoint that the rounds resume from.
        for number in range(options.rounds_of(_ROUNDS) + 1):
            figures = {}
            for way in turn(WAYS, number):
                options.progress(f"round {number}: {way}")
                figures[way] = _once(shape, folders, way)
            rounds.append(figures)
    return document("switching", options, shape, rounds=rounds[1:])


def _once(shape: Shape, folders: jobs.Folders, way: str) -> dict[str, float]:
    """Resume the job, let it train, suspend it."""
    out = folders.scratch / f"job-{WAYS.index(way)}"
    out.mkdir(exist_ok=True)
    for old in [*out.glob("pid-*"), *out.glob("marks-*.json")]:
        old.unlink()
    tier = folders.runtime / "tier"
    tier.mkdir(exist_ok=True)
    environment = jobs.rank_environment(
        _RANKS, folders, chunk_bytes=shape.chunk_bytes, ring_bytes=shape.ring_bytes
    )
    rank = [sys.executable, "-m", "benchmarks.switching_rank", "--way", way, "--model", shape.model]
    rank += ["--seconds", str(_ITERATION_SECONDS), "--out", str(out)]
    stager = None
    if way == WAYS[0]:
        environment |= {
            "HOLDFAST_TIERS": f"memory:{tier}",
            "HOLDFAST_STORE": str(folders.scratch / "alone" / "run"),
        }
    elif way == WAYS[1]:
        stager = [sys.executable, "-m", "holdfast", "stager", "--store", str(folders.store)]
    log = out / "log"
    with log.open("wb") as said:
        begun = time.monotonic()
        job = subprocess.Popen(
            mpirun_command(_RANKS, rank, stager=stager),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        pids = _trained(job, out, log)
        time.sleep(_STEPS_SECONDS)
        told = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        if job.wait(_SECONDS_MAX):
            raise RuntimeError(
                f"{way} ended with {job.returncode}:\n{log.read_text(errors='replace')[-4000:]}"
            )
        ended = time.monotonic()
    finally:
        _end(job)
    marks = [json.loads(path.read_text()) for path in sorted(out.glob("marks-*.json"))]
    return _figures(marks, begun, told, ended)


def _end(job: subprocess.Popen[bytes]) -> None:
    """Kill the whole process tree, as each rank has a process group of its own."""
    if job.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(job.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        job.kill()
        job.wait()


def _trained(job: subprocess.Popen[bytes], out: Path, log: Path) -> list[int]:
    """Wait until each rank has done its first step; return the ranks' process ids."""
    deadline = time.monotonic() + _SECONDS_MAX
    while len(found := [path for path in out.glob("pid-*") if path.read_text()]) < _RANKS:
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"it did not come to train:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(_LOOK_SECONDS)
    return [int(path.read_text()) for path in found]


def _figures(marks: list[dict[str, float]], begun: float, told: float, ended: float) -> dict[str, float]:
    """Return the slowest rank's figures."""

    def last(name: str) -> float:
        return max(of[name] for of in marks)

    return {
        "safe_seconds": last("safe") - told,
        "suspend_seconds": ended - told,
        "start_seconds": last("built") - begun,
        "restore_seconds": last("restored") - last("built"),
        "resume_seconds": last("trained") - begun,
        "from_step": last("from_step"),
        "step": last("step"),
    }


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds = document["rounds"]
    rows = []
    for way in WAYS:
        cells = [spread([of[way][f"{phase}_seconds"] for of in rounds]).text(2) for phase in _PHASES]
        both = [[_switch(of, name) for of in rounds] for name in (WAYS[2], way)]
        rows.append((way, *cells, "" if way == WAYS[2] else ratios(*both).text(2)))
    names = (
        "way",
        "SIGTERM to safe, s",
        "to ended, s",
        "mpirun to built, s",
        "then restored, s",
        "mpirun to first step, s",
        "torch: times as long, saving and restoring",
    )
    return [Grid(f"Suspend and resume of {document['shape']['model']} on two ranks", names, tuple(rows))]


def _switch(of: dict[str, dict[str, float]], way: str) -> float:
    """Return the part of a switch that depends on the way to checkpoint; the rest is Python's start."""
    return of[way]["safe_seconds"] + of[way]["restore_seconds"]
