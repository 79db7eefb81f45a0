"""Accuracy on handwritten digits, epoch by epoch: undisturbed, and with every rank killed in each tenth epoch.

Both are real trainings under `holdfast run`. The killed one must have the same accuracy and loss after each epoch,
and the same bits in each checkpoint.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.accuracy_rank import epoch_steps
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from holdfast.store import open_store
from operator_side.drill.compare import compare, constants
from operator_side.drill.drill_run import DrillRun, DrillSetup, sleep_briefly
from operator_side.drill.findings import ExecutedKill, examine_kills
from operator_side.drill.kill_plan import Kill, KillTarget
from operator_side.drill.run_drill import run_with_kills

__all__ = ["grids", "measure", "run"]

_RANKS = 2
_RESTART_EPOCHS = 10
_SECONDS_MAX = 900.0
_SETTINGS = ("chunk_bytes=256KiB", "ring_bytes=64MiB")


def measure(options: Options) -> dict[str, Any]:
    epochs, width = options.count(50, 12), options.count(512, 64)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as folder:
        figures = run(Path(folder), epochs, width, options.progress)
    shape = options.shape("flat-24-3", ranks=_RANKS)
    found = document("accuracy", options, shape, epochs=epochs, restart_epochs=_RESTART_EPOCHS, **figures)
    return {**found, "shape": {**found["shape"], "model": f"perceptron 64-{width}-{width}-10"}}


def run(folder: Path, epochs: int, width: int, progress: Any) -> dict[str, Any]:
    """Train twice.

    Raises:
        RuntimeError: A training did not finish.
    """
    deadline = time.monotonic() + _SECONDS_MAX
    progress("undisturbed")
    with DrillRun(
        _setup(folder, "undisturbed", epochs, width), folder / "undisturbed", kills=0
    ) as undisturbed:
        while not undisturbed.poll()[0]:
            sleep_briefly(deadline)
    kills = _kills(epochs)
    progress(f"killed {len(kills)} times")
    with DrillRun(_setup(folder, "killed", epochs, width), folder / "killed", kills=len(kills)) as killed:
        steps = epochs * epoch_steps(_RANKS)
        executed = run_with_kills(
            killed, kills, 0.0, deadline, progress, steps=steps, comparable=range(steps)
        )
    for one in (undisturbed, killed):
        if one.exit_code != 0:
            raise RuntimeError(f"a training ended with {one.exit_code}; it said:\n{one.output_tail(25)}")
    if len(executed) < len(kills):
        raise RuntimeError(f"{len(executed)} of {len(kills)} kills came; the training is too quick for them")
    return _figures(folder, undisturbed, killed, executed)


def _setup(folder: Path, name: str, epochs: int, width: int) -> DrillSetup:
    out = str(folder / f"{name}.jsonl")
    command = [sys.executable, "-m", "benchmarks.accuracy_rank", out, str(epochs), str(width)]
    return DrillSetup(command, _RANKS, _SETTINGS)


def _kills(epochs: int) -> list[Kill]:
    """Plan a kill in the middle of the epoch after each tenth."""
    steps = epoch_steps(_RANKS)
    ends = range(_RESTART_EPOCHS, epochs, _RESTART_EPOCHS)
    return [
        Kill(
            number,
            KillTarget.RANKS,
            notice=False,
            rank=0,
            after_step=epoch * steps + steps // 2,
            delay_fraction=0.0,
        )
        for number, epoch in enumerate(ends, 1)
    ]


def _figures(
    folder: Path, undisturbed: DrillRun, killed: DrillRun, executed: list[ExecutedKill]
) -> dict[str, Any]:
    files = compare(open_store(str(undisturbed.store)), open_store(str(killed.store)))
    constant = constants(files, executed[0].kill.after_step)  # generators that the job neither seeds nor uses
    differ = [str(each) for one in files for each in one.differs if each.path not in constant]
    findings = examine_kills(
        executed,
        diary=killed.lines["diary"],
        events=killed.lines["events"],
        status=killed.lines["status"],
        files=(),
    )
    return {
        "curves": {name: _curve(folder / f"{name}.jsonl") for name in ("undisturbed", "killed")},
        "kills": [
            {
                "epoch": round(one.kill.after_step / epoch_steps(_RANKS), 1),
                "lost_steps": finding.lost_steps,
                "resumed_from": finding.resumed_from,
                "resumption_seconds": finding.phases.get("seconds"),
                "after_seconds": one.killed_at - _begun(killed),
            }
            for one, finding in zip(executed, findings, strict=True)
        ],
        "seconds": {
            name: max(point["at_seconds"] for point in _curve(folder / f"{name}.jsonl", _begun(one)))
            for name, one in (("undisturbed", undisturbed), ("killed", killed))
        },
        "times": {
            name: [point["at_seconds"] for point in _curve(folder / f"{name}.jsonl", _begun(one))]
            for name, one in (("undisturbed", undisturbed), ("killed", killed))
        },
        "checkpoints": {"compared": len(files), "differences": differ},
    }


def _begun(one: DrillRun) -> float:
    """Return the time of the run's first finished step."""
    return float(next(line["time"] for line in one.lines["diary"] if "step" in line))


def _curve(path: Path, begun: float | None = None) -> list[dict[str, Any]]:
    """Return the points in order of time; an epoch that was trained twice has two."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if begun is not None:
        return [{"epoch": line["epoch"], "at_seconds": line["at_unix"] - begun} for line in lines]
    return [{name: line[name] for name in ("epoch", "right", "of", "loss")} for line in lines]


def equal_epochs(document: dict[str, Any]) -> int:
    """Count the epochs after which accuracy and loss are bit-identical in both runs, each time they were trained."""
    want = {point["epoch"]: point for point in document["curves"]["undisturbed"]}
    unequal = {point["epoch"] for point in document["curves"]["killed"] if point != want.get(point["epoch"])}
    there = {point["epoch"] for point in document["curves"]["killed"]}
    return len((want.keys() & there) - unequal)


def grids(document: dict[str, Any]) -> list[Grid]:
    rows = []
    for name, points in document["curves"].items():
        last = points[-1]
        accuracy = f"{100 * last['right'] / last['of']:.2f} %"
        kills = len(document["kills"]) if name == "killed" else 0
        rows.append((name, str(kills), accuracy, f"{document['seconds'][name]:.1f}"))
    checkpoints = document["checkpoints"]
    title = (
        f"Digits, {document['epochs']} epochs on {document['shape']['ranks']} ranks, all of them killed after each "
        f"{document['restart_epochs']}th: {equal_epochs(document)} epochs of equal accuracy and loss, "
        f"{checkpoints['compared']} checkpoints compared, {len(checkpoints['differences'])} differences"
    )
    return [
        Grid(title, ("training", "kills", "accuracy", "seconds"), tuple(rows)),
        Grid(
            "Its kills",
            ("after epochs", "steps done again", "seconds until training went on"),
            tuple(
                (f"{kill['epoch']:.1f}", str(kill["lost_steps"]), f"{kill['resumption_seconds']:.1f}")
                for kill in document["kills"]
            ),
        ),
    ]
