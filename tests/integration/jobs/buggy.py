"""A job with a bug: `python buggy.py STEPS EVERY BUG_AT`. Rank 1 raises in step BUG_AT, in every attempt."""

from __future__ import annotations

import sys
import time

import torch

from trainer_side import Checkpointer, init_torch_distributed


def compute(step: int) -> None:
    raise ValueError(f"the bug of step {step}")


def main() -> None:
    steps, every, bug_at = map(int, sys.argv[1:])
    rank, _ = init_torch_distributed("gloo")
    value = torch.zeros(1000)
    with Checkpointer({"value": value}, every=every) as checkpointer:
        for step in range(checkpointer.restore(), steps):
            torch.distributed.all_reduce(torch.ones(1))
            if step == bug_at and rank == 1:
                compute(step)
            value += 1
            checkpointer.step(step)
            while (step + 1) % every == 0 and checkpointer.durable_step < step:
                time.sleep(0.01)


if __name__ == "__main__":
    main()
