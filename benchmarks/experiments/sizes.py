"""Time of one checkpoint by its size (PCcheck fig. 11): the four models, one after the other."""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import turn
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import columns, ratios, spread

__all__ = ["grids", "measure"]

_ROUNDS = 2
_MODELS = ("gpt2", "bert-large", "resnet50")
_PEERS = ("holdfast", "torch.save+fsync")


def measure(options: Options) -> dict[str, Any]:
    rounds: dict[str, Any] = {}
    images: dict[str, int] = {}
    for model in _MODELS[: options.count(len(_MODELS), 1)]:
        shape = options.shape(model)
        with options.running(shape) as cluster:
            for peer in _PEERS:
                cluster.prepare(peer)
            images[model] = cluster.manifests[-1].image_bytes
            rounds[model] = [
                {peer: cluster.save(peer) for peer in turn(_PEERS, number)}
                for number in range(options.rounds_of(_ROUNDS))
            ]
    order = sorted(images, key=lambda model: images[model])
    images, rounds = {model: images[model] for model in order}, {model: rounds[model] for model in order}
    return document("sizes", options, shape, image_bytes=images, rounds=rounds)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for model, rounds in document["rounds"].items():
        image_bytes = document["image_bytes"][model]
        done = {peer: columns(rounds, peer, "done_seconds") for peer in _PEERS}
        rows.append(
            (
                f"{model}, {image_bytes / 1e9:.2f} GB",
                spread(columns(rounds, "holdfast", "stall_seconds")).text(3),
                spread(columns(rounds, "holdfast", "staged_seconds")).text(3),
                spread(done["holdfast"]).text(3),
                spread(done["torch.save+fsync"]).text(3),
                ratios(done["torch.save+fsync"], done["holdfast"]).text(2),
            )
        )
    names = ("model", "stall (CST)", "staged (PGT-1)", "durable (PGT-2)", "torch.save+fsync", "times as long")
    return [Grid("Seconds of one checkpoint, median (least–greatest)", names, tuple(rows))]
