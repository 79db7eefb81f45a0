"""The train.py of the pods in tests/infra: adds one in each step, and waits in mid-run until a pod is gone.

OUT in the environment is a folder that outlives the pods. OUT/start-RANK gets the first step of each start. At step
MET_AT each rank creates OUT/ready-RANK and keeps stepping without counting until a notice comes or a rank is killed; if
OUT/go-on exists, ranks do not wait. At a notice they leave, unless OUT/stay exists. With OUT/bug rank 1 raises an
exception. OUT/final-RANK has the final count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from trainer_side import Checkpointer, init_torch_distributed

STEPS, EVERY, MET_AT = 12, 4, 9
STANDS_BY_MAX, LEAVES = 10_000, 75


def main() -> None:
    out = Path(os.environ["OUT"])
    rank, _ = init_torch_distributed("gloo")
    counted = torch.zeros(1000)
    with Checkpointer({"counted": counted}, every=EVERY) as checkpointer:
        first = checkpointer.restore()
        with (out / f"start-{rank}").open("a") as starts:
            starts.write(f"{first}\n")
        for step in range(first, max(STEPS, first + EVERY)):
            torch.distributed.all_reduce(torch.ones(1))
            counted += 1
            checkpointer.step(step)
            while (step + 1) % EVERY == 0 and max(checkpointer.staged_step, checkpointer.kept_step) < step:
                time.sleep(0.01)
            if step == MET_AT and not (out / "go-on").exists():
                (out / f"pid-{rank}").write_text(str(os.getpid()))
                (out / f"ready-{rank}").touch()
                _stand_by(out, checkpointer, step, rank)
    (out / f"final-{rank}").write_text(str(int(counted[0])))


def counted_after(first: int) -> int:
    """Return the final count of a run whose last start began at step `first`, if no step is skipped or repeated."""
    return STEPS if first <= MET_AT else MET_AT + 1 + EVERY


def _stand_by(out: Path, checkpointer: Checkpointer, step: int, rank: int) -> None:
    for later in range(step + 1, step + STANDS_BY_MAX):
        torch.distributed.all_reduce(torch.ones(1))
        checkpointer.step(later)
        if checkpointer.notice is not None and not (out / "stay").exists():
            # With exit code 0, the other pod's torchrun would wait five minutes for this rank.
            raise SystemExit(LEAVES)
        if rank == 1 and (out / "bug").exists():
            raise ValueError("the bug of rank 1")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
