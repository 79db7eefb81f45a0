"""A job whose memory flips: `python poisoned.py STEPS EVERY POISONED_AT KILLED_AT`.

Before it saves step POISONED_AT, the first attempt writes NaN into a weight, as a faulty machine would; whoever goes on
from there raises. The attempt that goes back to an older step is killed after it has saved step KILLED_AT.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from trainer_side import Checkpointer, init_torch_distributed


def main() -> None:
    steps, every, poisoned_at, killed_at = map(int, sys.argv[1:])
    rank, _ = init_torch_distributed("gloo")
    value = torch.zeros(1000)
    is_first = os.environ["HOLDFAST_RUN_ATTEMPT"] == "1"
    with Checkpointer({"value": value}, every=every) as checkpointer:
        first = checkpointer.restore()
        for step in range(first, steps):
            torch.distributed.all_reduce(torch.ones(1))
            if not value.isfinite().all():
                raise FloatingPointError(f"the loss of step {step} is not finite")
            value += 1
            if is_first and step == poisoned_at:
                value[7] = torch.nan
            checkpointer.step(step)
            while (step + 1) % every == 0 and checkpointer.durable_step < step:
                time.sleep(0.01)
            if step == killed_at and 0 < first < poisoned_at:
                os.kill(os.getpid(), signal.SIGKILL)
        assert value.tolist() == [float(steps)] * 1000
        if rank == 0:
            print("every weight is", value[0].item(), flush=True)


if __name__ == "__main__":
    main()
