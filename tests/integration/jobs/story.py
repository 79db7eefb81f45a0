"""Scripts with a mistake that the user should be told about: `python story.py OUT SCENARIO STEPS`.

late        seconds pass between init_torch_distributed and Checkpointer
plain       restores, saves every step, waits until each is durable
unrestored  never calls restore()       fresh   the same, and says so
raises      an error that is not holdfast's
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainer_side import Checkpointer, init_torch_distributed

LATE_SECONDS = 13.0  # more than a stager that gives up would wait


def main() -> None:
    out, scenario, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    rank, _ = init_torch_distributed("gloo")
    if scenario == "late":
        time.sleep(LATE_SECONDS)
    if scenario == "raises":
        raise ValueError("not holdfast's")
    torch.manual_seed(1)
    model = torch.nn.Linear(10, 10)
    more: dict[str, Any] = {"fresh": True} if scenario == "fresh" else {}
    with Checkpointer({"model": model}, every=1, **more) as checkpointer:
        first = 0 if scenario in {"unrestored", "fresh"} else checkpointer.restore()
        for step in range(first, steps):
            torch.distributed.all_reduce(torch.ones(1))
            checkpointer.step(step)
            while checkpointer.durable_step < step:
                time.sleep(0.01)
        (out / f"done-{rank}").touch()


if __name__ == "__main__":
    main()
