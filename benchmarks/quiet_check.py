"""`python -m benchmarks.quiet_check`: the cost of checking that nothing changes the state behind the gate's back.

GPT-2 with AdamW in host memory (1.5 GB), two ranks and a stager, a save every five iterations; the same training in
four ways, one after the other in each round:

    no saves     the iteration alone
    undrawn      the gate alone: only the first saves are compared with the live state
    default      also compares about one save in 50, drawn by its step
    inside       copy="inside": each save() returns when its copy is done
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import machine
from benchmarks.jobs import Folders, folders

WAYS = ("no saves", "undrawn", "default", "inside")
_RANKS, _ITERATIONS, _EVERY = 2, 160, 5
_DEVICE_SECONDS = 0.3  # the host waits for its device


def _train(way: str, out: Path) -> None:
    """Run one rank."""
    import torch

    from benchmarks.workload import Workload
    from holdfast import Checkpointer, init_torch_distributed
    from trainer_side.save.hook_coverage import CopyPolicy

    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    workload = Workload("gpt2")
    if way == "undrawn":
        CopyPolicy.is_sampled = staticmethod(lambda step: step < 0)  # type: ignore[method-assign]
    iterations: list[float] = []
    stalls: list[float] = []
    with Checkpointer(workload.state()) as checkpointer:
        checkpointer.restore()
        torch.distributed.barrier()
        cpu_before = _cpu_seconds()
        for step in range(_ITERATIONS):
            begun = time.monotonic()
            time.sleep(_DEVICE_SECONDS)
            torch.distributed.all_reduce(torch.zeros(1))
            before = time.monotonic()
            workload.update()
            stall = time.monotonic() - before
            if way != "no saves" and step % _EVERY == _EVERY - 1:
                before = time.monotonic()
                checkpointer.save(step)
                stall += time.monotonic() - before
            stalls.append(stall)
            iterations.append(time.monotonic() - begun)
        cpu_seconds = _cpu_seconds() - cpu_before
        stats = checkpointer.stats
    found = {"iterations": iterations, "stalls": stalls, "cpu_seconds": cpu_seconds, "saved": stats.saved}
    found |= {"compared": stats.compared, "compare_seconds": stats.compare_seconds}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _run(way: str, place: Folders, number: int) -> dict[str, Any]:
    """Run one job; return the figures of its slower rank."""
    out = place.scratch / f"out-{number}"
    out.mkdir()
    line = [
        *(
            sys.executable,
            "-m",
            "holdfast",
            "run",
            "-n",
            str(_RANKS),
            "--store",
            str(place.scratch / f"run-{number}"),
        ),
        *("--logs", str(out), "--set", f"runtime_dir={place.runtime}"),
        *("--set", "keep_last=1", "--", sys.executable, "-m", "benchmarks.quiet_check", way, str(out)),
    ]
    env = {**os.environ, "HOLDFAST_COPY": "inside" if way == "inside" else "auto"}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(_RANKS)]
    # Each rank waits for the slower one.
    iterations = [max(pair) for pair in zip(*(rank["iterations"] for rank in ranks), strict=True)]
    stalls = [max(pair) for pair in zip(*(rank["stalls"] for rank in ranks), strict=True)]
    return {
        "iterations": iterations,
        "stalls": stalls[_EVERY - 1 :: _EVERY],
        "after": stalls[_EVERY::_EVERY],
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "saved": min(rank["saved"] for rank in ranks),
        "compared": sum(rank["compared"] for rank in ranks),
        "compare_seconds": sum(rank["compare_seconds"] for rank in ranks),
    }


def _row(way: str, rounds: Sequence[dict[str, Any]]) -> str:
    iterations = sorted(one for found in rounds for one in found["iterations"])
    # A save costs time in its own iteration, and in the next update, which may wait for the copy.
    pairs = [a + b for found in rounds for a, b in zip(found["stalls"], found["after"], strict=False)]
    compared = sum(found["compared"] for found in rounds)
    compare_seconds = sum(found["compare_seconds"] for found in rounds)
    saves = sum(found["saved"] for found in rounds)
    cpu = sum(found["cpu_seconds"] for found in rounds) / len(rounds)
    shown = f"{compare_seconds / compared:.3f} s" if compared else "-"
    return (
        f"{way:10} {1000 * statistics.median(pairs):9.1f} {1000 * statistics.mean(pairs):9.1f}"
        f" {statistics.median(iterations):8.3f} {iterations[int(0.99 * (len(iterations) - 1))]:8.3f}"
        f" {cpu:8.1f} {saves:6} {compared:9} {shown:>9}"
    )


@click.command(help=__doc__)
@click.argument("way", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--rounds", default=3, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where everything is written.")
def main(way: str | None, out: Path | None, rounds: int, folder: Path | None) -> None:
    if way is not None and out is not None:
        _train(way, out)
        return
    found: dict[str, list[dict[str, Any]]] = {one: [] for one in WAYS}
    with folders(folder) as place:
        for number in range(rounds):
            for place_in_round, one in enumerate(WAYS):
                found[one].append(_run(one, place, number * len(WAYS) + place_in_round))
    processor = machine.describe(Path.cwd())["processor"]
    click.echo(f"{processor}; {rounds} rounds of {_ITERATIONS} iterations, a save every {_EVERY}")
    click.echo(
        f"{'':10} {'stall ms':>9} {'mean ms':>9} {'iter s':>8} {'p99 s':>8} {'CPU s':>8} {'saves':>6} "
        f"{'compared':>9} {'each':>9}"
    )
    for one in WAYS:
        click.echo(_row(one, found[one]))


if __name__ == "__main__":
    main()
