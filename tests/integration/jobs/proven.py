"""A small training with everything that a step may use; dies after a checkpoint, or resumes wrongly with FAULT.

proven.py STEPS KILL_AT [FAULT …]      KILL_AT: the last step before the kill; -1: no kill

With local tiers the kill comes when each tier has the proof of every rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed
from tests.support.no_compiler import do_without_compiler

EVERY = 4
_SECONDS_MAX = 60.0


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def wait_for_safe(checkpointer: Checkpointer, step: int) -> None:
    """Wait until a kill would lose nothing of this step."""
    tiers = [Path(spec.partition(":")[2]) for spec in os.environ.get("HOLDFAST_TIERS", "").split(",") if spec]
    if not tiers:
        wait_for(f"step {step} is not durable", lambda: checkpointer.durable_step >= step)
        return
    wait_for(f"step {step} is not kept", lambda: checkpointer.kept_step >= step)
    for tier in tiers:
        wait_for(f"{tier} has not all proofs", partial(has_proofs, tier, checkpointer.ranks))


def has_proofs(tier: Path, ranks: int) -> bool:
    return len([*tier.rglob("*.proof")]) == ranks


def main(steps: int, kill_at: int, *faults: str) -> None:
    rank, world = init_torch_distributed("gloo")
    do_without_compiler()
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
            if "shuffled" in faults:
                batch = batch.flip(0)
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
                wait_for_safe(checkpointer, (step + 1) // EVERY * EVERY - 1)
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
