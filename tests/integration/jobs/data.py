"""A training job whose loader has workers and prefetch, for tests of the samples that it trains on.

`python data.py OUT STEPS EVERY SAMPLES BATCH DIES_AT`: after each step each rank writes a line with the step's samples.
Saves every EVERY steps. In the middle of step DIES_AT every rank sends itself SIGKILL, once a checkpoint exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.integration.jobs.train import wait_until_staged
from tests.support.no_compiler import do_without_compiler
from trainer_side import (
    Checkpointer,
    PerRank,
    ResumableSampler,
    RngState,
    SeededSamples,
    init_torch_distributed,
)

SEED = 11
_WORKERS = 2
_STAGED_SECONDS_MAX = 60.0
_ALIVE_SECONDS = 0.2


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is its index, and a random number drawn in the worker."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(1).item()])


def main() -> None:
    out = Path(sys.argv[1])
    steps, every, samples, batch_size, dies_at = (int(word) for word in sys.argv[2:])
    torch.set_num_threads(1)
    # Workers poll this often whether their rank lives; mpirun ends when the last worker has.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = _ALIVE_SECONDS  # type: ignore[attr-defined]
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ResumableSampler(samples, seed=SEED, rank=rank, ranks=ranks)
    loader: DataLoader[Any] = DataLoader(
        SeededSamples(Noisy(samples), seed=SEED),
        batch_sampler=sampler.ahead(batch_size, epochs=True),
        num_workers=_WORKERS,
        prefetch_factor=3,
    )
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "rng": PerRank(RngState())}
    with Checkpointer(state, every=every) as checkpointer, (out / f"trained-{rank}").open("a") as trained:
        first, saved = checkpointer.restore(), -1
        for step, batch in zip(range(first, steps), sampler.follow(loader), strict=False):
            loss = model(batch / samples).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                torch.distributed.all_reduce(parameter.grad)
            if step == dies_at:
                _die(checkpointer)
            optimizer.step()
            line = {"step": step, "loss": loss.item().hex(), "samples": [int(index) for index, _ in batch]}
            trained.write(json.dumps(line) + "\n")
            trained.flush()
            if (step + 1) % every == 0:
                wait_until_staged(checkpointer, saved)
            if checkpointer.step(step):
                saved = step
    torch.distributed.destroy_process_group()


def _die(checkpointer: Checkpointer) -> None:
    deadline = time.monotonic() + _STAGED_SECONDS_MAX
    while checkpointer.staged_step < 0:
        if time.monotonic() > deadline:
            sys.exit("nothing was staged")
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
