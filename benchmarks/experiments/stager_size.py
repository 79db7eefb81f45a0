"""The stager's size and its price (ACUTE fig. 12, table 3): time until staged and durable by CPUs and memory.

Stager and flusher are in a control group; the ranks are beside it on the same two cores. With little memory the ring
holds half an image, where ACUTE's stager ran out of memory. CPUs change from round to round within one job, so ratios
are made within a round. This experiment needs root.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import turn
from benchmarks.control_group import ControlGroup, why_not
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import Spread, ratios, spread

__all__ = ["dollars_an_hour", "grids", "measure", "times_as_long"]

_ROUNDS = 5
_GIB = 1 << 30
_CPUS = (0.5, 1.0, 2.0)
# Memory of the group → size of the ring; None: the ring grows to two images.
_MEMORIES: dict[int, int | None] = {4 * _GIB: None, _GIB: 256 << 20}
_FIGURES = {"staged_seconds": "staged (PGT-1)", "done_seconds": "durable (PGT-2)"}
# AWS Fargate, Linux on x86, us-east-1, on demand; each size of a task is priced so.
_PRICES_OF = "AWS Fargate, us-east-1, March 2026"
_CPU_DOLLARS, _GIB_DOLLARS = 0.04048, 0.004445


def dollars_an_hour(cpus: float, memory_bytes: int) -> float:
    """Return Fargate's price of a container of this size."""
    return cpus * _CPU_DOLLARS + memory_bytes / _GIB * _GIB_DOLLARS


def measure(options: Options) -> dict[str, Any]:
    """Measure. Raises `RuntimeError` if this process cannot make limited control groups."""
    if reason := why_not():
        raise RuntimeError(f"stager-size: {reason}")
    cells: list[dict[str, Any]] = []
    for memory_bytes, ring_bytes in _MEMORIES.items():
        with ControlGroup() as group:
            group.allow(cpus=max(_CPUS), memory_bytes=memory_bytes)
            shape = options.shape(
                "resnet152", ring_bytes=ring_bytes, launcher="torchrun", stager_inside=group.inside
            )
            rounds: dict[float, list[dict[str, float]]] = {cpus: [] for cpus in _CPUS}
            with options.running(shape) as cluster:
                cluster.prepare("holdfast")
                for number in range(options.rounds_of(_ROUNDS)):
                    for cpus in turn(_CPUS, number):
                        options.progress(f"{memory_bytes / _GIB:g} GiB, {cpus:g} CPUs, round {number + 1}")
                        group.allow(cpus=cpus, memory_bytes=memory_bytes)
                        rounds[cpus].append(cluster.save("holdfast"))
                image_bytes, ring = cluster.manifests[-1].image_bytes, cluster.ring_bytes
                options.clusters.close()  # before its group is removed
            cells += [
                {
                    "cpus": cpus,
                    "memory_bytes": memory_bytes,
                    "ring_bytes": ring,
                    "most_bytes": group.most_bytes,
                    "rounds": rounds[cpus],
                }
                for cpus in _CPUS
            ]
    return document("stager-size", options, shape, image_bytes=image_bytes, cells=cells)


def times_as_long(document: dict[str, Any], figure: str) -> dict[tuple[float, int], Spread]:
    """Return times as ratios to those with the most CPUs and the same memory, by CPUs and memory."""
    cells = {
        (of["cpus"], of["memory_bytes"]): [one[figure] for one in of["rounds"]] for of in document["cells"]
    }
    most = max(cpus for cpus, _ in cells)
    return {(cpus, memory): ratios(taken, cells[most, memory]) for (cpus, memory), taken in cells.items()}


def grids(document: dict[str, Any]) -> list[Grid]:
    times = {figure: times_as_long(document, figure) for figure in _FIGURES}
    rows = []
    for of in sorted(document["cells"], key=lambda of: (of["memory_bytes"], of["cpus"])):
        place = of["cpus"], of["memory_bytes"]
        ring = of["ring_bytes"] / document["image_bytes"]
        cells = []
        for figure in _FIGURES:
            cells.append(spread([one[figure] for one in of["rounds"]]).text(2))
            cells.append(times[figure][place].text(1))
        rows.append(
            (
                f"{place[0]:g} CPUs, {place[1] / _GIB:g} GiB, ring {ring:.1f} images",
                f"{dollars_an_hour(*place):.4f}",
                *cells,
            )
        )
    title = f"{document['image_bytes'] / 1e9:.2f} GB by the stager's size, seconds; price: {_PRICES_OF}"
    names = (
        "stager",
        "$ an hour",
        *(name for figure in _FIGURES.values() for name in (figure, "times as long")),
    )
    return [Grid(title, names, tuple(rows))]
