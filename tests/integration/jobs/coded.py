"""A job under `holdfast rank` whose ranks end as requested: `python coded.py OUT HOW [OPTION]…`.

HOW: `done`; `raise`, on rank 1; `leave`, at a notice; `pause`, so that rank 1 can be killed (with CODED_KILLS in the
environment it kills itself); `early`, the same before the first checkpoint. Rank 0 notices the loss of rank 1 in a
collective call. Each wrapper's exit code goes to OUT/code-RANK. The options are the wrapper's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.job import HOLDFAST

STEPS, EVERY, MET_AT, EARLY = 12, 4, 9, 1
# Before a notice and after it: the step that all ranks save then is so many seconds ahead, at the speed so far.
STEP_SECONDS = 0.02
PAUSE_SECONDS_MAX = 240.0


def main() -> None:
    import torch  # only here: the process around `holdfast rank` does not need torch

    from trainer_side import Checkpointer, init_torch_distributed

    out, how = Path(sys.argv[1]), sys.argv[2]
    rank, _ = init_torch_distributed("gloo")
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    value = torch.zeros(1000)
    with Checkpointer({"value": value}, every=EVERY) as checkpointer:
        for step in range(checkpointer.restore(), STEPS):
            torch.distributed.all_reduce(torch.ones(1))
            value += 1
            time.sleep(STEP_SECONDS)
            checkpointer.step(step)
            while (step + 1) % EVERY == 0 and max(checkpointer.staged_step, checkpointer.kept_step) < step:
                time.sleep(0.01)
            if step == MET_AT and how == "leave":
                (out / f"paused-{rank}").touch()
                deadline = time.monotonic() + PAUSE_SECONDS_MAX
                while checkpointer.notice is None and time.monotonic() < deadline:
                    step += 1
                    torch.distributed.all_reduce(torch.ones(1))
                    time.sleep(STEP_SECONDS)
                    checkpointer.step(step)
                break
            if rank == 1 and (step, how) == (MET_AT, "raise"):
                raise ValueError("the bug of rank 1")
            if rank == 1 and (step, how) in {(MET_AT, "pause"), (EARLY, "early")}:
                (out / "paused-1").touch()
                if "CODED_KILLS" in os.environ:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(PAUSE_SECONDS_MAX)


def wrapped() -> None:
    out, how, *options = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    line = [HOLDFAST, "rank", *options, "--", sys.executable, __file__, out, how, "in it"]
    code = subprocess.run(line, check=False).returncode
    (Path(out) / f"code-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(str(code))


if __name__ == "__main__":
    main() if sys.argv[-1] == "in it" else wrapped()
