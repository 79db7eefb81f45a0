"""A training job in which torch itself splits the model among the ranks, in each way it offers, during slow copies.

`python sharded_steps.py OUT`. Each way is trained twice from the same seed: plain, and with a gated copy of all shards
after each step. OUT has, per rank and way: whether the final bits are equal, the number of torn copies, and whether an
update was delayed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard

from tests.support.cluster import same
from tests.support.gate_copies import Copies
from tests.support.no_compiler import do_without_compiler
from trainer_side import init_torch_distributed
from trainer_side.save.gate import Gate
from trainer_side.state.split_tensor import local_of

STEPS, WIDTH, LAYERS, TOKENS = 4, 24, 3, 4
Shape = Callable[[nn.Module], None]


class Way(NamedTuple):
    """A way to split and train a model."""

    shape: Shape
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    accumulated: int = 1
    evaluates: bool = False
    in_turn: bool = False  # each rank copies every other parameter, as of what both have


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def net() -> nn.Module:
    """Return a net whose last layer has one row, so that some ranks have no part of it."""
    torch.manual_seed(4)
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))


def sharded(mesh: DeviceMesh, **options: Any) -> Shape:
    def shape(model: nn.Module) -> None:
        for layer in model.children():
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return shape


def tensor_parallel(mesh: DeviceMesh) -> Shape:
    def shape(model: nn.Module) -> None:
        for block in [*model.children()][:-1]:
            block.up, block.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return shape


def sequence_parallel(mesh: DeviceMesh) -> Shape:
    """Under SequenceParallel the gradients of norms are summed only in the step."""

    def shape(model: nn.Module) -> None:
        for block in [*model.children()][:-1]:
            block.up, block.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)

    return shape


def both(mesh: DeviceMesh) -> Shape:
    def shape(model: nn.Module) -> None:
        tensor_parallel(mesh["tp"])(model)
        sharded(mesh["dp"])(model)

    return shape


def adam(**options: Any) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **options)


def momentum(**options: Any) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def muon(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Muon for all matrices but the last: torch's cannot update one of which some rank has no part."""
    return torch.optim.Muon([one for one in parameters if one.dim() == 2 and len(one) > 1], lr=0.01)


def ways() -> dict[str, Way]:
    flat = init_device_mesh("cpu", (2,))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "adam": Way(sharded(flat), adam()),
        "adam-foreach": Way(sharded(flat), adam(foreach=True)),
        "adam-fused": Way(sharded(flat), adam(fused=True)),
        "momentum": Way(sharded(flat), momentum(foreach=False)),
        "momentum-foreach": Way(sharded(flat), momentum(foreach=True)),
        "accumulated": Way(sharded(flat), adam(), accumulated=2),
        "whole-after-forward": Way(sharded(flat, reshard_after_forward=False), adam(), evaluates=True),
        "bf16": Way(sharded(flat, mp_policy=bf16), adam()),
        "offloaded": Way(sharded(flat, offload_policy=CPUOffloadPolicy(pin_memory=False)), adam()),
        "hsdp": Way(
            sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))),
            adam(),
            in_turn=True,
        ),
        "tensor-parallel": Way(tensor_parallel(flat), adam()),
        "sequence-parallel": Way(sequence_parallel(flat), adam(), in_turn=True),
        "fsdp-tp": Way(
            both(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))), adam(foreach=False)
        ),
        "muon": Way(sharded(flat), muon, in_turn=True),
    }


def train(way: Way, rank: int, *, gated: bool) -> tuple[dict[str, torch.Tensor], Copies]:
    model = net()
    way.shape(model)
    optimizer = way.optimizer(model.parameters())
    turn = (rank, 2) if way.in_turn else (0, 1)
    copies = Copies(Gate([optimizer]) if gated else None, [optimizer], turn)
    for step in range(STEPS):
        for part in range(way.accumulated):
            # All ranks of tensor parallelism have the same batch; the others may, as well.
            torch.manual_seed(1000 * step + part)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(part == way.accumulated - 1)
            model(torch.randn(2, TOKENS, WIDTH)).square().mean().backward()
            if part < way.accumulated - 1:
                copies.save()  # in the middle of a step
        optimizer.step()
        optimizer.zero_grad()
        copies.save()
        if way.evaluates:
            with torch.no_grad():
                model(torch.randn(2, TOKENS, WIDTH))  # leaves whole parameters in the module
    copies.join()
    end = {name: local_of(tensor).clone() for name, tensor in model.state_dict().items()}
    for place, state in enumerate(optimizer.state.values()):
        end |= {f"{place}/{name}": local_of(value).clone() for name, value in state.items()}
    return end, copies


def main() -> None:
    out = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    said: dict[str, Any] = {}
    for name, way in ways().items():
        expected, _ = train(way, rank, gated=False)
        found, copies = train(way, rank, gated=True)
        said[name] = {
            "same": same(found, expected),
            "tensors": len(found),
            "torn": copies.torn(),
            "held_back": copies.waited_seconds > 0,
        }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
