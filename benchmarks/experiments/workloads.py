"""Makespan of models other than GPT-2 (ACUTE fig. 7); ResNet-50 saves in every iteration, which the disk can sustain,
beside all of PCcheck's baselines (PCcheck fig. 8)."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.experiments.makespan import overheads, rounds_in, rounds_of_runs
from benchmarks.grid import Grid

__all__ = ["grids", "measure"]

_ROUNDS = 3
_ITERATION_SECONDS = 0.2
# By model: checkpoints in a run by interval, and peers. BERT-large leaves no memory for two more copies of itself.
_PEERS = ("torch.save+fsync", "checkfreq", "pccheck-like")
_MODELS = {
    "resnet50": ({1: 12, 2: 6, 10: 2}, (*_PEERS, "gpm-like", "gemini-like")),
    "resnet152": ({1: 6, 10: 2}, _PEERS),
    "bert-large": ({10: 2}, _PEERS[:2]),
}


def measure(options: Options) -> dict[str, Any]:
    seconds = _ITERATION_SECONDS / options.count(1, 20)
    runs: list[dict[str, Any]] = []
    images: dict[str, int] = {}
    for model, (saves, peers) in list(_MODELS.items())[: options.count(len(_MODELS), 1)]:
        shape = options.shape(model)
        with options.running(shape) as cluster:
            cluster.prepare("holdfast")
            images[model] = cluster.manifests[-1].image_bytes
            for peer in peers:
                cluster.prepare(peer)
            rows = rounds_of_runs(
                cluster,
                ("none", "holdfast", *peers),
                saves,
                rounds=options.rounds_of(_ROUNDS),
                compute="device",
                seconds=seconds,
            )
            runs += [{"model": model, **row} for row in rows]
    return document("workloads", options, shape, iteration_seconds=seconds, image_bytes=images, runs=runs)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    intervals = sorted({run["every"] for run in document["runs"]})
    for model, image_bytes in document["image_bytes"].items():
        runs = [run for run in document["runs"] if run["model"] == model]
        for peer in dict.fromkeys(run["peer"] for run in runs if run["peer"] != "none"):
            cells = [overheads(runs, peer, every) for every in intervals]
            name = f"{model}, {image_bytes / 1e9:.2f} GB: {peer}"
            rows.append((name, *(of.text(1, times=100) if of else "" for of in cells)))
    title = (
        f"Overhead in percent of a training without checkpoints, "
        f"iteration {document['iteration_seconds'] * 1000:.0f} ms, {rounds_in(document['runs'])} rounds"
    )
    return [Grid(title, ("model and peer", *(f"every {every}" for every in intervals)), tuple(rows))]
