"""The loop of `train.py` with holdfast: killed at any point, it resumes with the batch already drawn.

    holdfast run --launcher torchrun -n 2 --store URL -- -m examples.nanogpt.train_resumable

Run the same line again after a kill. docs/data.md shows the difference to `train.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from examples.nanogpt.model import CharacterModel, prepare
from holdfast import Checkpointer, PerRank, ResumableDraw, RngState, init_torch_distributed


def train(
    options: argparse.Namespace, watch: Callable[[int, float, Tensor], Any] = lambda *_: None
) -> CharacterModel:
    """Train. `watch` gets step, loss and the last batch of each step."""
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    torch.manual_seed(1337 + rank)  # each rank has other batches and another dropout
    prepare(options.data, rank)
    block_size, batch_size = options.block_size, options.batch_size

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        data = np.memmap(options.data / f"{split}.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - block_size, (batch_size,))
        rows = np.stack([data[start : start + block_size + 1] for start in starts.tolist()]).astype(np.int64)
        batch = torch.from_numpy(rows)
        return batch[:, :-1], batch[:, 1:]

    model = CharacterModel(layers=options.layers, width=options.width, block_size=block_size)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        losses = {split: model(*get_batch(split)).item() for split in ("train", "val")}
        model.train()
        return losses

    draw = ResumableDraw(get_batch)
    state = {"model": model, "optimizer": optimizer, "draw": draw, "rng": PerRank(RngState())}
    with Checkpointer(state, every=options.every) as checkpointer:
        first = checkpointer.restore()
        x, y = draw("train")  # the very first batch, or the one in hand
        for step in range(first, options.steps):
            if step % options.eval_every == 0 and rank == 0:
                print(f"step {step:5d}  {estimate_loss()}", flush=True)
            for micro in range(options.accumulate):
                ddp.require_backward_grad_sync = micro == options.accumulate - 1
                loss = ddp(x, y) / options.accumulate
                trained, (x, y) = x, draw("train")  # the next one, while the device works on this one
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            checkpointer.step(step, batch=trained, loss=loss)
            watch(step, loss.item(), trained)
    return model


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("nanogpt-data"), help="folder of the mapped files")
    parser.add_argument("--steps", type=int, default=200, help="steps of the whole training")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--eval-every", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of each rank in a batch")
    parser.add_argument("--block-size", type=int, default=64, help="characters in a row")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    return parser


if __name__ == "__main__":
    train(arguments().parse_args())
    dist.destroy_process_group()
