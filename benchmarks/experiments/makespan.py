"""A whole training that saves every K iterations, beside the same training without saves (ACUTE fig. 7,
PCcheck fig. 8).

The same runs give the overhead by interval, and the smallest interval with at most 5 % (LightCheck, table I). Each peer
is measured at every 10 iterations; from there a bisection searches its smallest interval while time is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import Cluster, turn
from benchmarks.cold import forget
from benchmarks.experiments import Options, available, document
from benchmarks.grid import Grid
from benchmarks.shortest_interval import ShortestInterval, next_interval, shortest_interval
from benchmarks.spread import Spread, ratios, spread
from holdfast.image.manifest import manifest_name

__all__ = [
    "Part",
    "Recovery",
    "Series",
    "cell",
    "common",
    "cpu_seconds",
    "grids",
    "measure",
    "overheads",
    "recoveries",
    "rounds_in",
    "rounds_of_runs",
    "safe_seconds",
    "shortest",
    "utilisation",
]

_ROUNDS = 3
_ITERATION_SECONDS = 0.2
_OVERHEAD_MAX = 0.05
_PLAIN_ITERATIONS = 15  # of the training without saves, beside each interval
_LOOKED_SECONDS = 0.01  # longer than a look takes whether the last checkpoint is durable


@dataclass(frozen=True)
class Part:
    """Peers whose buffers fit in memory together.

    Attributes:
        saves: By peer, the number of checkpoints in a run at each interval. A ring of two images absorbs half a dozen
            checkpoints before a slow disk delays the training; 16 suffice to see the delay.
        rounds_end, search_end: Seconds since the experiment's start after which no further round begins, and no further
            interval is measured.
    """

    saves: Mapping[str, Mapping[int, int]]
    rounds_end: float
    search_end: float


_PARTS = (
    Part(
        {
            "holdfast": {2: 16, 3: 10, 5: 6, 10: 4},
            "torch.save+fsync": {10: 2},
            "dcp-thread": {10: 3},
            "checkfreq": {10: 3},
            "pccheck-like": {10: 4},
        },
        rounds_end=300.0,
        search_end=470.0,
    ),
    Part({"mlc-base": {10: 2}, "torchsnapshot": {10: 2}}, rounds_end=540.0, search_end=560.0),
)
# Checkpoints in a run of the search, by interval.
_SEARCHED = {2: 8, 3: 8, 5: 6, 15: 3, 20: 3, 40: 2, 80: 2}
# A save in the training thread costs the same at any interval, so measure the longest.
_SYNCHRONOUS = {"torch.save+fsync": {80: 1}}


def measure(options: Options) -> dict[str, Any]:
    begun = time.monotonic()
    shape = options.shape("gpt2")
    seconds = _ITERATION_SECONDS / options.count(1, 20)
    runs: list[dict[str, Any]] = []
    saves: list[dict[str, Any]] = []
    with options.running(shape, fresh=True) as cluster:
        cluster.ask(do="memory")  # returns once the ranks have built model and optimizer
        start_seconds = time.monotonic() - begun
        cluster.prepare("holdfast")
        restores = [_restored(cluster) for _ in range(options.rounds_of(_ROUNDS))]
        for part in _PARTS:
            peers = available(tuple(part.saves))
            for peer in peers:
                cluster.prepare(peer)
            series = Series(cluster, seconds, lambda: time.monotonic() - begun)
            series.take_rounds({peer: part.saves[peer] for peer in peers}, options.rounds_of(_ROUNDS), part)
            series.search(peers, part)
            runs += series.runs
            saves += series.saves
            for peer in peers:
                if peer != "holdfast":
                    cluster.drop(peer)
        image_bytes = cluster.manifests[-1].image_bytes
    return document(
        "makespan",
        options,
        shape,
        iteration_seconds=seconds,
        start_seconds=start_seconds,
        image_bytes=image_bytes,
        runs=runs,
        saves=saves,
        restores=restores,
    )


def _restored(cluster: Cluster) -> dict[str, float]:
    """Return restore seconds from a cold page cache by way; with the runs they make a profile for the simulator."""
    path = cluster.path(cluster.manifests[-1].step)
    found = {}
    for how in ("holdfast", "torch.load"):
        cluster.progress(f"restore by {how}")
        forget(path, path.with_name(manifest_name(path.name)))
        found[how] = cluster.restore(how, str(path), compare=False)["seconds"]
    return found


class Series:
    """The runs of one part, in `runs`, and one separate checkpoint of each peer and round, in `saves`.

    Args:
        seconds: Length of an iteration.
        elapsed: Returns the seconds since the experiment's start.
    """

    def __init__(self, cluster: Cluster, seconds: float, elapsed: Callable[[], float]) -> None:
        self.runs: list[dict[str, Any]] = []
        self.saves: list[dict[str, Any]] = []
        self._cluster, self._seconds, self._elapsed = cluster, seconds, elapsed

    def take_rounds(self, saves: Mapping[str, Mapping[int, int]], rounds: int, part: Part) -> None:
        """Run every peer at each of its intervals, for at least one round."""
        slowest = 0.0
        for number in range(rounds):
            before = self._elapsed()
            if number and before + slowest > part.rounds_end:
                break
            self._cluster.progress(f"round {number + 1} of {rounds}: a checkpoint of each")
            for peer in () if number else saves:  # the first save after a restore maps its memory again
                self._cluster.save(peer, compute_seconds=self._seconds)
            for peer in turn(tuple(saves), number):
                figures = self._cluster.save(peer, compute_seconds=self._seconds)
                self.saves.append({"peer": peer, "round": number, **figures})
            for every in sorted({every for of in saves.values() for every in of}):
                chosen = {peer: (every, of[every]) for peer, of in saves.items() if every in of}
                self._take(number, f"round {number + 1} of {rounds}: every {every}", every, chosen)
            slowest = max(slowest, self._elapsed() - before)

    def search(self, peers: Sequence[str], part: Part) -> None:
        """Measure each peer at further intervals until its shortest one is known or time runs out."""
        rounds = rounds_in(self.runs)
        while True:
            wanted = {}
            for peer in peers:
                saves = _SYNCHRONOUS.get(peer, _SEARCHED)
                every = next_interval(_medians(self.runs, peer), _OVERHEAD_MAX, tuple(saves))
                if every is not None:
                    wanted[peer] = (every, saves[every])
            takes = {peer: rounds * self._takes(peer, *wanted[peer]) for peer in wanted}
            for peer in sorted(takes, key=takes.__getitem__, reverse=True):
                if self._elapsed() + sum(takes[one] for one in wanted) > part.search_end:
                    del wanted[peer]
            if not wanted:
                return
            for number in range(rounds):
                at = ", ".join(f"{peer} every {every}" for peer, (every, _) in wanted.items())
                self._take(number, f"search, round {number + 1} of {rounds}: {at}", 0, wanted)

    def _take(self, number: int, what: str, every: int, chosen: Mapping[str, tuple[int, int]]) -> None:
        """Run each peer with its (interval, checkpoints), and once without saves; `every` 0 marks the search."""
        self._cluster.progress(what)
        for peer in turn(("none", *chosen), number):
            step, saves = chosen.get(peer, (every, 0))
            iterations = step * saves or _PLAIN_ITERATIONS
            row = _run(self._cluster, peer, step, iterations, compute="device", seconds=self._seconds)
            for save in self.saves:
                if (save["peer"], save["round"]) == (peer, number):
                    row["alone_seconds"] = save["done_seconds"]
            self.runs.append({**row, "round": number, **({} if every else {"searched": True})})

    def _takes(self, peer: str, every: int, saves: int) -> float:
        """Return the most seconds of one run: a checkpoint's cost does not grow with the interval."""
        measured = _medians(self.runs, peer)
        costs = max([0.0, *(overhead * at * self._seconds for at, overhead in measured.items())])
        return saves * (every * self._seconds + costs)


