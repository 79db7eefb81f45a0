"""Resident bytes of ranks, stager and flusher over 200 checkpoints, to find leaks."""

from __future__ import annotations

from typing import Any

import psutil

from benchmarks.experiments import Options, document
from benchmarks.grid import Grid

__all__ = ["grids", "measure"]

_SAVES = 200
_SAMPLES = 10
_ITERATION_SECONDS = 0.02
_CHUNK_BYTES = 1 << 20
_RING_BYTES = 64 << 20


def measure(options: Options) -> dict[str, Any]:
    # Small enough for 20 durable checkpoints a second; a leak per checkpoint shows with a small one, too.
    shape = options.shape("flat-200-24", chunk_bytes=_CHUNK_BYTES, ring_bytes=_RING_BYTES)
    saves = options.count(_SAVES, 20)
    rows: list[dict[str, Any]] = []
    with options.running(shape) as cluster:
        cluster.prepare("holdfast")
        pids = cluster.pids()
        for sample in range(_SAMPLES + 1):
            rss = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
            rows.append({"saves": sample * saves // _SAMPLES, **rss})
            if sample < _SAMPLES:
                options.progress(f"{rows[-1]['saves']} of {saves} checkpoints")
                cluster.train(
                    "holdfast", iterations=saves // _SAMPLES, every=1, compute_seconds=_ITERATION_SECONDS
                )
        image_bytes = cluster.manifests[-1].image_bytes
    return document("steady", options, shape, image_bytes=image_bytes, samples=rows)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = tuple(
        (str(of["saves"]), *(f"{of[name] / 1e6:.1f}" for name in ("trainer", "stager", "flusher")))
        for of in document["samples"]
    )
    title = (
        f"Resident MB (the ring counts in stager and flusher), image {document['image_bytes'] / 1e6:.0f} MB"
    )
    return [Grid(title, ("checkpoints", "rank 0", "stager", "flusher"), rows)]
