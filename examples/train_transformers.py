"""Trains a small network on scikit-learn's digits with Hugging Face's Trainer and holdfast's checkpoints.

    mpirun --with-ft ulfm -n 2 python examples/train_transformers.py --every 20 : -n 1 holdfast stager --store URL

Run the same line again after a kill: it resumes from the newest good checkpoint, bit for bit. With `--sharded`
each rank holds a part of each tensor (FSDP2), and saves only that part. Lines that holdfast needs are marked with
`holdfast:` below; none of them is about FSDP2.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from holdfast import init_torch_distributed
from holdfast.integrations.transformers import HoldfastCallback

SEED = 7


class Digits(nn.Module):
    """Two layers with dropout; also batch norm, except under FSDP2, where its statistics would differ between ranks.

    `forward` returns loss and logits in Trainer's format.
    """

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm(48) if sharded else nn.BatchNorm1d(48)
        self.net = nn.Sequential(nn.Linear(64, 48), norm, nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A part of the digits."""

    def __init__(self, first: int, end: int) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self._pixels, self._labels = (
            torch.as_tensor(pixels[first:end]).float() / 16,
            torch.as_tensor(labels[first:end]),
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self._pixels[index], "labels": self._labels[index]}


def shard_on_cpu(trainer: Trainer) -> None:
    """Apply FSDP2 as `TrainingArguments(fsdp=True, fsdp_config={"version": 2})` does on GPUs but not on CPUs."""
    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def train(options: argparse.Namespace, *callbacks: TrainerCallback, **more: Any) -> Trainer:
    """Train; `callbacks` are for tests that watch."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, _ = init_torch_distributed("gloo")  # holdfast: the ranks of this job, before TrainingArguments
    set_seed(SEED)  # the same first weights on every rank
    model = Digits(sharded=options.sharded)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            seed=SEED,
            data_seed=SEED,  # holdfast: the order of samples, the same on every rank and in every attempt
            eval_strategy="steps",
            eval_steps=options.every,
            save_strategy="no",
            logging_steps=options.every,
            report_to="none",
            disable_tqdm=True,
            **more,
        )
        holdfast = HoldfastCallback(every=options.every)  # holdfast: saves
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Images(0, 1500),
            eval_dataset=Images(1500, 1797),
            callbacks=[holdfast, *callbacks],
        )
        if options.sharded:
            shard_on_cpu(trainer)
        set_seed(SEED + 1 + rank)  # each rank has its own dropout
        trainer.train(resume_from_checkpoint=holdfast.restore(trainer))  # holdfast: restores
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
        "--batch-size", type=int, default=16, help="samples of each rank (default %(default)s)"
    )
    parser.add_argument("--sharded", action="store_true", help="split model and optimizer among the ranks")
    return parser


def main() -> None:
    trainer = train(arguments().parse_args())
    if trainer.is_world_process_zero():
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        print(f"{trainer.state.global_step} steps; validation loss: {losses[-1]:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
