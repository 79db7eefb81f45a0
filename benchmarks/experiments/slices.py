"""PGT and CST by number of ranks, each of which sends one slice (ACUTE fig. 11)."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import spread

__all__ = ["grids", "measure"]

_ROUNDS = 3
_RANKS = (2, 1, 4)


def measure(options: Options) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for ranks in _RANKS[: options.count(len(_RANKS), 2)]:
        shape = options.shape("resnet152", ranks=ranks)
        with options.running(shape) as cluster:
            cluster.prepare("holdfast")
            image_bytes = cluster.manifests[-1].image_bytes
            rounds = [cluster.save("holdfast") for _ in range(options.rounds_of(_ROUNDS))]
            slice_bytes = max(of["slice_bytes"] for of in cluster.manifests[-1].record["ranks"].values())
        cells.append({"ranks": ranks, "slice_bytes": slice_bytes, "rounds": rounds})
    cells.sort(key=lambda of: of["ranks"])
    return document("slices", options, shape, image_bytes=image_bytes, cells=cells)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = tuple(
        (
            str(of["ranks"]),
            f"{of['slice_bytes'] / 1e6:.0f}",
            *(
                spread([figures[name] for figures in of["rounds"]]).text(3)
                for name in ("stall_seconds", "staged_seconds", "done_seconds")
            ),
        )
        for of in document["cells"]
    )
    title = f"By number of ranks on two cores, image {document['image_bytes'] / 1e9:.2f} GB, seconds"
    return [Grid(title, ("ranks", "slice, MB", "stall (CST)", "staged (PGT-1)", "durable (PGT-2)"), rows)]
