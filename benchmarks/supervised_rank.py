"""A rank of a small training under `holdfast run` or torchrun, killed and restarted; rank 0 logs the steps' end times.

    restore ─► iterations of a timed wait, an update that takes as long as a device's would, `Checkpointer.step`
    --bare: the same iterations from step 0 on, and neither `trainer_side` nor MPI in the process
    --bare --peer: from the newest complete save of another way to checkpoint (benchmarks/peer_restart.py)

Each attempt writes `attempt-<number>.jsonl`: first its start time and step, then each step's end. Times are
`time.monotonic()`, one clock for the whole machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.device_update import install
from benchmarks.workload import Workload
from holdfast.supervised import ATTEMPT_VARIABLE

if TYPE_CHECKING:
    from benchmarks.peer_restart import PeerRestart
    from holdfast import Checkpointer

__all__ = ["main"]


def main() -> None:
    """Train until killed or stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--compute-seconds", type=float, required=True)
    parser.add_argument("--update-seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--peer", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank = _meet_bare() if given.bare else _meet()
    workload = Workload(given.model)
    install(workload, given.update_seconds)
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1")) + int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    path = given.out / f"attempt-{attempt}.jsonl" if rank == 0 else Path(os.devnull)
    peer = _restarting(given.peer, workload, given.out, attempt, given.every) if given.peer else None
    # A separate group: async_save uses the default one from another thread.
    trains = dist.new_group(backend="gloo") if peer else None
    with _joined(workload, given.every, bare=given.bare) as checkpointer, path.open("w") as log:
        begun = time.monotonic()
        step = checkpointer.restore() if checkpointer else peer.restore() if peer else 0
        dist.barrier()
        now = time.monotonic()
        log.write(json.dumps({"step": step, "at": now, "restore_seconds": now - begun}) + "\n")
        log.flush()
        while True:
            time.sleep(given.compute_seconds)
            dist.barrier(group=trains)
            if peer:
                peer.before_update()
            workload.update()
            if checkpointer:
                checkpointer.step(step)
            if peer:
                peer.step(step)
            log.write(json.dumps({"step": step, "at": time.monotonic()}) + "\n")
            log.flush()
            step += 1


def _meet() -> int:
    # Imported here and below, where a script would: a bare rank does not need these.
    from holdfast import init_torch_distributed

    return init_torch_distributed("gloo")[0]


def _meet_bare() -> int:
    """Initialize torch.distributed as a script without holdfast does, under torchrun or mpirun; return the rank."""
    if (rank := os.environ.get("OMPI_COMM_WORLD_RANK")) is not None:
        os.environ.update(RANK=rank, WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo")
    return dist.get_rank()


def _restarting(name: str, workload: Workload, out: Path, attempt: int, every: int) -> PeerRestart:
    from benchmarks.peer_restart import PeerRestart

    return PeerRestart(name, workload, out, attempt, every)


def _joined(workload: Workload, every: int, *, bare: bool) -> AbstractContextManager[Checkpointer | None]:
    if bare:
        return nullcontext()
    from holdfast import Checkpointer
    from holdfast.config import TrainerConfig

    return Checkpointer(workload.state(), every=every, config=TrainerConfig.from_sources(on_full="wait"))


if __name__ == "__main__":
    main()