def rounds_of_runs(
    cluster: Cluster,
    peers: tuple[str, ...],
    saves: dict[int, int],
    *,
    rounds: int,
    compute: str,
    seconds: float,
) -> list[dict[str, Any]]:
    """Run every peer at every interval, `rounds` times in rotating order; return one row for each run."""
    rows = []
    for number in range(rounds):
        for every, count in saves.items():
            cluster.progress(f"round {number + 1} of {rounds}: every {every} iterations")
            for peer in turn(peers, number):
                row = _run(cluster, peer, every, every * count, compute=compute, seconds=seconds)
                rows.append({**row, "round": number})
    return rows


def _run(
    cluster: Cluster, peer: str, every: int, iterations: int, *, compute: str, seconds: float
) -> dict[str, Any]:
    """Make one row; in a run without saves, `every` names the runs that it is the baseline of."""
    run = cluster.train(
        peer, iterations=iterations, every=every or iterations, compute=compute, compute_seconds=seconds
    )
    del run["iteration_seconds"]
    return {"peer": peer, "every": every, "iterations": iterations, **run}


def rounds_in(runs: list[dict[str, Any]]) -> int:
    """Return the number of rounds."""
    return len({run["round"] for run in runs})


def cell(runs: list[dict[str, Any]], peer: str, every: int, name: str = "makespan_seconds") -> list[float]:
    """Return one figure by round."""
    return [run[name] for run in runs if run["peer"] == peer and run["every"] == every]


