"""CheckFreq's interference (FAST 2021): a training alone, then beside a job that takes two thirds of the store's
bandwidth, with the interval chosen before, and with one that adapts.

    alone: auto ─► K      beside the other job: every K (static), auto (adaptive)

Compared with CheckFreq's claim that the adaptive interval costs less. The store decides the interval here: alone, a
write takes as long as `_WRITE_ITERATIONS` iterations, and the ring holds little more than one image. The computation is
a timed wait, which the other job leaves alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.pacing import AUTO, NEVER
from benchmarks.slow_store import slow_store
from benchmarks.spread import Spread, ratios, spread

__all__ = ["ADAPTIVE", "ALONE", "STATIC", "grids", "measure", "overheads"]

_ROUNDS = 3
_MODEL, _IMAGE_BYTES, _RING_BYTES = "resnet50", 205_000_000, 256 << 20
_TOY_IMAGE_BYTES = 3 << 20
_ITERATION_SECONDS = 0.05
_WRITE_ITERATIONS = 20
_LEFT = 1 / 3
_OVERHEAD_MAX = 0.035  # CheckFreq's
# CheckFreq saves as often as the bound allows. With rare failures holdfast would save less often: its loss is smaller.
_MTBF_HOURS = 0.01
_TOY_OVERHEAD_MAX = 0.3  # tolerates other load on the machine
_PLAIN, ALONE, STATIC, ADAPTIVE = "nothing saved", "alone", "static", "adaptive"
# Iterations of each run. The first checkpoint of a job takes longest: the run alone goes on until its interval is
# shorter again. An adaptive run has to reach its new interval.
_ITERATIONS = {ALONE: 640, _PLAIN: 100, STATIC: 120, ADAPTIVE: 480}
_STATIC_CHECKPOINTS = 3  # at least, however long the interval


def measure(options: Options) -> dict[str, Any]:
    rate = options.count(_IMAGE_BYTES, _TOY_IMAGE_BYTES) / (_WRITE_ITERATIONS * _ITERATION_SECONDS)
    most = _TOY_OVERHEAD_MAX if options.quick else _OVERHEAD_MAX
    settings = {
        "HOLDFAST_EVERY": "auto",
        "HOLDFAST_OVERHEAD_MAX": str(most),
        "HOLDFAST_MTBF_HOURS": str(_MTBF_HOURS),
    }
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds_of(_ROUNDS)):
        # A new job each time, so that its interval does not start from the previous round's.
        with slow_store(options.folder, rate) as slow:
            shape = options.shape(_MODEL, ring_bytes=_RING_BYTES, **slow.shape(**settings))
            with options.running(shape) as cluster:
                cluster.prepare("holdfast")
                chosen = 0
                for name in (ALONE, _PLAIN, ADAPTIVE, STATIC):
                    options.progress(f"round {number + 1}: {name}")
                    every = {_PLAIN: NEVER, STATIC: chosen}.get(name, AUTO)
                    with slow.shared(_LEFT) if name in {STATIC, ADAPTIVE} else nullcontext():
                        run = _run(cluster, options, name, every)
                    runs.append({"name": name, "round": number, **run})
                    if name == ALONE:
                        chosen = _interval(run["saved"])
                options.clusters.close()  # before its store is removed
    return document(
        "interference",
        options,
        shape,
        iteration_seconds=_ITERATION_SECONDS,
        write_seconds=_WRITE_ITERATIONS * _ITERATION_SECONDS,
        left=_LEFT,
        runs=runs,
    )


def _run(cluster: Cluster, options: Options, name: str, every: int) -> dict[str, Any]:
    iterations = _ITERATIONS[name] // options.count(1, 2)
    if name == STATIC:
        iterations = max(iterations, _STATIC_CHECKPOINTS * every)
    run = cluster.pace(iterations=iterations, every=every, compute_seconds=_ITERATION_SECONDS)
    cluster.quiet()
    return run


def _interval(saved: list[int]) -> int:
    """Return the interval that was chosen last.

    Raises:
        RuntimeError: There are fewer than two checkpoints.
    """
    if len(saved) < 2:
        raise RuntimeError(f"an interval needs two checkpoints, got {len(saved)}; train for longer")
    return saved[-1] - saved[-2]


def overheads(document: Mapping[str, Any], name: str) -> Spread:
    """Return the overhead of an iteration over the same round's run without saves; 0.03 is 3 %."""
    taken, plain = (
        [_each(run) for run in document["runs"] if run["name"] == which] for which in (name, _PLAIN)
    )
    value = ratios(taken, plain)
    return Spread(value.median - 1, value.least - 1, value.greatest - 1)


def _each(run: Mapping[str, Any]) -> float:
    """Return the seconds of an iteration, the first left out."""
    seconds = run["iteration_seconds"][1:]
    return float(sum(seconds) / len(seconds))


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for name in dict.fromkeys(run["name"] for run in document["runs"]):
        mine = [run for run in document["runs"] if run["name"] == name]
        saves = any(run["saved"] for run in mine)
        saved = [1000 * len(run["saved"]) / len(run["iteration_seconds"]) for run in mine]
        rows.append(
            (
                name,
                spread([1000 * _each(run) for run in mine]).text(1),
                overheads(document, name).text(1, times=100) if saves else "",
                spread(saved).text(0) if saves else "",
                ", ".join(str(_interval(run["saved"])) for run in mine) if saves else "",
            )
        )
    title = (
        f"Beside a job that leaves {document['left']:.2f} of the store; alone, a write takes "
        f"{document['write_seconds']:.2f} s, iteration {1000 * document['iteration_seconds']:.0f} ms"
    )
    names = (
        "run",
        "ms per iteration",
        "overhead %",
        "checkpoints in 1,000 iterations",
        "interval at the end",
    )
    return [Grid(title, names, tuple(rows))]
