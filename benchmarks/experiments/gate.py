"""Layer-wise against coarse gate where copying outlasts the computation (LightCheck fig. 10 and section III-B).

Computation and update are timed waits, so that only the gate makes a difference: an update of `_UPDATE_SECONDS` for all
layers begins `compute_seconds` after the save. A coarse gate delays it until all is copied; a layer-wise one delays
only layers with a copy in flight, so copy and update overlap. The table also states the delay that no gate can avoid:
copy − computation − update, if positive.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.spread import ratios, spread

__all__ = ["grids", "measure"]

_ROUNDS = 5
_UPDATE_SHARES = (0.5, 1.0)  # of the copy's time
_COMPUTE_SHARES = (0.25, 0.5)


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("flat-150-600")
    cells: list[dict[str, Any]] = []
    with options.running(shape) as cluster:
        cluster.prepare("holdfast")
        for _ in range(3):
            cluster.save("holdfast")
        copies = [
            max(of["copy_seconds"] for of in m.record["ranks"].values()) for m in cluster.manifests[-3:]
        ]
        copy_seconds = spread(copies).median
        for update_share in _UPDATE_SHARES[: options.count(2, 1)]:
            update = update_share * copy_seconds
            cluster.ask(do="update", seconds=update)
            cluster.save("holdfast")
            for compute_share in _COMPUTE_SHARES[: options.count(2, 1)]:
                compute = compute_share * copy_seconds
                rounds = [
                    _round(cluster, number, compute, update) for number in range(options.rounds_of(_ROUNDS))
                ]
                cells.append({"compute_seconds": compute, "update_seconds": update, "rounds": rounds})
    return document("gate", options, shape, copy_seconds=copy_seconds, cells=cells)


def _round(cluster: Cluster, number: int, compute: float, update: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for coarse in (True, False) if number % 2 else (False, True):
        cluster.progress(f"compute {compute:.3f} s, update {update:.3f} s, round {number + 1}")
        cluster.ask(do="gate", coarse=coarse)
        figures = cluster.save("holdfast", compute_seconds=max(compute, 0.0))
        copies = [of["copy_seconds"] for of in cluster.manifests[-1].record["ranks"].values()]
        result["coarse" if coarse else "layer-wise"] = {
            "stall_seconds": max(0.0, figures["first_update_seconds"] - update),
            "copy_seconds": max(copies),
        }
    return result


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for of in document["cells"]:
        coarse = [figures["coarse"]["stall_seconds"] for figures in of["rounds"]]
        layered = [figures["layer-wise"]["stall_seconds"] for figures in of["rounds"]]
        bound = [
            max(0.0, figures["layer-wise"]["copy_seconds"] - of["compute_seconds"] - of["update_seconds"])
            for figures in of["rounds"]
        ]
        rows.append(
            (
                f"{of['compute_seconds'] * 1000:.0f} ms, {of['update_seconds'] * 1000:.0f} ms",
                spread(coarse).text(0, times=1000),
                spread(layered).text(0, times=1000),
                ratios(layered, [max(value, 1e-4) for value in coarse]).text(2),
                spread(bound).text(0, times=1000),
            )
        )
    title = f"Wait at the update, ms; a copy alone takes {document['copy_seconds'] * 1000:.0f} ms"
    names = ("computation, update", "coarse", "layer-wise", "layer-wise / coarse", "no gate can avoid")
    return [Grid(title, names, tuple(rows))]
