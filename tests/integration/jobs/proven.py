"""A small training with everything that a step may use; it is killed after a checkpoint, or resumes wrongly if told so.

proven.py STEPS KILL_AT [FAULT …]      KILL_AT: its step is the last that is done before the kill; -1: none
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from holdfast import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

EVERY = 4
_DURABLE_SECONDS_MAX = 60.0


def wait_for_durable(checkpointer: Checkpointer, step: int) -> None:
    deadline = time.monotonic() + _DURABLE_SECONDS_MAX
    while checkpointer.durable_step < step:
        assert time.monotonic() < deadline, f"step {step} is not durable"
        time.sleep(0.01)


def main(steps: int, kill_at: int, *faults: str) -> None:
    rank, world = init_torch_distributed("gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    sampler = ResumableSampler(1000, seed=3, rank=rank, ranks=world)
    samples = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1))
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,
        "rng": PerRank(RngState()),
    }
    with Checkpointer(state, every=EVERY) as checkpointer:
        first = checkpointer.restore()
        if first == 0 or "random" in faults:
            torch.manual_seed(100 + rank)
        batches = sampler.batches(4)
        if "data" in faults:
            next(batches)
        if "rate" in faults:
            optimizer.param_groups[0]["lr"] = 0.3
        for step in range(first, steps):
            batch = samples[next(batches)]
            loss = model(batch).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpointer.step(step, batch=batch, loss=loss)
            if step == first and checkpointer.restored is not None and checkpointer.restored.proof:
                print(f"rank {rank}: {checkpointer.restored.proof.verdict}", flush=True)
            if step == kill_at:
                wait_for_durable(checkpointer, (step + 1) // EVERY * EVERY - 1)
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
