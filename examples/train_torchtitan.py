"""Trains a small network on scikit-learn's digits under FSDP2, in a loop like torchtitan's, with holdfast.

    mpirun --with-ft ulfm -n 2 python examples/train_torchtitan.py --every 20 : -n 1 holdfast stager --store URL

`Trainer` calls its checkpoint manager where torchtitan's Trainer does; its containers of optimizers and schedulers are
small versions of torchtitan's. Run the same line again after a kill: it resumes from the newest good checkpoint, bit
for bit. Lines that holdfast needs are marked with `holdfast:` below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from holdfast import ResumableSampler, init_torch_distributed
from holdfast.integrations.epochs import EpochLoader
from holdfast.integrations.torchtitan import HoldfastCheckpointManager

SEED = 7


class Optimizers(torch.optim.Optimizer):
    """A container that is itself an optimizer, with one optimizer for matrices and another for the rest."""

    def __init__(self, model: nn.Module) -> None:
        every = list(model.parameters())
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW([one for one in every if one.ndim > 1], lr=3e-3),
            torch.optim.SGD([one for one in every if one.ndim == 1], lr=3e-2, momentum=0.9),
        ]
        super().__init__(every, {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


class Schedulers:
    """One scheduler for each optimizer, all at the same step."""

    def __init__(self, optimizers: Optimizers, steps: int) -> None:
        self._all = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
            for optimizer in optimizers
        ]

    def step(self) -> None:
        for scheduler in self._all:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self._all[0].last_epoch}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for scheduler in self._all:
            scheduler.last_epoch = saved["last_epoch"]
            scheduler._last_lr = scheduler.get_lr()


class Trainer:
    """The training loop, with a state of its own; steps count from 1."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        rank, ranks = init_torch_distributed("gloo")  # holdfast: the ranks of this job, before torchtitan
        self.step, self.samples_seen, self.steps = 0, 0, options.steps
        torch.manual_seed(SEED)  # the same first weights on every rank
        model = nn.Sequential(
            nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 10)
        )
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        self.model_parts: list[nn.Module] = [model]
        torch.manual_seed(SEED + 1 + rank)  # each rank has its own dropout
        self.optimizers = Optimizers(model)
        self.lr_schedulers = Schedulers(self.optimizers, options.steps)
        pixels, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
        data = TensorDataset(pixels.float() / 16, labels)
        # holdfast: the order of samples, which resumes at the saved position
        sampler = ResumableSampler(len(data), seed=SEED, rank=rank, ranks=ranks)
        self.dataloader = EpochLoader(DataLoader(data, batch_sampler=sampler.ahead(options.batch_size)))
        self.checkpointer = HoldfastCheckpointManager(  # holdfast: replaces torchtitan's
            SimpleNamespace(interval=options.every),  # torchtitan: config.checkpoint
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
        )

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[float, list[int]]:
        """Run one step; return this rank's loss and labels."""
        self.optimizers.zero_grad()
        x, y = next(batches)
        loss = functional.cross_entropy(self.model_parts[0](x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.samples_seen += len(y)
        return loss.item(), y.tolist()

    def train(self, watch: Callable[[int, float, list[int]], Any]) -> None:
        self.checkpointer.load()
        batches = iter(self.dataloader)
        while self.step < self.steps:
            self.step += 1
            loss, labels = self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == self.steps)
            watch(self.step, loss, labels)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "samples_seen": self.samples_seen}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step, self.samples_seen = saved["step"], saved["samples_seen"]

    def close(self) -> None:
        self.checkpointer.close()
        torch.distributed.destroy_process_group()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of the whole training (default %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=20, help="steps between two checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples of each rank (default %(default)s)"
    )
    return parser


def main() -> None:
    trainer = Trainer(arguments().parse_args())

    def tell(step: int, loss: float, _: list[int]) -> None:
        if torch.distributed.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {loss:.4f}", flush=True)

    trainer.train(tell)
    trainer.close()


if __name__ == "__main__":
    main()
