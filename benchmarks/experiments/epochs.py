"""A checkpoint once an epoch, as trainings often do, beside one every few iterations.

Compared with ACUTE's makespan delay of "nearly zero" (fig. 7), and CheckFreq's recovery within seconds where an epoch
took hours, with an overhead of at most 3.5 % (FAST 2021, abstract). An epoch is `EPOCH` iterations of a timed wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.experiments.makespan import Part, Series, overheads, rounds_in, safe_seconds
from benchmarks.grid import Grid
from benchmarks.spread import Spread

__all__ = ["EPOCH", "OFTEN", "grids", "lost_seconds", "measure"]

EPOCH, OFTEN = 100, 5  # iterations between two checkpoints
_ROUNDS = 3
_ITERATION_SECONDS = 0.1
_MODEL = "resnet50"
_TWO_EPOCHS = {EPOCH: 2}
_OFTEN_TOO = {OFTEN: 40, **_TWO_EPOCHS}
_PART = Part(
    {
        "holdfast": _OFTEN_TOO,
        "pccheck-like": _OFTEN_TOO,
        "torch.save+fsync": _TWO_EPOCHS,
        "mlc-base": _TWO_EPOCHS,
    },
    rounds_end=540.0,
    search_end=0.0,
)


def measure(options: Options) -> dict[str, Any]:
    begun = time.monotonic()
    shape = options.shape(_MODEL)
    seconds = _ITERATION_SECONDS / options.count(1, 20)
    with options.running(shape) as cluster:
        for peer in _PART.saves:
            cluster.prepare(peer)
        image_bytes = cluster.manifests[-1].image_bytes
        series = Series(cluster, seconds, lambda: time.monotonic() - begun)
        series.take_rounds(_PART.saves, options.rounds_of(_ROUNDS), _PART)
    return document(
        "epochs",
        options,
        shape,
        iteration_seconds=seconds,
        image_bytes=image_bytes,
        runs=series.runs,
        saves=series.saves,
    )


def lost_seconds(document: Mapping[str, Any], peer: str, every: int) -> Spread:
    """Return the seconds of work lost to a kill on average: half an interval, plus one checkpoint until it is safe."""
    safe, half = safe_seconds(document["saves"], peer), every * document["iteration_seconds"] / 2
    return Spread(half + safe.median, half + safe.least, half + safe.greatest)


def grids(document: dict[str, Any]) -> list[Grid]:
    runs, rows = document["runs"], []
    for every, often in ((EPOCH, "once an epoch"), (OFTEN, f"every {OFTEN}")):
        for peer in dict.fromkeys(run["peer"] for run in runs if run["peer"] != "none"):
            overhead = overheads(runs, peer, every)
            if overhead is not None:
                lost = lost_seconds(document, peer, every)
                rows.append((f"{peer}, {often}", overhead.text(1, times=100), lost.text(2)))
    title = (
        f"{document['image_bytes'] / 1e9:.2f} GB, an epoch of {EPOCH} iterations of "
        f"{1000 * document['iteration_seconds']:.0f} ms, {rounds_in(runs)} rounds"
    )
    return [Grid(title, ("checkpoints", "overhead %", "lost at a kill, s, computed"), tuple(rows))]
