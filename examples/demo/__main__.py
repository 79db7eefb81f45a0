"""The command behind `make demo`. Exit code 0: every fact holds; 1: a fact fails; 2: the demo could not run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from rich.console import Console

from examples.demo.job import DemoError
from examples.demo.picture import draw
from examples.demo.report import Display, show
from examples.demo.story import Plan, play
from holdfast.errors import HoldfastError

_SMALL = ("--layers", "2", "--width", "128")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="Kill a training run, and go on bit for bit."
    )
    parser.add_argument("--ranks", type=int, default=2, help="training ranks (default %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="steps of the training (default %(default)s)")
    parser.add_argument(
        "--every", type=int, default=10, help="steps between two checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-run"),
        help="folder for all that it writes (default %(default)s)",
    )
    parser.add_argument(
        "--launcher",
        choices=("mpirun", "torchrun"),
        default="mpirun",
        help="what starts the training ranks; with torchrun the stager stands alone (default %(default)s)",
    )
    parser.add_argument(
        "--small", action="store_true", help="a model of half a million parameters, for a quick look"
    )
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.every < 2 or arguments.steps < 4 * arguments.every:
        parser.error(
            "expected at least 1 rank, a checkpoint every 2 steps or more, and 4 times as many steps"
        )
    return arguments


def main() -> int:
    arguments = _arguments()
    plan = Plan(
        arguments.out.resolve(), arguments.ranks, arguments.steps, arguments.every, arguments.launcher
    )
    if arguments.small:
        plan = dataclasses.replace(plan, training=_SMALL, ring_bytes=8 << 20, chunk_bytes=1 << 20)
    console = Console()
    begun = time.monotonic()
    try:
        with Display(console) as display:
            outcome = play(plan, display)
    except (DemoError, HoldfastError, OSError) as error:
        console.print(f"the demo could not be played: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; all that the demo started has been ended")
        return 2
    result = plan.folder / "result.json"
    passed = show(console, outcome, result)
    picture = plan.folder / "loss.svg"
    if draw(outcome, picture):
        console.print(f"the loss of the three runs as a picture: {picture}", soft_wrap=True)
    verdict = "[green]every fact holds[/]" if passed else "[red]a fact does not hold[/]"
    console.print(
        f"{verdict} after {time.monotonic() - begun:.0f} s; the run is in {plan.store}, figures in {result}",
        soft_wrap=True,
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
