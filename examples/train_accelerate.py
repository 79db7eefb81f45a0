"""Trains a small network on scikit-learn's digits with Accelerate, accumulated gradients and holdfast's checkpoints.

    mpirun --with-ft ulfm -n 2 python examples/train_accelerate.py --every 20 : -n 1 holdfast stager --store URL

Run the same line again after a kill: it resumes from the newest good checkpoint, bit for bit. With `--sharded`
each rank holds a part of each tensor (FSDP2), and saves only that part. Lines that holdfast needs are marked with
`holdfast:` below; none of them is about FSDP2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Checkpointer, ResumableSampler, init_torch_distributed
from holdfast.integrations.accelerate import prepared

SEED = 7


class Average:
    """A moving average of the weights: a script's own object that must be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self._weights[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        for name, value in saved.items():
            self._weights[name].copy_(value)


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Apply FSDP2 as `Accelerator(fsdp_plugin=...)` does on GPUs but not on CPUs."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator.state.distributed_type = DistributedType.FSDP


def train(
    options: argparse.Namespace, watch: Callable[[int, float, list[int]], Any] = lambda *_: None
) -> dict[str, Any]:
    """Train and return the final state. `watch` gets step, loss and labels of each step."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, ranks = init_torch_distributed("gloo")  # holdfast: the ranks of this job, before the Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    if options.sharded:
        shard_on_cpu(accelerator)
    pixels, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(pixels.float() / 16, labels)
    torch.manual_seed(SEED)  # the same first weights on every rank
    # No batch norm under FSDP2: its statistics would differ between ranks.
    norm = nn.LayerNorm(48) if options.sharded else nn.BatchNorm1d(48)
    model: nn.Module = nn.Sequential(nn.Linear(64, 48), norm, nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps * ranks)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    average = Average(accelerator.unwrap_model(model))
    accelerator.register_for_checkpointing(average)
    torch.manual_seed(SEED + 1 + rank)  # each rank has its own dropout
    # holdfast: the order of samples, which resumes at the saved position; do not `prepare` this loader
    sampler = ResumableSampler(len(data), seed=SEED, rank=rank, ranks=ranks)
    loader = DataLoader(data, batch_sampler=sampler.ahead(options.batch_size))
    state = {**prepared(accelerator), "data": sampler}  # holdfast: all of it, by name
    with Checkpointer(state, every=options.every) as checkpointer:
        first = checkpointer.restore()
        batches: Iterator[Any] = sampler.follow(loader)
        for step in range(first, options.steps):
            total, seen = 0.0, []
            for _ in range(options.accumulate):
                x, y = (tensor.to(accelerator.device) for tensor in next(batches))
                with accelerator.accumulate(model):
                    loss = functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total += loss.item() / options.accumulate
                seen += y.tolist()
            average.update(accelerator.unwrap_model(model))
            checkpointer.step(step)  # holdfast: between two steps, when no gradients are left over
            watch(step, total, seen)
    return state


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of the whole training (default %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=20, help="steps between two checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=16, help="samples of each rank (default %(default)s)"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step (default %(default)s)")
    parser.add_argument("--sharded", action="store_true", help="split model and optimizer among the ranks")
    return parser


def main() -> None:
    options = arguments().parse_args()

    def tell(step: int, loss: float, _: list[int]) -> None:
        if torch.distributed.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step:4d}  loss {loss:.4f}", flush=True)

    train(options, tell)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
