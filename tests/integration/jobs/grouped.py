"""A training whose loaders have workers, ended by SIGTERM to all its processes: `python grouped.py OUT HOW`.

HOW: `early`: step STANDS_AT pauses before its update, so the loader raises in a step that has only changed the
sampler's position and the random state; `late`: the step pauses after the update, before `step()`; `plain`: no pause.
OUT/standing-RANK appears at the pause; OUT/final-RANK.pt has the final state.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

STEPS, STANDS_AT, STANDS_SECONDS = 12, 5, 100.0


def stand(out: Path, rank: int) -> None:
    (out / f"standing-{rank}").write_text(str(os.getpid()))
    time.sleep(STANDS_SECONDS)


def main() -> None:
    out, how = Path(sys.argv[1]), sys.argv[2]
    out.mkdir(exist_ok=True)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(400, 8))
    sampler = ResumableSampler(len(data), seed=3, rank=rank, ranks=ranks)
    loader = DataLoader(data, batch_sampler=sampler.ahead(4), num_workers=2)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "rng": PerRank(RngState()), "note": [1]}
    with Checkpointer(state, every=10_000) as checkpointer:
        torch.manual_seed(rank)
        start = checkpointer.restore()
        batches = iter(sampler.follow(loader))
        for step in range(start, STEPS):
            torch.distributed.barrier()
            (batch,) = next(batches)
            loss = model(batch).square().mean()
            if how == "early" and step == STANDS_AT:
                stand(out, rank)
            loss.backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if how == "late" and step == STANDS_AT:
                stand(out, rank)
            checkpointer.step(step)
    drawn = torch.rand(3)
    torch.save(
        {"start": start, "model": model.state_dict(), "data": sampler.state_dict(), "drawn": drawn},
        out / f"final-{rank}.pt",
    )


if __name__ == "__main__":
    main()
