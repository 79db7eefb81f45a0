"""From a disk whose page cache is cold, against torch.load; and how long a fresh cluster takes until its first
step is done."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster import turn
from benchmarks.cold import forget
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.raw_direct import read_direct
from benchmarks.spread import ratios, spread
from holdfast.manifest import manifest_name

__all__ = ["RAW", "WAYS", "grids", "measure"]

_ROUNDS = 5
RAW = "raw O_DIRECT read"
WAYS = ("holdfast", "torch.load", "torch.load, mmap", RAW)


def measure(options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as kept:
        shape = options.shape("gpt2", store=str(Path(kept) / "run"))
        with options.running(shape) as cluster:
            cluster.prepare("holdfast")
            manifest = cluster.manifests[-1]
            path = cluster.path(manifest.step)
        files = (path, path.with_name(manifest_name(path.name)))
        forget(*files)
        begun = time.monotonic()
        rounds: list[dict[str, Any]] = []
        with options.running(shape, fresh=True) as cluster:
            cluster.ask(do="memory")  # answered when the ranks have built model and optimizer
            built = time.monotonic()
            cluster.ask(do="prepare", peer="holdfast")  # joins and restores
            restored = time.monotonic()
            cluster.train("none", iterations=1, every=1, compute="cpu")
            first = time.monotonic()
            cluster.restore("holdfast", "", compare=False)  # what the step has changed is as it was
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
        "restore", options, shape, image_bytes=manifest.image_bytes, rounds=rounds, fresh_cluster=start
    )


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds = document["rounds"]
    rows = []
    ours = [figures["holdfast"]["seconds"] for figures in rounds]
    for how in rounds[0]:
        seconds = [figures[how]["seconds"] for figures in rounds]
        times = "" if how == "holdfast" else ratios(seconds, ours).text(2)
        rows.append(
            (
                how,
                spread(seconds).text(3),
                f"{document['image_bytes'] / 1e9 / spread(seconds).median:.2f}",
                times,
            )
        )
    title = f"Restore of {document['image_bytes'] / 1e9:.2f} GB on two ranks, page cache cold"
    result = [Grid(title, ("way", "seconds", "GB/s", "times as long as holdfast"), tuple(rows))]
    phases = [name for name in rounds[0]["holdfast"] if name != "seconds"]
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
