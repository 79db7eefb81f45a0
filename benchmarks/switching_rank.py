"""One rank of a job that a scheduler suspends by SIGTERM, and resumes later.

    build ─► restore, if a checkpoint exists ─► train ─► SIGTERM ─► all ranks agree on a step ─► save it ─► safe ─► exit

Writes the time of each phase, `time.monotonic()`. Computation is a timed wait.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.device_update import install
from benchmarks.workload import Workload
from holdfast import Checkpointer
from holdfast.config import TrainerConfig

__all__ = ["WAYS", "main"]

WAYS = ("holdfast, memory tier", "holdfast, stager", "torch.save + torch.load")
_POLL_SECONDS = 0.001
_SAFE_SECONDS_MAX = 120.0


class _Way(Protocol):
    def restore(self) -> int: ...
    def save(self, step: int) -> None: ...
    def close(self) -> None: ...


class _Holdfast:
    """Safe means: sealed in the tier by all ranks, or staged in the stager's memory."""

    def __init__(self, workload: Workload, *, tier: bool) -> None:
        self._tier = tier
        self._checkpointer = Checkpointer(workload.state(), config=TrainerConfig.from_sources(on_full="wait"))

    def restore(self) -> int:
        return self._checkpointer.restore()

    def save(self, step: int) -> None:
        if not self._checkpointer.save(step):
            raise RuntimeError(f"step {step} was declined, though holdfast was told to wait")
        deadline = time.monotonic() + _SAFE_SECONDS_MAX
        while (self._checkpointer.kept_step if self._tier else self._checkpointer.staged_step) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} is not safe after {_SAFE_SECONDS_MAX:.0f} s")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._checkpointer.close()


class _TorchSave:
    """Rank 0 writes; every rank loads. A file gets its name once it is complete and synced."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload, self._path = workload, folder / "torch.pt"

    def restore(self) -> int:
        if not self._path.exists():
            return 0
        loaded = torch.load(self._path, weights_only=True)
        self._workload.model.load_state_dict(loaded["model"])
        self._workload.optimizer.load_state_dict(loaded["optimizer"])
        return int(loaded["step"]) + 1

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            whole = self._path.with_suffix(".new")
            with whole.open("wb") as file:
                torch.save({**self._workload.state_dict(), "step": step}, file)
                file.flush()
                os.fsync(file.fileno())
            whole.rename(self._path)
        dist.barrier()

    def close(self) -> None:
        pass


def _way(name: str, workload: Workload, folder: Path) -> _Way:
    if name == WAYS[2]:
        return _TorchSave(workload, folder)
    return _Holdfast(workload, tier=name == WAYS[0])


def main() -> None:
    """Train until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True, help="Of an iteration.")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    told: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    marks = {"imported": time.monotonic()}
    workload = Workload(given.model)
    install(workload, given.seconds / 4)
    marks["built"] = time.monotonic()
    way = _way(given.way, workload, given.out)
    step = marks["from_step"] = way.restore()
    dist.barrier()
    marks["restored"] = time.monotonic()
    while True:
        time.sleep(3 * given.seconds / 4)
        workload.update()
        ended = torch.tensor(float(bool(told)))
        dist.all_reduce(ended)  # the ranks agree on whether this step is the last
        if "trained" not in marks:
            marks["trained"] = time.monotonic()
            (given.out / f"pid-{rank}").write_text(str(os.getpid()))
        if ended.item():
            break
        step += 1
    marks["agreed"] = time.monotonic()
    way.save(step)
    dist.barrier()
    marks["safe"] = time.monotonic()
    way.close()
    dist.barrier()
    dist.destroy_process_group()
    marks |= {"told": min(told, default=marks["agreed"]), "step": step}
    (given.out / f"marks-{rank}.json").write_text(json.dumps(marks))


if __name__ == "__main__":
    main()
