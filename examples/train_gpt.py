"""Trains a small byte-level GPT on the text of Python's own standard library, with holdfast's checkpoints.

    mpirun --with-ft ulfm -n 2 python examples/train_gpt.py --every 20 : -n 1 holdfast stager --store URL

Run the same line again after a kill, on this machine or on others: it resumes from the newest good checkpoint,
bit for bit. Lines that holdfast needs in a training script are marked with `holdfast:` below. The rest is an
ordinary data-parallel PyTorch script, kept deterministic so that two runs can be compared bit for bit.

With `--every 0` no checkpoint is taken and no stager is needed: the reference of `make demo`.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from holdfast import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

CONTEXT = 64  # bytes that the model sees at once
TEXT_BYTES_MAX = 4 << 20
SEED = 1234


class Block(nn.Module):
    """One transformer block: attention and a two-layer perceptron, each on a normalised copy."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + functional.dropout(
            self.out(mixed.transpose(1, 2).reshape(batch, length, width)), dropout, self.training
        )
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A byte-level GPT; its head shares the embedding's weight, and stays tied in the checkpoint."""

    def __init__(self, *, layers: int, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def standard_library_text() -> Tensor:
    """Return the concatenated `*.py` files of the standard library: text that every machine has."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:TEXT_BYTES_MAX]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_deterministic(rank: int) -> None:
    """Make equal states give equal bits: one thread fixes the order of sums; each rank seeds its own dropout."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED + rank)
    # Nothing here draws from these two, but `RngState` saves them: without a seed they would differ between runs.
    random.seed(SEED + rank)
    np.random.seed(SEED + rank)


class NoCheckpoints:
    """Replaces the `Checkpointer` in runs without checkpoints, for comparison."""

    def __enter__(self) -> NoCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def restore(self) -> int:
        return 0

    def step(self, step: int, *, loss: torch.Tensor) -> bool:  # noqa: ARG002 - the Checkpointer's signature
        return False


class Progress:
    """Reports progress: a JSON line for each step in a file, or a line every ten steps on the terminal."""

    def __init__(self, path: Path | None, *, quiet: bool) -> None:
        self._file = path.open("a", encoding="utf-8") if path is not None and not quiet else None
        self._quiet = quiet

    def tell(self, step: int, loss: float, seconds: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "loss": loss, "seconds": round(seconds, 6)}) + "\n")
            self._file.flush()
        elif not self._quiet and (step + 1) % 10 == 0:
            print(f"step {step:5d}  loss {loss:.4f}  {seconds:.2f} s", flush=True)


def train(options: argparse.Namespace) -> None:
    # holdfast: torch.distributed among the training ranks of this job
    rank, ranks = init_torch_distributed("gloo")
    torch.manual_seed(SEED)  # the same first weights on every rank
    model = GPT(layers=options.layers, width=options.width, heads=options.width // 64)
    make_deterministic(rank)
    # With three or more ranks the order of sums matters. DDP rebuilds its buckets in a process's second step, which
    # is a different training step in a resumed process; `find_unused_parameters` keeps the buckets as they are.
    ddp = DistributedDataParallel(model, find_unused_parameters=ranks > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
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
            logits = ddp(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # waits only while the state is still being copied
            optimizer.zero_grad()
            scheduler.step()
            # holdfast: saves after every `every` steps; compares the loss of the first step after a resume
            checkpointer.step(step, loss=loss)
            progress.tell(step, loss.item(), time.perf_counter() - begun)
        # holdfast: leaving the `with` waits until the last checkpoint is durable
    if options.final is not None and rank == 0:
        final = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(final, options.final)
    dist.destroy_process_group()


def parse(description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps of the whole training (default %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=20, help="steps between two checkpoints; 0: none (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=4, help="samples of each rank in a step (default %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=384, help="model width, a multiple of 64 (default %(default)s)"
    )
    parser.add_argument("--final", type=Path, help="rank 0 saves the final state here with torch.save")
    parser.add_argument("--progress", type=Path, help="rank 0 appends a JSON line for each step to this file")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
