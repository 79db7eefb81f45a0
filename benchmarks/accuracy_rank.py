"""Trains a classifier of handwritten digits, and records its accuracy on the test set after each epoch.

`holdfast run -n 2 … -- python -m benchmarks.accuracy_rank OUT EPOCHS WIDTH`: scikit-learn ships
the 8 by 8 digits; nothing is downloaded. Each epoch ends with a checkpoint. OUT gets a line of JSON for each epoch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

__all__ = ["BATCH", "TRAINED", "epoch_steps"]

TRAINED = 1408  # of 1797 images; the others are the test set
BATCH = 16
_SEED = 20


def epoch_steps(ranks: int) -> int:
    """Return the number of steps per epoch."""
    return TRAINED // (ranks * BATCH)


def main() -> None:
    out, epochs, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    from sklearn.datasets import load_digits  # `make figures` imports this module without scikit-learn

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, ranks = init_torch_distributed("gloo")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SEED))
    trained, tested = mixed[:TRAINED], mixed[TRAINED:]
    torch.manual_seed(_SEED)
    net = torch.nn.Sequential(
        torch.nn.Linear(images.shape[1], width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, 10),
    )
    model = DistributedDataParallel(net, find_unused_parameters=ranks > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    per_epoch = epoch_steps(ranks)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * per_epoch)
    sampler = ResumableSampler(TRAINED, seed=_SEED, rank=rank, ranks=ranks, drop_last=True)
    torch.manual_seed(_SEED + 1 + rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,
        "rng": PerRank(RngState()),
    }
    with Checkpointer(state, every=per_epoch) as checkpointer:
        first = checkpointer.restore()
        batches = sampler.batches(BATCH)
        for step in range(first, epochs * per_epoch):
            chosen = trained[next(batches)]
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            if (step + 1) % per_epoch == 0 and rank == 0:
                _tell(out, step // per_epoch + 1, net, images[tested], labels[tested], loss.item())
            checkpointer.step(step)
    torch.distributed.destroy_process_group()


def _tell(
    out: Path, epoch: int, net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, loss: float
) -> None:
    net.eval()
    with torch.no_grad():
        right = int((net(images).argmax(1) == labels).sum())
    net.train()
    line = {"epoch": epoch, "right": right, "of": len(labels), "loss": loss.hex(), "at_unix": time.time()}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
