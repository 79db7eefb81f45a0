"""A training of two ranks that saves into a local tier, without a stager.

Slowdown by checkpoints in flight, writers and interval (PCcheck figs. 12 and 13), layer-wise against coarse gate on
PM-like memory (LightCheck fig. 10), recovery from each tier (LightCheck fig. 6). Computation and update are timed
waits. Persistent memory is a stand-in on `/dev/shm` (see `tiers`).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.cluster import Shape
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import spread
from holdfast.mpirun import mpirun_command

__all__ = ["grids", "measure"]

_RANKS = 2
_COMPUTE_SECONDS, _UPDATE_SECONDS = 0.15, 0.05
_EVERY = (1, 2, 5)
_ITERATIONS = 10
_IN_FLIGHT = ((1, 1), (1, 2), (2, 2))  # N, p


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2").fitted()
    runs: list[dict[str, Any]] = []
    with jobs.folders(options.folder) as folders:
        iterations = options.count(_ITERATIONS, 2)
        for count, writers in _IN_FLIGHT[:: options.count(1, 2)]:
            plan = [_order(every, iterations) for every in _EVERY]
            options.progress(f"nvme, N = {count}, p = {writers}")
            nvme = _nvme(folders, f"{count}-{writers}")
            runs.append(_run(options, shape, folders, nvme, plan, count=count, writers=writers))
        turns = (False, True) * options.count(2, 1)
        gates = [_order(2, iterations, coarse=coarse) for coarse in turns]
        for tier, disk in (("memory", False), ("pm", False), ("file", True)):
            folder = (folders.scratch if disk else folders.runtime) / f"tier-{tier}"
            folder.mkdir()
            options.progress(tier)
            runs.append(_run(options, shape, folders, f"{tier}:{folder}", gates, count=1, writers=1))
    return document("tiered", options, shape, runs=runs)


def _nvme(folders: jobs.Folders, name: str) -> str:
    folder = folders.scratch / f"tier-{name}"
    folder.mkdir()
    return f"nvme:{folder}"


def _order(every: int, iterations: int, *, coarse: bool = False) -> dict[str, Any]:
    return {
        "iterations": iterations,
        "every": every,
        "seconds": _COMPUTE_SECONDS,
        "update": _UPDATE_SECONDS,
        "coarse": coarse,
    }


def _run(
    options: Options,
    shape: Shape,
    folders: jobs.Folders,
    tier: str,
    plan: list[dict[str, Any]],
    *,
    count: int,
    writers: int,
) -> dict[str, Any]:
    name = tier.partition(":")[0]
    out = folders.scratch / "tiered.json"
    environment = {
        **jobs.rank_environment(_RANKS, folders, chunk_bytes=shape.chunk_bytes, ring_bytes=shape.ring_bytes),
        "HOLDFAST_TIERS": tier,
        "HOLDFAST_STORE": str(folders.store),
        "HOLDFAST_TIER_SLOTS": str(count + 1),
        "HOLDFAST_TIER_WRITERS": str(writers),
        "HOLDFAST_IN_FLIGHT_MAX": str(count),
        "PMEM_IS_PMEM_FORCE": "1",
    }
    word = [
        "-m",
        "benchmarks.tier_job",
        "--model",
        shape.model,
        "--plan",
        json.dumps(plan),
        "--out",
        str(out),
    ]
    jobs.run(mpirun_command(_RANKS, [sys.executable, *word]), environment, folders.scratch / "tiered.log")
    answers = json.loads(out.read_text())
    _clear(Path(tier.partition(":")[2]))
    restores = [
        max(of["seconds"] for of in several)
        for several in zip(*(a["restores"] for a in answers), strict=True)
    ]
    slowest = [
        {**several[0], "tier": max(of["tier"] for of in several), "none": max(of["none"] for of in several)}
        for several in zip(*(a["runs"] for a in answers), strict=True)
    ]
    options.progress(f"{name}: restored in {min(restores):.2f} s")
    return {
        "tier": name,
        "in_flight": count,
        "writers": writers,
        "runs": slowest,
        "restore_seconds": restores,
    }


def _clear(folder: Path) -> None:
    """Room for the next one."""
    shutil.rmtree(folder)
    folder.mkdir()


def grids(document: dict[str, Any]) -> list[Grid]:
    slowdown = []
    for of in document["runs"]:
        if of["tier"] != "nvme":
            continue
        cells = [f"{100 * (run['tier'] / run['none'] - 1):.1f}" for run in of["runs"]]
        slowdown.append((f"N = {of['in_flight']}, p = {of['writers']}", *cells))
    every = [f"every {run['every']}" for run in document["runs"][0]["runs"]]
    iteration = 1000 * (_COMPUTE_SECONDS + _UPDATE_SECONDS)
    title = f"NVMe, overhead in percent of a training without checkpoints, iteration {iteration:.0f} ms"
    result = [Grid(title, ("in flight, writers", *every), tuple(slowdown))]
    gates = []
    for of in document["runs"]:
        if of["tier"] == "nvme":
            continue
        cells = []
        for coarse in (True, False):
            chosen = [run for run in of["runs"] if run["coarse"] is coarse]
            cells.append(spread([100 * (run["tier"] / run["none"] - 1) for run in chosen]).text(1))
            cells.append(spread([1000 * run["stall_seconds"] for run in chosen]).text(0))
        gates.append((of["tier"], *cells))
    names = (
        "tier",
        "coarse, overhead %",
        "coarse, stall ms",
        "layer-wise, overhead %",
        "layer-wise, stall ms",
    )
    result.append(Grid("Saved at every second iteration, strategy D for memory and PM", names, tuple(gates)))
    recovery = []
    for of in document["runs"]:
        label = of["tier"] if of["tier"] != "nvme" else f"nvme, N = {of['in_flight']}"
        recovery.append((label, spread(of["restore_seconds"]).text(2)))
    result.append(Grid("Recovery from each tier, both ranks, seconds", ("tier", "seconds"), tuple(recovery)))
    return result