def overheads(runs: list[dict[str, Any]], peer: str, every: int) -> Spread | None:
    """Return the overhead of an iteration over the same round's baseline without checkpoints; 0.05 is 5 %."""
    theirs = [run for run in runs if run["peer"] == peer and run["every"] == every]
    if not theirs:
        return None
    plain = [_beside(runs, run) for run in theirs]
    value = ratios([_lasting(run, alone) for run, alone in zip(theirs, plain, strict=True)], plain)
    return Spread(value.median - 1, value.least - 1, value.greatest - 1)


def _lasting(run: dict[str, Any], plain: float) -> float:
    """Return the seconds of an iteration in a long training like this run; `plain`: without checkpoints.

    Ring and buffers hide the first checkpoints of a run from the training. If the last checkpoint was not durable when
    the next one would have begun, a long training is only as fast as checkpoints become durable. Rows without
    `alone_seconds` only cover the whole run.
    """
    trained = run["makespan_seconds"] / run["iterations"]
    late = run["durable_seconds"] - run["makespan_seconds"] > _LOOKED_SECONDS
    if late and run["saves"] > 1 and "alone_seconds" in run:
        durable = (run["durable_seconds"] - plain - run["alone_seconds"]) / (run["saves"] - 1)
        trained = max(trained, durable / run["every"])
    return float(trained)


def _beside(runs: list[dict[str, Any]], run: dict[str, Any], name: str = "makespan_seconds") -> float:
    """Return a figure of one iteration without saves from the same round, of the nearest interval or the search."""
    place = runs.index(run)
    candidates = [
        (
            other.get("searched") != run.get("searched"),
            other["every"] != run["every"],
            abs(runs.index(other) - place),
            other[name] / other["iterations"],
        )
        for other in runs
        if other["peer"] == "none" and other["round"] == run["round"]
    ]
    return float(min(candidates)[-1])


def common(runs: list[dict[str, Any]]) -> int:
    """Return the longest interval at which every peer was measured."""
    measured: dict[str, set[int]] = {}
    for run in runs:
        if run["peer"] != "none":
            measured.setdefault(run["peer"], set()).add(run["every"])
    return max(set.intersection(*measured.values()))


def shortest(runs: list[dict[str, Any]], peer: str, overhead_max: float = _OVERHEAD_MAX) -> ShortestInterval:
    """Return the shortest interval at which a peer's median overhead is at most `overhead_max`."""
    return shortest_interval(_medians(runs, peer), overhead_max)


def _medians(runs: list[dict[str, Any]], peer: str) -> dict[int, float]:
    """Return the median overhead by interval."""
    found = {every: overheads(runs, peer, every) for every in {run["every"] for run in runs}}
    return {every: overhead.median for every, overhead in found.items() if overhead is not None}


