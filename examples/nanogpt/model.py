"""The model of both loops, and the files that they map: the text of Python's standard library, one number per byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT_BYTES_MAX = 1 << 20


def prepare(folder: Path, rank: int) -> None:
    """Write `train.bin` and `val.bin`. Every rank may call this: a rename puts each file in place."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:TEXT_BYTES_MAX]
    numbers = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    border = len(numbers) * 9 // 10
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.bin", numbers[:border]), ("val.bin", numbers[border:])):
        written = folder / f"{name}.{rank}"
        part.tofile(written)
        written.rename(folder / name)


class CharacterModel(nn.Module):
    """A small causal transformer over bytes, with dropout."""

    def __init__(self, *, layers: int, width: int, block_size: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        x = self.embed(tokens) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
