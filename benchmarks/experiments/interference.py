"""CheckFreq's interference (FAST 2021): a training alone, then beside another job that writes to the same disk, with
the interval that was right before, and with one that adapts.

isolated: auto ─► K      beside the other job: every K (static), auto (adaptive), and nothing saved at all
"""

from __future__ import annotations

from contextlib import nullcontext
from statistics import mean
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.interferer import interference
from benchmarks.pacing import AUTO, NEVER

__all__ = ["grids", "measure"]

_ROUNDS = 2
_ITERATIONS = 400
_ITERATION_SECONDS = 0.1
_SETTINGS = {"HOLDFAST_EVERY": "auto", "HOLDFAST_OVERHEAD_MAX": "0.03"}


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("resnet152", environment=_SETTINGS)
    runs: list[dict[str, Any]] = []
    with options.running(shape) as cluster:
        cluster.prepare("holdfast")
        for number in range(options.rounds_of(_ROUNDS)):
            chosen = 0
            for name, every, beside in (
                ("isolated, nothing saved", NEVER, False),
                ("isolated", AUTO, False),
                ("beside, nothing saved", NEVER, True),
                ("static", 0, True),
                ("adaptive", AUTO, True),
            ):
                options.progress(f"round {number + 1}: {name}")
                run = _run(cluster, options, chosen if name == "static" else every, beside=beside)
                runs.append({"name": name, "round": number, **run})
                if name == "isolated":
                    chosen = _interval(run["saved"])
    return document("interference", options, shape, runs=runs)


def _run(cluster: Cluster, options: Options, every: int, *, beside: bool) -> dict[str, Any]:
    with interference(cluster.folders.scratch) if beside else nullcontext():
        run = cluster.pace(
            iterations=options.count(_ITERATIONS, 150),
            every=every,
            compute_seconds=_ITERATION_SECONDS / options.count(1, 5),
        )
    cluster.quiet()  # not beside the other job, whose writes a sync would wait for without end
    return run


def _interval(saved: list[int]) -> int:
    """The last one that was chosen.

    Raises:
        RuntimeError: There were not two checkpoints.
    """
    if len(saved) < 2:
        raise RuntimeError(f"an interval needs two checkpoints, got {len(saved)}; train for longer")
    return saved[-1] - saved[-2]


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for name in dict.fromkeys(run["name"] for run in document["runs"]):
        mine = [run for run in document["runs"] if run["name"] == name]
        took = mean(seconds for run in mine for seconds in run["iteration_seconds"][1:])
        alone = "isolated, nothing saved" if name.startswith("isolated") else "beside, nothing saved"
        bare = mean(
            seconds
            for run in document["runs"]
            if run["name"] == alone
            for seconds in run["iteration_seconds"][1:]
        )
        intervals = [str(_interval(run["saved"])) if len(run["saved"]) > 1 else "-" for run in mine]
        rows.append(
            (
                name,
                f"{1000 * took:.1f}",
                f"{100 * (took / bare - 1):.1f} %",
                f"{mean(len(run['saved']) for run in mine):.1f}",
                ", ".join(intervals),
            )
        )
    title = "Training beside another job that writes to the same disk; overhead against the same without checkpoints"
    return [
        Grid(
            title, ("run", "ms per iteration", "overhead", "checkpoints", "interval at the end"), tuple(rows)
        )
    ]
