"""A whole training that saves every K iterations, beside the same training that saves nothing (ACUTE fig. 7,
PCcheck fig. 8).

From the same runs: overhead by interval, and the smallest interval at which it stays under 5 % (LightCheck, table I).
"""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import Cluster, turn
from benchmarks.experiments import Options, available, document
from benchmarks.grid import Grid
from benchmarks.shortest_interval import ShortestInterval, shortest_interval
from benchmarks.spread import Spread, ratios, spread

__all__ = ["cell", "grids", "measure", "overheads", "rounds_in", "rounds_of_runs", "shortest"]

_ROUNDS = 5
_ITERATION_SECONDS = 0.2
_OVERHEAD_MAX = 0.05
# Checkpoints in a run, by interval: the more often, the more are needed until the pipeline is full. A ring that holds
# two checkpoints hides for half a dozen of them that the disk does not keep up. Every 10 it is ten seconds, or the
# noise of a shared machine is more than the percent that is to be seen.
_SAVES = {2: 16, 3: 10, 5: 6, 10: 5}
# In two parts, as all their buffers together do not fit in memory; the second one's are slow, and seen at one interval.
_PARTS = (
    (("holdfast", "torch.save+fsync", "dcp-thread", "checkfreq", "pccheck-like"), _SAVES),
    (("mlc-base", "torchsnapshot"), {10: 1}),
)


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2")
    seconds = _ITERATION_SECONDS / options.count(1, 20)
    runs: list[dict[str, Any]] = []
    with options.running(shape) as cluster:
        cluster.prepare("holdfast")
        for part, saves in _PARTS:
            peers = available(part)
            for peer in peers:
                cluster.prepare(peer)
            runs += rounds_of_runs(
                cluster,
                ("none", *peers),
                saves,
                rounds=options.rounds_of(_ROUNDS),
                compute="device",
                seconds=seconds,
            )
            for peer in peers:
                if peer != "holdfast":
                    cluster.drop(peer)
    return document("makespan", options, shape, iteration_seconds=seconds, runs=runs)


def rounds_of_runs(
    cluster: Cluster,
    peers: tuple[str, ...],
    saves: dict[int, int],
    *,
    rounds: int,
    compute: str,
    seconds: float,
) -> list[dict[str, Any]]:
    """Every peer with every interval, `rounds` times, in turning order: one row for each run."""
    rows = []
    for number in range(rounds):
        for every, count in saves.items():
            cluster.progress(f"round {number + 1} of {rounds}: every {every} iterations")
            for peer in turn(peers, number):
                run = cluster.train(
                    peer, iterations=every * count, every=every, compute=compute, compute_seconds=seconds
                )
                del run["iteration_seconds"]
                rows.append(
                    {"peer": peer, "every": every, "round": number, "iterations": every * count, **run}
                )
    return rows


def rounds_in(runs: list[dict[str, Any]]) -> int:
    """How many rounds were measured."""
    return len({run["round"] for run in runs})


def cell(runs: list[dict[str, Any]], peer: str, every: int, name: str = "makespan_seconds") -> list[float]:
    """One figure by round."""
    return [run[name] for run in runs if run["peer"] == peer and run["every"] == every]


def overheads(runs: list[dict[str, Any]], peer: str, every: int) -> Spread | None:
    """How much longer the training is than without checkpoints: 0.05 is 5 %; each round beside its own baseline."""
    theirs = [run for run in runs if run["peer"] == peer and run["every"] == every]
    if not theirs:
        return None
    plain = [_beside(runs, run) for run in theirs]
    value = ratios([run["makespan_seconds"] for run in theirs], plain)
    return Spread(value.median - 1, value.least - 1, value.greatest - 1)


def _beside(runs: list[dict[str, Any]], run: dict[str, Any], name: str = "makespan_seconds") -> float:
    """A figure without checkpoints, of the same round and interval; the nearest one before it where there are two."""
    place = runs.index(run)
    candidates = [
        (abs(runs.index(other) - place), other[name])
        for other in runs
        if other["peer"] == "none" and other["every"] == run["every"] and other["round"] == run["round"]
    ]
    return float(min(candidates)[1])


def shortest(runs: list[dict[str, Any]], peer: str, overhead_max: float = _OVERHEAD_MAX) -> ShortestInterval:
    """The shortest interval at which the median overhead of a peer is at most that."""
    found = {every: overheads(runs, peer, every) for every in {run["every"] for run in runs}}
    medians = {every: overhead.median for every, overhead in found.items() if overhead is not None}
    return shortest_interval(medians, overhead_max)


def grids(document: dict[str, Any]) -> list[Grid]:
    runs = document["runs"]
    peers = list(dict.fromkeys(run["peer"] for run in runs))
    intervals = sorted({run["every"] for run in runs})
    rows: list[tuple[str, ...]] = []
    for peer in peers:
        if peer == "none":
            continue
        cells = [overheads(runs, peer, every) for every in intervals]
        rows.append((peer, *(of.text(1, times=100) if of else "" for of in cells)))
    seconds = document["iteration_seconds"]
    title = (
        f"Overhead in percent of a training without checkpoints, iteration {seconds * 1000:.0f} ms, "
        f"{rounds_in(runs)} rounds"
    )
    result = [Grid(title, ("peer", *(f"every {every}" for every in intervals)), tuple(rows))]
    table = tuple((peer, shortest(runs, peer).text()) for peer in peers if peer != "none")
    result.append(Grid("Shortest interval with at most 5 % overhead", ("peer", "iterations"), table))
    cost = []
    for peer in peers:
        if peer != "none":
            theirs = [run for run in runs if run["peer"] == peer and run["every"] == intervals[-1]]
            each = [(run["cpu_seconds"] - _beside(runs, run, "cpu_seconds")) / run["saves"] for run in theirs]
            cost.append((peer, f"{spread(each).median:.2f}"))
    result.append(
        Grid("CPU seconds that one checkpoint costs, all processes", ("peer", "CPU s"), tuple(cost))
    )
    return result
