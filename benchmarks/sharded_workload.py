"""A transformer's weights under FSDP2 or HSDP with AdamW, of a given size: no rank ever holds all of them.

    fsdp2-N     N MB of parameters and moments, split over all ranks
    hsdp-N      the same on a mesh of two replicas: each half of the ranks holds the whole state

The model is made on the `meta` device, split, and only then filled, so a rank only ever has its own shards in memory.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.workload import ADAM_COPIES, FLOAT_BYTES, SEED, Workload

__all__ = ["KINDS", "ShardedWorkload"]

KINDS = ("fsdp2", "hsdp")
_BLOCKS = 10
_WORDS_PER_WIDTH = 8
_REPLICAS = 2
_STANDARD_DEVIATION = 0.02


class _Block(nn.Module):
    """The parameters of one transformer layer, which is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class _Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS_PER_WIDTH * width, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(width)


class ShardedWorkload(Workload):
    """Model and optimizer of one rank; torch.distributed is initialised.

    Args:
        model: `fsdp2-N` or `hsdp-N`.
    """

    def __init__(self, model: str) -> None:
        kind, megabytes = model.split("-")
        ranks = dist.get_world_size()
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (ranks,))
        else:
            if ranks % _REPLICAS:
                raise ValueError(f"{model} needs a multiple of {_REPLICAS} ranks, got {ranks}")
            mesh = init_device_mesh(
                "cpu", (_REPLICAS, ranks // _REPLICAS), mesh_dim_names=("replicas", "shards")
            )
        self._name = model
        self.keeps_gradients = False
        numel = int(megabytes) * 1_000_000 / (FLOAT_BYTES * ADAM_COPIES)
        with torch.device("meta"):
            split = _Transformer(max(1, round(math.sqrt(numel / (12 * _BLOCKS + _WORDS_PER_WIDTH)))))
        for block in split.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(split, mesh=mesh)
        self.model = split.to_empty(device="cpu")
        # Replicas of a shard hold the same bytes; different shards hold different ones.
        self._generator = torch.Generator().manual_seed(SEED + mesh.get_local_rank(mesh.ndim - 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                self._fill(parameter)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.make_gradients()
        self.update()

    def make_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)
            self._fill(parameter.grad)

    def compute(self) -> None:
        raise NotImplementedError(f"{self._name} has nothing to compute: its computation is a timed wait")

    def _fill(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, DTensor)
        tensor.to_local().detach().normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)
