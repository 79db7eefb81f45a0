"""A job whose optimizer has its parameters and groups in a given order.

`python reordered.py ddp|fsdp abc|cab STEPS OUT`: trains until STEPS steps are done, saves each of them, and writes the
parameters and their moments to OUT by name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

_RATES = {"a": 0.1, "b": 0.03, "c": 0.01}


class Net(nn.Module):
    """Three parts of one shape: only their names differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in _RATES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def main(way: str, order: str, steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(order == "abc")  # weights of another order must come from the checkpoint
    net = Net()
    ddp: nn.Module = net
    if way == "fsdp":
        fully_shard(net)
    else:
        ddp = nn.parallel.DistributedDataParallel(net)
    parts = {name: [*getattr(net, name).parameters()] for name in order}
    if order != "abc":
        parts = {name: parameters[::-1] for name, parameters in parts.items()}
    groups = [{"params": parameters, "lr": _RATES[name]} for name, parameters in parts.items()]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    with Checkpointer(state, every=1) as checkpointer:
        for step in range(checkpointer.restore(), steps):
            torch.manual_seed(step)
            ddp(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpointer.step(step)
    found = _by_name(net, optimizer)
    if rank == 0:
        torch.save(found, out)
    torch.distributed.destroy_process_group()


def _by_name(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        found[name] = {"value": _whole(parameter), "lr": rates[id(parameter)]}
        found[name] |= {key: _whole(moment) for key, moment in optimizer.state[parameter].items()}
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
