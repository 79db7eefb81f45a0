"""Saves while the store accepts nothing, then lets the store continue: `python in_flight.py OUT STEPS`. Or
`python in_flight.py OUT --restore`: restores each accepted step, and compares it with the saved state.

Every tensor changes with every step, so all checkpoints differ. Rank 0 keeps a copy of each saved state beside the
store. Writes to OUT, per rank: the result of each `save()` while the store accepted nothing, and the memory
before and after.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.integration.jobs.pressure import CLEAR_PEAK, memory
from tests.support.cluster import load, same
from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

TENSORS, NUMEL = 36, 50_000


def made() -> tuple[torch.nn.ParameterList, torch.optim.SGD]:
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(TENSORS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    return model, optimizer


def train(model: torch.nn.ParameterList, optimizer: torch.optim.SGD, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model:
        assert parameter.grad is not None
        parameter.grad.normal_()
    optimizer.step()
    torch.distributed.all_reduce(torch.ones(1))


def bits(model: torch.nn.ParameterList, optimizer: torch.optim.SGD) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def press(out: Path, steps: int) -> None:
    stall = Path(os.environ["THROTTLED_STALL"])
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    model, optimizer = made()
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer})
    if rank == 0:
        stall.touch()
    train(model, optimizer, 0)
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    said: dict[str, Any] = {"took": [], "baseline": memory()["VmRSS"]}
    for step in range(1, steps + 1):
        train(model, optimizer, step)
        if rank == 0:
            torch.save(bits(model, optimizer), out / f"saved-{step}.pt")
        said["took"].append(checkpointer.save(step))
        time.sleep(0.3)  # enough time to send all, if there were room
    said["peak"] = memory()["VmHWM"]
    torch.distributed.all_reduce(torch.ones(1))
    if rank == 0:
        stall.unlink()
    checkpointer.close()
    said |= {"declined": checkpointer.stats.declined, "causes": checkpointer.stats.causes}
    said["durable_step"] = checkpointer.durable_step
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


def restore(out: Path) -> None:
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    model, optimizer = made()
    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        right = {}
        for step in (int(file.stem.partition("-")[2]) for file in sorted(out.glob("taken-*"))):
            checkpointer.restore(step=step)
            right[step] = same(bits(model, optimizer), load(out / f"saved-{step}.pt"))
    (out / f"restored-{rank}.json").write_text(json.dumps(right))
    torch.distributed.destroy_process_group()


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if sys.argv[2] == "--restore":
        restore(out)
    else:
        press(out, int(sys.argv[2]))


if __name__ == "__main__":
    main()
