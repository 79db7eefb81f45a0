"""Growth with the number of ranks and of tensors, at the same small image: counted, not only timed.

The kernel counts, between two checkpoints, write calls (the journal is a file; MPI over shared memory makes none) and
how often a process slept. Frames are computed from the layout: each rank with bytes in a chunk sends one frame for it.
There are far more ranks than cores here, so times say little; counts hold anywhere.
"""

from __future__ import annotations

from typing import Any

import psutil

from benchmarks.cluster import Cluster
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import spread

__all__ = ["grids", "measure"]

_RANKS = (2, 8, 32)
_TENSORS = (100, 10, 10_000)
_SAVES = 4
_IMAGE_MIB = 48
_CHUNK_BYTES = 1 << 20
_RING_BYTES = 64 << 20


def measure(options: Options) -> dict[str, Any]:
    cells = []
    shapes = [(ranks, 100) for ranks in _RANKS[: options.count(3, 1)]]
    shapes += [(2, tensors) for tensors in _TENSORS[: options.count(3, 1)] if tensors != 100]
    for ranks, tensors in shapes:
        shape = options.shape(
            f"flat-{tensors}-{_IMAGE_MIB}", ranks=ranks, chunk_bytes=_CHUNK_BYTES, ring_bytes=_RING_BYTES
        )
        with options.running(shape) as cluster:
            cluster.prepare("holdfast")
            cells.append(_counts(cluster, ranks, tensors))
    return document("scaling", options, shape, cells=cells)


def _counts(cluster: Cluster, ranks: int, tensors: int) -> dict[str, Any]:
    pids = cluster.pids()
    before = {name: _used(pid) for name, pid in pids.items()}
    rounds = [cluster.save("holdfast") for _ in range(_SAVES)]
    after = {name: _used(pid) for name, pid in pids.items()}
    manifest = cluster.manifests[-1]
    sent = [of["sent_bytes"] for of in manifest.record["ranks"].values() if "sent_bytes" in of]
    return {
        "ranks": ranks,
        "tensors": tensors,
        "entries": len(manifest.entries),
        "image_bytes": manifest.image_bytes,
        "chunks": len(manifest.chunk_crc32s),
        "sent_bytes": sum(sent),
        "per_save": {
            name: {what: (after[name][what] - before[name][what]) / _SAVES for what in after[name]}
            for name in pids
        },
        "cpu_seconds": sum(figures["cpu_seconds"] for figures in rounds) / _SAVES,
        "rounds": rounds,
    }


def _used(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    counters = process.io_counters()
    return {"write_calls": counters.write_count, "sleeps": process.num_ctx_switches().voluntary}


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for of in document["cells"]:
        saves = of["per_save"]
        rows.append(
            (
                f"{of['ranks']} ranks, {of['tensors']} tensors",
                str(of["chunks"]),
                f"{of['sent_bytes'] / of['image_bytes']:.4f}",
                f"{saves['stager']['write_calls']:.0f}",
                f"{saves['flusher']['write_calls']:.0f}",
                f"{saves['stager']['sleeps']:.0f}",
                f"{of['cpu_seconds']:.2f}",
                spread([figures["stall_seconds"] for figures in of["rounds"]]).text(3),
                spread([figures["done_seconds"] for figures in of["rounds"]]).text(2),
            )
        )
    names = (
        "shape",
        "chunks",
        "sent / image",
        "writes: stager",
        "flusher",
        "sleeps: stager",
        "CPU s",
        "stall, s",
        "durable, s",
    )
    title = f"Of one checkpoint, image {document['cells'][0]['image_bytes'] / 1e6:.0f} MB"
    return [Grid(title, names, tuple(rows))]
