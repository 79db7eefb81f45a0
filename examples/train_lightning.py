"""Trains a small network on scikit-learn's digits with PyTorch Lightning and holdfast's checkpoints.

    mpirun --with-ft ulfm -n 2 python examples/train_lightning.py --every 20 : -n 1 holdfast stager --store URL

Run the same line again after a kill: it resumes from the newest good checkpoint, bit for bit. With `--sharded`
each rank holds a part of each tensor (FSDP2, by Lightning's `ModelParallelStrategy`), and saves only that part. Lines
that holdfast needs are marked with `holdfast:` below; none of them is about FSDP2.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from holdfast import ResumableSampler
from holdfast.integrations.epochs import EpochLoader
from holdfast.integrations.lightning import HoldfastCallback, HoldfastEnvironment

SEED = 7


class Digits(LightningModule):
    """Two layers with dropout; also batch norm, except under FSDP2, where its statistics would differ between ranks."""

    def __init__(self, steps: int, *, sharded: bool) -> None:
        super().__init__()
        self._steps, self._sharded = steps, sharded
        norm = nn.LayerNorm(48) if sharded else nn.BatchNorm1d(48)
        self.net = nn.Sequential(nn.Linear(64, 48), norm, nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 10))

    def configure_model(self) -> None:
        if self._sharded and self.device_mesh is not None:
            for layer in (self.net[0], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("loss", functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self._steps),
                "interval": "step",
            },
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
                "monitor": "loss",
            },
        ]


def train(options: argparse.Namespace, *callbacks: Callback) -> Trainer:
    """Train; `callbacks` are for tests that watch."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    environment = HoldfastEnvironment("gloo")  # holdfast: the ranks of this job, without the stager
    rank, ranks = environment.global_rank(), environment.world_size()
    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    learned, kept_back = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    torch.manual_seed(SEED)  # the same first weights on every rank
    model = Digits(options.steps, sharded=options.sharded)
    torch.manual_seed(SEED + 1 + rank)  # each rank has its own dropout
    # holdfast: the order of samples, which resumes at the saved position
    sampler = ResumableSampler(len(learned), seed=SEED, rank=rank, ranks=ranks, drop_last=True)
    loader = EpochLoader(DataLoader(learned, batch_sampler=sampler.ahead(options.batch_size)))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1) if options.sharded else "ddp",
        plugins=[environment],
        callbacks=[HoldfastCallback(every=options.every), *callbacks],  # holdfast: saves and restores
        max_steps=options.steps,
        use_distributed_sampler=False,  # holdfast: the sampler gives each rank its own samples
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, DataLoader(kept_back, batch_size=99))
    return trainer


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=400, help="steps of the whole training (default %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=20, help="steps between two checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples of each rank (default %(default)s)"
    )
    parser.add_argument("--sharded", action="store_true", help="split model and optimizer among the ranks")
    return parser


def main() -> None:
    trainer = train(arguments().parse_args())
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps; validation loss: {trainer.callback_metrics['loss']:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