def grids(document: dict[str, Any]) -> list[Grid]:
    runs = document["runs"]
    peers = [peer for peer in dict.fromkeys(run["peer"] for run in runs) if peer != "none"]
    intervals = sorted({run["every"] for run in runs if run["peer"] != "none"})
    rows: list[tuple[str, ...]] = []
    for peer in peers:
        cells = [overheads(runs, peer, every) for every in intervals]
        rows.append((peer, *(of.text(1, times=100) if of else "" for of in cells)))
    seconds = document["iteration_seconds"]
    title = (
        f"Overhead in percent of a training without checkpoints, iteration {seconds * 1000:.0f} ms, "
        f"{rounds_in(runs)} rounds"
    )
    saved = ("checkpoints in a run of holdfast", *(_saves(runs, "holdfast", every) for every in intervals))
    names = ("peer", *(f"every {every}" for every in intervals))
    result = [Grid(title, names, (*rows, saved))]
    table = [("no checkpoints", "", _percent(utilisation(runs, "none", None, seconds)))]
    for peer in peers:
        found = shortest(runs, peer)
        share = utilisation(runs, peer, found.within or found.beyond, seconds)
        table.append((peer, found.text(), _percent(share)))
    names = ("peer", "iterations", "computing there, %")
    title = "Shortest interval with at most 5 % overhead, and the time in which a device would compute"
    result.append(Grid(title, names, tuple(table)))
    cost = tuple((peer, f"{seconds:.2f}") for peer, seconds in cpu_seconds(runs).items())
    result.append(Grid("CPU seconds that one checkpoint costs, all processes", ("peer", "CPU s"), cost))
    return [*result, _recovery(document)] if "restores" in document else result


def _percent(value: Spread) -> str:
    return value.text(1, times=100)


@dataclass(frozen=True)
class Recovery:
    """Average cost of a kill in seconds, with a checkpoint every `every` iterations.

    Attributes:
        again: Redone work: half an interval, plus one checkpoint until it is safe.
    """

    every: int
    restart: float
    restore: float
    again: float

    @property
    def total(self) -> float:
        return self.restart + self.restore + self.again


def recoveries(document: Mapping[str, Any]) -> dict[str, Recovery]:
    """Return the recovery of each peer at its own shortest interval; a peer without one has no entry."""
    found = {}
    for peer in dict.fromkeys(run["peer"] for run in document["runs"] if run["peer"] != "none"):
        every = shortest(document["runs"], peer).within
        if every is None:
            continue
        way = "holdfast" if peer == "holdfast" else "torch.load"
        restore = spread([of[way] for of in document["restores"]]).median
        safe = safe_seconds(document["saves"], peer).median
        again = every * document["iteration_seconds"] / 2 + safe
        found[peer] = Recovery(every, document["start_seconds"], restore, again)
    return found


def safe_seconds(saves: Sequence[Mapping[str, Any]], peer: str) -> Spread:
    """Return the seconds until one checkpoint of a peer survives the loss of the training's machines."""
    theirs = [of for of in saves if of["peer"] == peer]
    return spread([of.get("staged_seconds", of["done_seconds"]) for of in theirs])


def utilisation(runs: list[dict[str, Any]], peer: str, every: int | None, seconds: float) -> Spread:
    """Return the share of the time in which a device would compute: a timed wait of `seconds` per iteration.

    With `every` None, over all runs of the peer.
    """
    theirs = [run for run in runs if run["peer"] == peer and every in (None, run["every"])]
    return spread([seconds / _lasting(run, _beside(runs, run)) for run in theirs])


def _recovery(document: dict[str, Any]) -> Grid:
    rows = tuple(
        (peer, str(of.every), *(f"{value:.2f}" for value in (of.restart, of.restore, of.again, of.total)))
        for peer, of in recoveries(document).items()
    )
    names = ("peer", "every", "restart", "restore, cold disk", "work done again", "sum")
    title = "A kill costs on average, seconds: computed from this run, each at its shortest interval"
    return Grid(title, names, rows)


def cpu_seconds(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median CPU seconds that a checkpoint adds, by peer, at the longest common interval."""
    found = {}
    for peer in dict.fromkeys(run["peer"] for run in runs if run["peer"] != "none"):
        theirs = [run for run in runs if run["peer"] == peer and run["every"] == common(runs)]
        each = [
            (run["cpu_seconds"] - _beside(runs, run, "cpu_seconds") * run["iterations"]) / run["saves"]
            for run in theirs
        ]
        found[peer] = spread(each).median
    return found


def _saves(runs: list[dict[str, Any]], peer: str, every: int) -> str:
    """Return the number of checkpoints in a run at that interval."""
    return next((str(run["saves"]) for run in runs if run["peer"] == peer and run["every"] == every), "")
