"""Trains the GPT of train_gpt.py with FSDP2: each rank holds a part of each tensor, and saves only that part.

    mpirun --with-ft ulfm -n 2 python examples/train_fsdp.py --every 20 : -n 1 holdfast stager --store URL

Each checkpoint is one file with whole tensors, which plain `torch.load` opens; no rank gathers them. Run the same line
again after a kill: it resumes from the newest good checkpoint, bit for bit on the same number of ranks. With more or
fewer ranks (`-n 4`) it resumes the same state, split differently. Lines that holdfast needs are marked with `holdfast:`
below; none of them is about FSDP.

With `--every 0` no checkpoint is taken and no stager is needed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from train_gpt import (  # type: ignore[import-not-found]
    CONTEXT,
    GPT,
    SEED,
    NoCheckpoints,
    Progress,
    make_deterministic,
    parse,
    standard_library_text,
)

from holdfast import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed


def sharded(model: GPT, ranks: int) -> GPT:
    """Shard each block separately, and the rest (the embedding, which the head shares) together."""
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(options: argparse.Namespace) -> None:
    # holdfast: torch.distributed among the training ranks of this job
    rank, ranks = init_torch_distributed("gloo")
    torch.manual_seed(SEED)  # the same first weights on every rank
    model = sharded(GPT(layers=options.layers, width=options.width, heads=options.width // 64), ranks)
    make_deterministic(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)  # after sharding
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=options.steps + 1)
    text = standard_library_text()
    sampler = ResumableSampler(len(text) // (CONTEXT + 1), seed=SEED, rank=rank, ranks=ranks)

    state = {  # holdfast: what a checkpoint holds, by name
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,  # its position, so that no sample is skipped or repeated
        "rng": PerRank(RngState()),  # every rank has its own dropout
    }
    progress = Progress(options.progress, quiet=rank != 0)
    with Checkpointer(state, every=options.every) if options.every else NoCheckpoints() as checkpointer:
        first = checkpointer.restore()  # holdfast: the next step to run; 0 on a new run
        batches = sampler.batches(options.batch_size)
        for step in range(first, options.steps):
            begun = time.perf_counter()
            starts = [index * (CONTEXT + 1) for index in next(batches)]
            batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # waits only for parts that are still being copied
            optimizer.zero_grad()
            scheduler.step()
            checkpointer.step(step)  # holdfast: saves after every `every` steps
            progress.tell(step, loss.item(), time.perf_counter() - begun)
        # holdfast: leaving the `with` waits until the last checkpoint is durable
    if options.final is not None:
        final = whole(model, optimizer) | {"scheduler": scheduler.state_dict()}
        if rank == 0:
            torch.save(final, options.final)
    dist.destroy_process_group()


def whole(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state with whole tensors, gathered by torch, to compare two runs. Collective."""
    model_state, optimizer_state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    return {"model": model_state, "optimizer": optimizer_state}


if __name__ == "__main__":
    train(parse(__doc__))
