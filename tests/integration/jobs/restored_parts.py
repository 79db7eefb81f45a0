"""A training job of FSDP2 that starts from a file of a plain model: `python restored_parts.py OUT`.

Each rank writes facts about its restore; rank 0 also the whole state, gathered by torch, before and after a step.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

WIDTH = 201


def net(seed: int) -> nn.Sequential:
    """Return a net with tied weights, and sizes that two ranks cannot split evenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model[2].weight = model[0].weight
    return model


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    optimizer.zero_grad()
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()


def whole(node: Any) -> Any:
    """Return a copy of the tree with every DTensor gathered."""
    if isinstance(node, DTensor):
        return node.full_tensor()
    if isinstance(node, dict):
        return {key: whole(value) for key, value in node.items()}
    if isinstance(node, list):
        return [whole(value) for value in node]
    return node.clone() if isinstance(node, torch.Tensor) else node


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    model = net(seed=2)
    fully_shard(model[3])
    fully_shard(model)
    optimizer = adam(model)
    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        with CommDebugMode() as exchanged:  # type: ignore[no-untyped-call]
            first = checkpointer.restore()
        restored = checkpointer.restored
        assert restored is not None
        said: dict[str, Any] = {
            "first": first,
            "bytes_read": restored.bytes_read,
            "sources": [*restored.sources],
        }
        said["collectives"] = exchanged.get_total_counts()
        before = whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        take_step(model, optimizer)
        after = whole(model.state_dict())
    if rank == 0:
        torch.save({"before": before, "after": after}, out / "whole.pt")
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
