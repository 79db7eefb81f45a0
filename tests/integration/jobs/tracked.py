"""A training that logs to three experiment trackers: `python tracked.py OUT STEPS EVERY [PAUSE_AT]`.

Saves every EVERY steps, and waits until the checkpoint is durable. After step PAUSE_AT the ranks wait to be killed,
once W&B has written the previous row: it keeps rows in memory for a second.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from holdfast import Checkpointer, init_torch_distributed
from holdfast.integrations.trackers import start_mlflow, start_tensorboard, start_wandb
from trainer_side.trackers import wandb_tracker

PAUSE_SECONDS_MAX = 240
STEP_SECONDS = 0.05  # in which the marks find a row of W&B that is still open


def _is_durable(checkpointer: Checkpointer, step: int) -> bool:
    return checkpointer.durable_step >= step


def _has_step(file: Path, step: int) -> bool:
    return step in _written(file)


def main() -> None:
    out, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    pause_at = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    weight = torch.zeros(100)
    with Checkpointer({"weight": weight}, every=every) as checkpointer:
        first = checkpointer.restore()
        trackers = [
            start_wandb(checkpointer, project="tracked"),
            start_tensorboard(checkpointer, str(out / "events")),  # another folder in each attempt
            start_mlflow(checkpointer),
        ]
        torch.distributed.barrier()  # rank 0 alone begins runs, which takes seconds
        for step in range(first, steps):
            weight += 1
            for tracker in trackers:
                tracker.log({"loss": 1 / weight[0].item()}, step)
            if checkpointer.step(step):
                _wait_until(partial(_is_durable, checkpointer, step))
            time.sleep(STEP_SECONDS)
            if step == pause_at:
                if run := trackers[0].run:
                    file = Path(run.dir).parent / f"run-{run.id}.wandb"
                    _wait_until(partial(_has_step, file, step - 1))
                (out / f"paused-{rank}").touch()
                _wait_until(lambda: False)
    torch.distributed.destroy_process_group()


def _written(file: Path) -> list[int]:
    return [*wandb_tracker._steps(file.read_bytes())] if file.exists() else []


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PAUSE_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("nobody killed this rank")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
