"""A rank of a small training under `holdfast run` or torchrun, killed and started again; rank 0 tells when steps end.

    restore ─► iterations of a timed wait, an update that takes as long as a device's would, `Checkpointer.step`

A file for each attempt, `attempt-<number>.jsonl`: first when it trains and from which step, then each step's end. Times
are `time.monotonic()`, one clock for the whole machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.device_update import install
from benchmarks.workload import Workload
from holdfast.config import TrainerConfig
from holdfast.supervised import ATTEMPT_VARIABLE
from trainer_side import Checkpointer, init_torch_distributed

__all__ = ["main"]


def main() -> None:
    """Train until somebody ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--compute-seconds", type=float, required=True)
    parser.add_argument("--update-seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    workload = Workload(given.model)
    install(workload, given.update_seconds)
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1")) + int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    path = given.out / f"attempt-{attempt}.jsonl" if rank == 0 else Path(os.devnull)
    config = TrainerConfig.from_sources(on_full="wait")
    with (
        Checkpointer(workload.state(), every=given.every, config=config) as checkpointer,
        path.open("w") as log,
    ):
        begun = time.monotonic()
        step = checkpointer.restore()
        dist.barrier()
        now = time.monotonic()
        log.write(json.dumps({"step": step, "at": now, "restore_seconds": now - begun}) + "\n")
        log.flush()
        while True:
            time.sleep(given.compute_seconds)
            dist.barrier()
            workload.update()
            checkpointer.step(step)
            log.write(json.dumps({"step": step, "at": time.monotonic()}) + "\n")
            log.flush()
            step += 1


if __name__ == "__main__":
    main()
