"""Trains one net in any order of DDP and torch.compile, and saves every step: `python wrapped.py OUT STEPS FORM`.

Each rank writes its parameters and moments, in order and without names: `OUT/restored-RANK.pt` after a restore,
`OUT/final-RANK.pt` at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_side import Checkpointer, init_torch_distributed


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # the names are those of every backend


def net(first: Callable[[nn.Module], Any] = lambda layer: layer) -> nn.Module:
    return nn.Sequential(first(nn.Linear(9, 33)), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 9))


FORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "ddp-of-compiled": lambda: DistributedDataParallel(compiled(net())),
    "compiled-ddp": lambda: compiled(DistributedDataParallel(net())),
    "one-layer-compiled": lambda: DistributedDataParallel(net(compiled)),
}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return parameters and moments, in order."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        tensors += [optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in tensors]


def main() -> None:
    out, steps, form = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rank, _ = init_torch_distributed("gloo")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(form))  # other initial weights, so that a missing restore shows
    model = FORMS[form]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        first = checkpointer.restore()
        if checkpointer.restored is not None:
            torch.save(held(model, optimizer), out / f"restored-{rank}.pt")
        for step in range(first, first + steps):
            torch.manual_seed(step)
            model(torch.randn(6, 9)).square().mean().backward()
            if form == "plain":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert checkpointer.save(step), f"step {step} was declined"
            checkpointer.wait_copied()
    torch.save(held(model, optimizer), out / f"final-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
