"""Trains on, whatever happens to its checkpoints: saves after every step and waits for no save.

`python stepping.py OUT STEPS [SECONDS]`. Every parameter equals the number of the step, which takes at least SECONDS.
After the last step each rank writes the accepted steps to OUT, waits for OUT/go, and leaves the block of its
Checkpointer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from trainer_side import Checkpointer, init_torch_distributed

STAGED_SECONDS_MAX = 0.3
LAST_STAGED_SECONDS_MAX = 30.0
GO_SECONDS_MAX = 120.0
WIDTH = 1000


def main() -> None:
    out, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float((sys.argv[3:] or ["0"])[0])
    out.mkdir(parents=True, exist_ok=True)
    rank, _ = init_torch_distributed("gloo")
    model = torch.nn.Linear(WIDTH, 200)
    with Checkpointer({"model": model}) as checkpointer:
        checkpointer.restore()
        taken = []
        for step in range(steps):
            torch.distributed.barrier()  # as a training does; ranks that drift apart never offer the same step
            begun = time.monotonic()
            with torch.no_grad():
                for part in model.parameters():
                    part.fill_(step)
            if checkpointer.save(step):
                taken.append(step)
            # A training step takes a while; a stuck checkpoint must not prolong it.
            until = time.monotonic() + STAGED_SECONDS_MAX
            while checkpointer.staged_step < step and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
        # On a slow machine the last checkpoint may take longer than a step.
        until = time.monotonic() + LAST_STAGED_SECONDS_MAX
        while taken and checkpointer.staged_step < taken[-1] and time.monotonic() < until:
            time.sleep(0.005)
        said = {"taken": taken, "declined": checkpointer.stats.declined, "staged": checkpointer.staged_step}
        written = out / f"rank-{rank}.new"
        written.write_text(json.dumps(said))
        written.rename(out / f"rank-{rank}.json")
        until = time.monotonic() + GO_SECONDS_MAX
        while not (out / "go").exists():
            if time.monotonic() > until:
                sys.exit("nobody said go")
            time.sleep(0.05)


if __name__ == "__main__":
    main()
