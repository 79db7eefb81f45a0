"""Restore from a disk with a cold page cache, against torch.load; from the stager's ring, against that disk; and the
time until a fresh cluster has done its first step."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, turn
from benchmarks.cold import forget
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.raw_direct import read_direct
from benchmarks.restoring import OURS
from benchmarks.restoring import RING as FROM_RING
from benchmarks.spread import ratios, spread
from holdfast.image.manifest import manifest_name

__all__ = ["RAW", "WAYS", "grids", "measure"]

_ROUNDS = 5
_RING_BYTES = 2 << 30  # all of GPT-2's image; the fresh cluster has the stager's default
RAW = "raw O_DIRECT read"
WAYS = (OURS, "torch.load", "torch.load, mmap", RAW)


def measure(options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as kept:
        shape = options.shape("gpt2", store=str(Path(kept) / "run"))
        with options.running(dataclasses.replace(shape.fitted(), ring_bytes=_RING_BYTES)) as cluster:
            cluster.prepare("holdfast")
            manifest = cluster.manifests[-1]
            path = cluster.path(manifest.step)
            files = (path, path.with_name(manifest_name(path.name)))
            rings = _ring_rounds(options, cluster, files)
        forget(*files)
        begun = time.monotonic()
        rounds: list[dict[str, Any]] = []
        with options.running(shape, fresh=True) as cluster:
            cluster.ask(do="memory")  # returns once the ranks have built model and optimizer
            built = time.monotonic()
            cluster.ask(do="prepare", peer="holdfast")  # joins and restores
            restored = time.monotonic()
            cluster.train("none", iterations=1, every=1, compute="cpu")
            first = time.monotonic()
            cluster.restore("holdfast", "", compare=False)  # undoes the step's change
            for number in range(options.rounds_of(_ROUNDS)):
                figures: dict[str, Any] = {}
                for how in turn(WAYS, number):
                    forget(*files)
                    options.progress(f"round {number + 1}: {how}")
                    if how == RAW:
                        seconds = min(
                            read_direct(path, cluster.shape.chunk_bytes, threads) for threads in (2, 4)
                        )
                        figures[how] = {"seconds": seconds}
                    else:
                        figures[how] = cluster.restore(how, str(path))
                rounds.append(figures)
        start = {
            "start_seconds": built - begun,
            "restore_seconds": restored - built,
            "first_step_seconds": first - restored,
        }
        options.clusters.close()  # before its store is removed
    return document(
        "restore",
        options,
        shape,
        image_bytes=manifest.image_bytes,
        rounds=rounds,
        ring_rounds=rings,
        fresh_cluster=start,
    )


def _ring_rounds(options: Options, cluster: Cluster, files: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Restore a checkpoint that is still in the ring, from there and from the disk."""
    cluster.restore(OURS, "", compare=False)  # undoes the update
    rounds = []
    for number in range(options.rounds_of(_ROUNDS)):
        figures = {}
        for how in turn((OURS, FROM_RING), number):
            forget(*files)
            options.progress(f"round {number + 1}: {how}")
            figures[how] = cluster.restore(how, "")
        rounds.append(figures)
    return rounds


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds = document["rounds"]
    title = f"Restore of {document['image_bytes'] / 1e9:.2f} GB on two ranks, page cache cold"
    result = [_ways(document, rounds, title)]
    if rings := document.get("ring_rounds"):
        result.append(_ways(document, rings, "The same, and from what the stager's ring still has"))
    phases = [name for name in rounds[0]["holdfast"] if name.endswith("_seconds")]
    result.append(
        Grid(
            "holdfast's phases of a restore",
            ("phase", "seconds"),
            tuple(
                (name, spread([figures["holdfast"].get(name, 0.0) for figures in rounds]).text(3))
                for name in phases
            ),
        )
    )
    start = document.get("fresh_cluster")
    if start:
        phases_of_start = tuple((name, f"{value:.2f}") for name, value in start.items())
        result.append(
            Grid("A fresh cluster, to the end of its first step", ("what", "seconds"), phases_of_start)
        )
    return result


def _ways(document: dict[str, Any], rounds: list[dict[str, Any]], title: str) -> Grid:
    rows = []
    ours = [figures[OURS]["seconds"] for figures in rounds]
    for how in rounds[0]:
        seconds = [figures[how]["seconds"] for figures in rounds]
        times = "" if how == OURS else ratios(seconds, ours).text(2)
        speed = f"{document['image_bytes'] / 1e9 / spread(seconds).median:.2f}"
        rows.append((how, spread(seconds).text(3), speed, times))
    return Grid(title, ("way", "seconds", "GB/s", "times as long as holdfast"), tuple(rows))
