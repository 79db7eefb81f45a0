"""Real forward, backward and update on both cores: the cost of a checkpoint when the training needs the whole CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.experiments.makespan import cell, overheads, rounds_in, rounds_of_runs
from benchmarks.grid import Grid
from benchmarks.spread import spread

__all__ = ["grids", "measure"]

_ROUNDS = 2
_SAVES = {2: 1, 6: 1}
_PEERS = ("torch.save+fsync",)


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2")
    with options.running(shape) as cluster:
        cluster.prepare("holdfast")
        for peer in _PEERS:
            cluster.prepare(peer)
        cluster.train("none", iterations=2, every=1, compute="cpu")  # allocates gradients and activations
        runs = rounds_of_runs(
            cluster,
            ("none", "holdfast", *_PEERS),
            _SAVES,
            rounds=options.rounds_of(_ROUNDS),
            compute="cpu",
            seconds=0.0,
        )
    return document("cpu", options, shape, runs=runs)


def grids(document: dict[str, Any]) -> list[Grid]:
    runs = document["runs"]
    rows = []
    for peer in ("holdfast", *_PEERS):
        row = [peer]
        for every, saves in _SAVES.items():
            overhead = overheads(runs, peer, every)
            assert overhead is not None
            extra = [
                (with_ - without) / saves
                for with_, without in zip(
                    cell(runs, peer, every, "cpu_seconds"),
                    cell(runs, "none", every, "cpu_seconds"),
                    strict=True,
                )
            ]
            row += [overhead.text(1, times=100), spread(extra).text(2)]
        rows.append(tuple(row))
    plain = spread([run["makespan_seconds"] / run["iterations"] for run in runs if run["peer"] == "none"])
    columns = [name for every in _SAVES for name in (f"every {every}: overhead, %", "CPU s per checkpoint")]
    title = f"Training on both cores, iteration {plain.text(2)} s, {rounds_in(runs)} rounds"
    return [Grid(title, ("peer", *columns), tuple(rows))]
