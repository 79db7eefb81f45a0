"""A training of two ranks that saves into a local tier, without a stager.

Slowdown by checkpoints in flight, writers and interval (PCcheck figs. 12 and 13), layer-wise against coarse gate
(LightCheck figs. 10 and 11), recovery from each tier (LightCheck fig. 6). Computation and update are timed waits.
Persistent memory is a stand-in on `/dev/shm` (see `tiers`).

Gates only differ where the copy outlasts the computation: there a coarse gate delays the update by copy − computation,
a layer-wise one by copy − computation − update. The write must also end within the interval, or `save()` waits for a
slot with either gate. Therefore the runs of gates have a short computation and a long update, and save
every 5 and 10.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.cluster import Shape
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import Spread, ratios, spread
from holdfast.mpirun import mpirun_command

__all__ = ["gain", "gated", "grids", "intervals", "measure", "overhead"]

_ROUNDS = 3
_RANKS = 2
_ITERATION_SECONDS = 0.2
_UPDATE_SECONDS = 0.05
_EVERY = (1, 2, 5)
_ITERATIONS = 10
_IN_FLIGHT = ((1, 1), (1, 2), (2, 2))  # N, p
_FLIGHT_ROUNDS = 2
_GATE_UPDATE_SECONDS = 0.15
_GATE_ITERATIONS = {5: 10, 10: 20}  # by interval

_SLOWEST = ("tier", "none", "stall_seconds", "copy_seconds")


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2").fitted()
    runs: list[dict[str, Any]] = []
    with jobs.folders(options.folder) as folders:
        iterations = options.count(_ITERATIONS, 2)
        for count, writers in _IN_FLIGHT[:: options.count(1, 2)]:
            plan = [
                _order(number, every, iterations)
                for number in range(options.count(_FLIGHT_ROUNDS, 1))
                for every in _EVERY
            ]
            options.progress(f"nvme, N = {count}, p = {writers}")
            nvme = _nvme(folders, f"{count}-{writers}")
            runs.append(_run(options, shape, folders, nvme, plan, count=count, writers=writers))
        gates = [
            _order(number, every, options.count(several, 2), coarse=coarse, update=_GATE_UPDATE_SECONDS)
            for number in range(options.rounds_of(_ROUNDS))
            for every, several in _GATE_ITERATIONS.items()
            for coarse in ((False, True) if number % 2 else (True, False))
        ]
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


def _order(
    number: int, every: int, iterations: int, *, coarse: bool = False, update: float = _UPDATE_SECONDS
) -> dict[str, Any]:
    return {
        "round": number,
        "iterations": iterations,
        "every": every,
        "seconds": _ITERATION_SECONDS - update,
        "update": update,
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
        {**several[0], **{figure: max(of[figure] for of in several) for figure in _SLOWEST}}
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
    """Empty the folder to make room for the next run."""
    shutil.rmtree(folder)
    folder.mkdir()


def overhead(of: Mapping[str, Any], every: int, *, coarse: bool = False) -> Spread:
    """Return the overhead in percent of saving into a tier, each run beside its own baseline without saves."""
    return spread([100 * (run["tier"] / run["none"] - 1) for run in _chosen(of, every, coarse=coarse)])


def stalls(of: Mapping[str, Any], every: int, *, coarse: bool = False) -> Spread:
    """Return the seconds of a checkpoint's stall on the slowest rank."""
    return spread([run["stall_seconds"] for run in _chosen(of, every, coarse=coarse)])


def gain(of: Mapping[str, Any], every: int) -> Spread:
    """Return the stall with a layer-wise gate as a ratio to that with a coarse one, by round."""
    layered, held = (
        [run["stall_seconds"] for run in _chosen(of, every, coarse=coarse)] for coarse in (False, True)
    )
    return ratios(layered, held)


def gated(document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], int]]:
    """Return each tier and interval at which both gates were measured."""
    return [
        (of, every)
        for of in document["runs"]
        for every in intervals(of)
        if len({run["coarse"] for run in of["runs"] if run["every"] == every}) > 1
    ]


def intervals(of: Mapping[str, Any]) -> list[int]:
    return sorted({run["every"] for run in of["runs"]})


def _chosen(of: Mapping[str, Any], every: int, *, coarse: bool) -> list[dict[str, Any]]:
    return [run for run in of["runs"] if run["every"] == every and run["coarse"] is coarse]


def grids(document: dict[str, Any]) -> list[Grid]:
    nvme = [of for of in document["runs"] if of["tier"] == "nvme"]
    slowdown = [
        (
            f"N = {of['in_flight']}, p = {of['writers']}",
            *(overhead(of, every).text(1) for every in intervals(of)),
        )
        for of in nvme
    ]
    every = [f"every {every}" for every in intervals(nvme[0])]
    iteration = 1000 * _ITERATION_SECONDS
    title = f"NVMe, overhead in percent of a training without checkpoints, iteration {iteration:.0f} ms"
    result = [Grid(title, ("in flight, writers", *every), tuple(slowdown))]
    gates = []
    for of, number in gated(document):
        cells = [f"{of['tier']}, every {number}"]
        for coarse in (True, False):
            cells.append(overhead(of, number, coarse=coarse).text(1))
            cells.append(stalls(of, number, coarse=coarse).text(0, times=1000))
        copies = [run["copy_seconds"] for run in _chosen(of, number, coarse=False) if "copy_seconds" in run]
        cells += [gain(of, number).text(2), spread(copies).text(0, times=1000) if copies else ""]
        gates.append(tuple(cells))
    names = (
        "tier",
        "coarse, overhead %",
        "coarse, stall ms",
        "layer-wise, overhead %",
        "layer-wise, stall ms",
        "stall, layer-wise / coarse",
        "copy ms",
    )
    run = gated(document)[0][0]["runs"][0]
    title = (
        f"Gates: computation {1000 * run['seconds']:.0f} ms, update {1000 * run['update']:.0f} ms; strategy D for "
        "memory and PM"
    )
    result.append(Grid(title, names, tuple(gates)))
    recovery = []
    for of in document["runs"]:
        label = of["tier"] if of["tier"] != "nvme" else f"nvme, N = {of['in_flight']}"
        recovery.append((label, spread(of["restore_seconds"]).text(2)))
    result.append(Grid("Recovery from each tier, both ranks, seconds", ("tier", "seconds"), tuple(recovery)))
    return result
