"""Slowdown by number of checkpoints in flight and by interval (PCcheck fig. 12)."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.experiments.makespan import overheads, rounds_in, rounds_of_runs
from benchmarks.grid import Grid

__all__ = ["grids", "measure"]

_ROUNDS = 2
_ITERATION_SECONDS = 0.1
_IN_FLIGHT = (1, 2)
_SAVES = {1: 6, 2: 4, 5: 2}


def measure(options: Options) -> dict[str, Any]:
    seconds = _ITERATION_SECONDS / options.count(1, 10)
    runs: list[dict[str, Any]] = []
    for in_flight in _IN_FLIGHT[: options.count(len(_IN_FLIGHT), 1)]:
        shape = options.shape("resnet152", environment={"HOLDFAST_IN_FLIGHT_MAX": str(in_flight)})
        with options.running(shape) as cluster:
            cluster.prepare("holdfast")
            image_bytes = cluster.manifests[-1].image_bytes
            rows = rounds_of_runs(
                cluster,
                ("none", "holdfast"),
                _SAVES,
                rounds=options.rounds_of(_ROUNDS),
                compute="device",
                seconds=seconds,
            )
            runs += [{"in_flight": in_flight, **row} for row in rows]
    return document("flights", options, shape, iteration_seconds=seconds, image_bytes=image_bytes, runs=runs)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for in_flight in sorted({run["in_flight"] for run in document["runs"]}):
        runs = [run for run in document["runs"] if run["in_flight"] == in_flight]
        cells = [overheads(runs, "holdfast", every) for every in _SAVES]
        rows.append((str(in_flight), *(of.text(1, times=100) if of else "" for of in cells)))
    title = (
        f"Overhead in percent, {document['image_bytes'] / 1e9:.2f} GB, "
        f"iteration {document['iteration_seconds'] * 1000:.0f} ms, {rounds_in(document['runs'])} rounds"
    )
    return [Grid(title, ("in flight (N)", *(f"every {every}" for every in _SAVES)), tuple(rows))]
