"""Parallel shards (ACUTE fig. 11): time until a checkpoint is staged and durable by number of ranks, each with a link
of its own; and the same with the stager's link as the limit (ACUTE, V-E).

Every rank sends its slice over 40 Mb/s to a stager whose link is as wide as those of four or of eight ranks, so the
network is the limit even on two cores. Links are network namespaces (`benchmarks.shaped_job`), which need root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.shaped_job import Links, ShapedJob, why_not
from benchmarks.spread import Spread, spread

__all__ = ["beyond_link", "grids", "measure", "times_faster"]

_ROUNDS = 3
_RANKS = (1, 2, 4, 8, 16)
_RANK_BITS = 40_000_000
_WIDE_AS = (4, 8)  # ranks
# Widths of the stager's link, by size of the state in MiB. Even a slice of 16 ranks has several chunks.
_SIZES = {24: _WIDE_AS, 48: _WIDE_AS[1:]}
_CHUNK_BYTES = 1 << 18
_FIGURES = {
    "stall_seconds": "stall (CST)",
    "staged_seconds": "staged (PGT-1)",
    "done_seconds": "durable (PGT-2)",
}


def measure(options: Options) -> dict[str, Any]:
    """Measure. Raises `RuntimeError` if this machine cannot shape links."""
    if reason := why_not():
        raise RuntimeError(f"shards: {reason}")
    cells: list[dict[str, Any]] = []
    for size, widths in list(_SIZES.items())[: options.count(len(_SIZES), 1)]:
        for ranks in _RANKS[: options.count(len(_RANKS), 2)]:
            links = Links(_RANK_BITS, widths[0] * _RANK_BITS)
            model = options.model or f"flat-48-{options.count(size, 2)}"
            shape = options.shape(model, ranks=ranks, chunk_bytes=_CHUNK_BYTES, links=links)
            with options.running(shape) as cluster:
                cluster.prepare("holdfast", saves=1)
                for wide_as in widths:
                    assert isinstance(cluster.job, ShapedJob)
                    cluster.job.widen(wide_as * _RANK_BITS)
                    options.progress(f"{size} MiB, {ranks} ranks, a stager's link of {wide_as} ranks")
                    rounds = [cluster.save("holdfast") for _ in range(options.rounds_of(_ROUNDS))]
                    cells.append(
                        {
                            "ranks": ranks,
                            "wide_as": wide_as,
                            "image_bytes": cluster.manifests[-1].image_bytes,
                            "rounds": rounds,
                        }
                    )
            options.clusters.close()  # the next job makes links with the same names
    return document("shards", options, shape, rank_bits=_RANK_BITS, cells=cells)


def times_faster(document: Mapping[str, Any], figure: str = "staged_seconds") -> dict[int, float]:
    """Return the speedup over one rank by number of ranks, for the smallest state and the widest stager's link."""
    cells = document["cells"]
    chosen = _by_ranks(cells, max(of["wide_as"] for of in cells), figure)
    return {ranks: chosen[1] / seconds for ranks, seconds in chosen.items()}


def beyond_link(document: Mapping[str, Any]) -> dict[int, float]:
    """Return staging times by number of ranks, as ratios to that of the ranks that fill the narrowest stager's link."""
    cells = document["cells"]
    narrowest = min(of["wide_as"] for of in cells)
    chosen = _by_ranks(cells, narrowest, "staged_seconds")
    return {ranks: seconds / chosen[narrowest] for ranks, seconds in chosen.items() if ranks > narrowest}


def _by_ranks(cells: Sequence[Mapping[str, Any]], wide_as: int, figure: str) -> dict[int, float]:
    """Return seconds by number of ranks with the smallest state and a stager's link as wide as `wide_as` ranks'."""
    least = min(of["image_bytes"] for of in cells)
    chosen = [of for of in cells if of["wide_as"] == wide_as and of["image_bytes"] < 1.5 * least]
    return {of["ranks"]: _figure(of, figure).median for of in sorted(chosen, key=lambda of: of["ranks"])}


def _figure(cell: Mapping[str, Any], figure: str) -> Spread:
    return spread([figures[figure] for figures in cell["rounds"]])


def grids(document: dict[str, Any]) -> list[Grid]:
    bits = document["rank_bits"]
    rows = []
    for of in sorted(document["cells"], key=lambda of: (of["image_bytes"], of["wide_as"], of["ranks"])):
        allowed = of["image_bytes"] * 8 / bits / min(of["ranks"], of["wide_as"])
        rows.append(
            (
                f"{of['image_bytes'] / 1e6:.0f} MB, stager {of['wide_as'] * bits / 1e6:.0f} Mb/s",
                str(of["ranks"]),
                *(_figure(of, figure).text(2) for figure in _FIGURES),
                f"{allowed:.2f}",
            )
        )
    title = f"By number of ranks, each with a link of {bits / 1e6:.0f} Mb/s, seconds"
    names = ("image and the stager's link", "ranks", *_FIGURES.values(), "the bytes alone")
    return [Grid(title, names, tuple(rows))]
