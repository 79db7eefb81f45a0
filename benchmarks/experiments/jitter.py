"""Iterations of a plain-Python training loop with and without checkpoints, to show who holds the
interpreter's lock."""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import turn
from benchmarks.experiments import Options, available, document
from benchmarks.grid import Grid
from benchmarks.spread import percentile

__all__ = ["grids", "measure"]

_ROUNDS = 2
_ITERATIONS = 120
_EVERY = 30
_ITERATION_SECONDS = 0.02
_PEERS = ("none", "holdfast", "dcp-thread", "checkfreq")
_PERCENTS = (50.0, 95.0, 99.0)


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("resnet152")
    seconds: dict[str, list[float]] = {}
    peers = available(_PEERS)
    with options.running(shape) as cluster:
        for peer in peers[1:]:
            cluster.prepare(peer)
        for number in range(options.rounds_of(_ROUNDS)):
            for peer in turn(peers, number):
                options.progress(f"round {number + 1}: {peer}")
                run = cluster.train(
                    peer,
                    iterations=options.count(_ITERATIONS, 60),
                    every=_EVERY,
                    compute="python",
                    compute_seconds=_ITERATION_SECONDS / options.count(1, 4),
                )
                seconds.setdefault(peer, []).extend(run["iteration_seconds"][1:])
    return document("jitter", options, shape, iteration_seconds=seconds, every=_EVERY)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for peer, values in document["iteration_seconds"].items():
        cells = [f"{1000 * percentile(values, percent):.1f}" for percent in _PERCENTS]
        rows.append((peer, str(len(values)), *cells, f"{1000 * max(values):.1f}"))
    title = f"Milliseconds of an iteration of plain Python, a checkpoint every {document['every']} iterations"
    return [Grid(title, ("peer", "iterations", "p50", "p95", "p99", "slowest"), tuple(rows))]
