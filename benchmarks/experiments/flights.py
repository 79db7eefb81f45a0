"""Slowdown by number of checkpoints in flight and by interval (PCcheck fig. 12), with a slow store.

The store's bandwidth makes a write last four, two and less than one of the intervals. N counts the checkpoints that are
not staged yet; the ring holds those that are staged but not durable.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.experiments.makespan import Part, Series, overheads, rounds_in
from benchmarks.grid import Grid
from benchmarks.slow_store import slow_store

__all__ = ["grids", "measure"]

_ROUNDS = 3
_ITERATION_SECONDS = 0.1
_IN_FLIGHT = (1, 2, 3, 4)
_SAVES = {2: 12, 4: 10, 10: 4}  # by interval; a ring of two images swallows the first ones
_WRITE_SECONDS = 0.8
_SECONDS = 540.0  # of all rounds; each N begins no round after its part
_MODEL, _IMAGE_BYTES = "resnet152", 482_000_000
_TOY_IMAGE_BYTES = 3 << 20


def measure(options: Options) -> dict[str, Any]:
    seconds = _ITERATION_SECONDS / options.count(1, 10)
    rate = options.count(_IMAGE_BYTES, _TOY_IMAGE_BYTES) / (_WRITE_SECONDS * seconds / _ITERATION_SECONDS)
    runs: list[dict[str, Any]] = []
    begun = time.monotonic()
    counts = _IN_FLIGHT[: options.count(len(_IN_FLIGHT), 2)]
    for number, in_flight in enumerate(counts, 1):
        with slow_store(options.folder, rate) as slow:
            shape = options.shape(_MODEL, **slow.shape(HOLDFAST_IN_FLIGHT_MAX=str(in_flight)))
            with options.running(shape) as cluster:
                cluster.prepare("holdfast")
                image_bytes = cluster.manifests[-1].image_bytes
                # Warm up: a staging area is allocated and touched at its first use.
                options.progress(f"N = {in_flight}: touching all areas")
                cluster.train("holdfast", iterations=2 * in_flight + 2, every=1, compute_seconds=0.0)
                series = Series(cluster, seconds, lambda: time.monotonic() - begun)
                part = Part({"holdfast": _SAVES}, rounds_end=_SECONDS * number / len(counts), search_end=0.0)
                series.take_rounds(part.saves, options.rounds_of(_ROUNDS), part)
                runs += [{"in_flight": in_flight, **row} for row in series.runs]
                options.clusters.close()  # before its store is removed
    return document(
        "flights",
        options,
        shape,
        iteration_seconds=seconds,
        write_seconds=_WRITE_SECONDS * seconds / _ITERATION_SECONDS,
        image_bytes=image_bytes,
        runs=runs,
    )


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    intervals = sorted({run["every"] for run in document["runs"]})
    for in_flight in sorted({run["in_flight"] for run in document["runs"]}):
        runs = [run for run in document["runs"] if run["in_flight"] == in_flight]
        cells = [overheads(runs, "holdfast", every) for every in intervals]
        rows.append((str(in_flight), *(of.text(1, times=100) if of else "" for of in cells)))
    slow = f", a write of {document['write_seconds']:.2f} s" if "write_seconds" in document else ""
    title = (
        f"Overhead in percent, {document['image_bytes'] / 1e9:.2f} GB{slow}, "
        f"iteration {document['iteration_seconds'] * 1000:.0f} ms, {rounds_in(document['runs'])} rounds"
    )
    return [Grid(title, ("in flight (N)", *(f"every {every}" for every in intervals)), tuple(rows))]
