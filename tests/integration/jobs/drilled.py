"""A script for `holdfast drill`: `python drilled.py STEPS EVERY [BUG]`, with dropout, and data by a ResumableSampler.

BUG is a mistake that only a restart shows: `rng` does not save the random numbers, `data` not the place in the data.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

SAMPLES, FEATURES, BATCH, STEP_SECONDS = 64, 8, 4, 0.05


def main() -> None:
    steps, every, bugs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(1)
    data = torch.randn(SAMPLES, FEATURES)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, FEATURES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ResumableSampler(SAMPLES, seed=3, rank=rank, ranks=ranks)
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "rng": PerRank(RngState())}
    for bug in bugs:
        del state[bug]
    with Checkpointer(state, every=every) as checkpointer:
        batches = None
        for step in range(checkpointer.restore(), steps):
            batches = batches or sampler.batches(BATCH)
            x = data[torch.as_tensor(next(batches))]
            optimizer.zero_grad()
            ((model(x) - x) ** 2).mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                torch.distributed.all_reduce(parameter.grad)
            time.sleep(STEP_SECONDS)
            optimizer.step()
            checkpointer.step(step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
