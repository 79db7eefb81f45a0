"""Ten models by their shapes (ACUTE table 2, figs. 8 to 10; PCcheck fig. 11): stall, staged, durable, phases of each.

Compared with ACUTE's 43.3 % until durable against the multi-level baseline, and with PCcheck's time by size. Shapes and
moments are those of the models; nothing computes with them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.cluster import turn
from benchmarks.experiments import Options, document
from benchmarks.experiments.table import phases_of, ratio
from benchmarks.grid import Grid
from benchmarks.model_shapes import SHAPED_MODELS, parameters_of
from benchmarks.spread import Spread, columns, spread

__all__ = ["grids", "measure", "times_faster"]

_ROUNDS = 3
# Since the experiment's start; a slow machine leaves out the largest models.
_LAST_MODEL_SECONDS = 450.0
_LAST_ROUND_SECONDS = 560.0
_PEERS = ("holdfast", "torch.save+fsync", "pccheck-like", "mlc-base")
# mlc-base takes half a minute to warm up with a large model; `table` measures it with GPT-2.
_WITHOUT_MLC_BASE = ("vgg16", "bert-base", "gpt2")
_LARGEST = "bert-large"  # leaves no memory for the buffers of several peers
_FIGURES = {
    "stall_seconds": "stall (CST)",
    "staged_seconds": "staged (PGT-1)",
    "done_seconds": "durable (PGT-2)",
}
_PHASES = (
    "copy_seconds",
    "sending_seconds",
    "receive_seconds",
    "write_seconds",
    "publish_seconds",
    "verify_seconds",
)


def measure(options: Options) -> dict[str, Any]:
    begun = time.monotonic()
    models: dict[str, Any] = {}
    wanted = list(SHAPED_MODELS)[: options.count(len(SHAPED_MODELS), 2)]
    for model in wanted:
        if time.monotonic() - begun > _LAST_MODEL_SECONDS:
            break
        shape = options.shape(f"shapes-{model}")
        peers = _PEERS[:2] if model == _LARGEST else _PEERS[:3] if model in _WITHOUT_MLC_BASE else _PEERS
        with options.running(shape, fresh=True) as cluster:
            for peer in peers:
                cluster.prepare(peer)
            before, rounds = len(cluster.manifests), []
            for number in range(options.rounds_of(_ROUNDS)):
                if number and time.monotonic() - begun > _LAST_ROUND_SECONDS:
                    break
                options.progress(f"{model}, round {number + 1}")
                rounds.append({peer: cluster.save(peer) for peer in turn(peers, number)})
            models[model] = {
                "image_bytes": cluster.manifests[-1].image_bytes,
                "parameters": parameters_of(model),
                "rounds": rounds,
                "phases": phases_of(cluster.manifests[before:]),
            }
    return document("models", options, shape, models=models, left_out=wanted[len(models) :])


def times_faster(document: Mapping[str, Any], peer: str, figure: str = "done_seconds") -> dict[str, Spread]:
    """Return a peer's time as a ratio to holdfast's, by model; unmeasured models are left out."""
    found = {
        model: ratio(of["rounds"], (peer, figure), ("holdfast", figure))
        for model, of in document["models"].items()
    }
    return {model: value for model, value in found.items() if value is not None}


def grids(document: dict[str, Any]) -> list[Grid]:
    models = document["models"]
    named = {
        model: f"{model}, {of['parameters'] / 1e6:.1f} M, {of['image_bytes'] / 1e9:.2f} GB"
        for model, of in models.items()
    }
    ours = tuple(
        (
            named[model],
            *(spread(columns(of["rounds"], "holdfast", figure)).text(3) for figure in _FIGURES),
        )
        for model, of in models.items()
    )
    least, most = (of(len(of_model["rounds"]) for of_model in models.values()) for of in (min, max))
    count = f"{least}" if least == most else f"{least} to {most}"
    title = f"holdfast, seconds of one checkpoint: median (least–greatest) of {count} rounds"
    if document["left_out"]:
        title += f"; no time was left for {', '.join(document['left_out'])}"
    result = [Grid(title, ("model, parameters, image", *_FIGURES.values()), ours)]
    compared = [
        times_faster(document, peer, figure)
        for figure in ("stall_seconds", "done_seconds")
        for peer in _PEERS[1:]
    ]
    theirs = tuple(
        (model, *(of[model].text(1) if model in of else "" for of in compared)) for model in models
    )
    names = (*(f"stall, {peer}" for peer in _PEERS[1:]), *(f"durable, {peer}" for peer in _PEERS[1:]))
    result.append(
        Grid("How many times as long as holdfast's, each made within one round", ("model", *names), theirs)
    )
    phases = tuple(
        (
            model,
            *(Spread(**of["phases"][phase]).text(3) if phase in of["phases"] else "" for phase in _PHASES),
        )
        for model, of in models.items()
    )
    columns_ = ("model", *(phase.removesuffix("_seconds") for phase in _PHASES))
    result.append(Grid("holdfast's phases, seconds of the slowest rank; they overlap", columns_, phases))
    return result
