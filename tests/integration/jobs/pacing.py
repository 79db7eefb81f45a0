"""A training job with an automatic interval: `python pacing.py OUT`; ends when OUT has a file `stop`.

The ranks meet in each step, as in any data-parallel training, so all end after the same step. Rank 0 writes each step
into `step`. PACING_STEP_SECONDS is the length of a step, PACING_STALL_SECONDS the extra time of one with a checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed


def main() -> None:
    out, step_seconds = Path(sys.argv[1]), float(os.environ["PACING_STEP_SECONDS"])
    stall_seconds = float(os.environ.get("PACING_STALL_SECONDS", "0"))
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    do_without_compiler()
    torch.manual_seed(1)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer({"model": model, "optimizer": optimizer}, every="auto") as checkpointer:
        step = checkpointer.restore()
        going = torch.ones(1)
        while going.item():
            model(torch.ones(1, 256)).sum().backward()
            time.sleep(step_seconds)
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer.step(step):
                time.sleep(stall_seconds)
            if rank == 0:
                (out / "step").write_text(str(step))
                going = torch.zeros(1) if (out / "stop").exists() else torch.ones(1)
            torch.distributed.broadcast(going, 0)
            step += 1
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
