"""PGT by size of the stager's ring (ACUTE fig. 12): also where the image does not fit, and ACUTE ran out of memory."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import spread

__all__ = ["grids", "measure"]

_ROUNDS = 3
_RINGS_MIB = (1024, 256, 128)


def measure(options: Options) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for mebibytes in _RINGS_MIB[: options.count(len(_RINGS_MIB), 1)]:
        shape = options.shape("resnet152", ring_bytes=mebibytes << 20)
        with options.running(shape) as cluster:
            cluster.prepare("holdfast")
            image_bytes = cluster.manifests[-1].image_bytes
            rounds = [cluster.save("holdfast") for _ in range(options.rounds_of(_ROUNDS))]
            cells.append({"ring_bytes": cluster.shape.ring_bytes, "rounds": rounds})
    cells.sort(key=lambda of: of["ring_bytes"])
    return document("rings", options, shape, image_bytes=image_bytes, cells=cells)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = tuple(
        (
            f"{of['ring_bytes'] / (1 << 20):.0f} MiB, {of['ring_bytes'] / document['image_bytes']:.2f} of the image",
            *(
                spread([figures[name] for figures in of["rounds"]]).text(3)
                for name in ("stall_seconds", "staged_seconds", "done_seconds")
            ),
        )
        for of in document["cells"]
    )
    title = f"By size of the ring, image {document['image_bytes'] / 1e9:.2f} GB, seconds"
    return [Grid(title, ("ring", "stall (CST)", "staged (PGT-1)", "durable (PGT-2)"), rows)]
