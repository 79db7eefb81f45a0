"""Trains a small net that is split among the ranks, saves every step, and writes the expected content of each file.

    python sharded.py OUT CASE STEPS TRUTH      CASE: one of `MESHES`

In each step rank 0 writes `TRUTH/STEP.pt`, gathered by torch itself (`full_tensor()`; for stages, each rank's part). A
restored job writes to `OUT/restored.json` the step, and the values that differ from its truth.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, RngState, Split, init_torch_distributed

WIDTH, WORDS, LAYERS, EXPERTS = 48, 131, 2, 6


class Block(nn.Module):
    """A perceptron with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1, training=self.training)


class Net(nn.Module):
    """A net with tied weights, a buffer, and a parameter of two rows, of which some ranks have none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head: nn.Linear | None = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3))
        self.two: nn.Parameter | None = nn.Parameter(torch.ones(2, 5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = words if self.embed is None or self.two is None else self.embed(words) + self.two.sum()
        for block in self.blocks:
            x = block(x)
        if self.head is None:
            return x
        self.seen += 1
        return self.head(x)  # type: ignore[no-any-return]


_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _tensor_parallel(net: Net, mesh: DeviceMesh) -> None:
    for block in net.blocks:
        parallelize_module(block, mesh, _PLAN)


def _fully_sharded(net: Net, mesh: DeviceMesh, **options: Any) -> None:
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def _fsdp(net: Net, ranks: int) -> None:
    _fully_sharded(net, init_device_mesh("cpu", (ranks,)))


def _columns(net: Net, ranks: int) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % ranks == 0 else None

    _fully_sharded(net, init_device_mesh("cpu", (ranks,)), shard_placement_fn=placement)


def _hsdp(net: Net, ranks: int) -> None:
    _fully_sharded(net, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards")))


def _tp(net: Net, ranks: int) -> None:
    _tensor_parallel(net, init_device_mesh("cpu", (ranks,)))


def _fsdp_tp(net: Net, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shards", "parts"))
    _tensor_parallel(net, mesh["parts"])
    _fully_sharded(net, mesh["shards"])


def _pp(net: Net, ranks: int) -> None:
    _stage(net, dist.get_rank(), ranks)


def _pp_fsdp(net: Net, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("stages", "shards"))
    _stage(net, mesh["stages"].get_local_rank(), 2)
    _fully_sharded(net, mesh["shards"])


def _stage(net: Net, stage: int, stages: int) -> None:
    """Keep only the layers of one stage, under the names of the whole net."""
    first, end = stage * LAYERS // stages, (stage + 1) * LAYERS // stages
    for layer in range(LAYERS):
        if not first <= layer < end:
            net.blocks[layer] = nn.Identity()
    if stage > 0:
        net.embed, net.two = None, None
    if stage < stages - 1:
        net.head = None
        del net.seen


def _whole(net: Net, ranks: int) -> None:
    """Replicate the net on every rank, as DistributedDataParallel does."""


MESHES: dict[str, Callable[[Net, int], None]] = {
    "fsdp": _fsdp,
    "columns": _columns,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp-tp": _fsdp_tp,
    "whole": _whole,
    "pp": _pp,
    "pp-fsdp": _pp_fsdp,
}
_STAGES = {"pp": 1, "pp-fsdp": 2}  # ranks of one stage


class Pipeline:
    """Trains stages by torch's own schedule; the first and the last share a weight, each with a copy of it."""

    def __init__(self, net: Net, rank: int, ranks: int, ranks_of_stage: int) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # only where it is used

        stages = ranks // ranks_of_stage
        self._stage, self._last = rank // ranks_of_stage, stages - 1
        columns = [
            dist.new_group([*range(column, ranks, ranks_of_stage)]) for column in range(ranks_of_stage)
        ]
        group = columns[rank % ranks_of_stage]
        ends = [dist.new_group([column, ranks - ranks_of_stage + column]) for column in range(ranks_of_stage)]
        self._ends = ends[rank % ranks_of_stage]
        stage = PipelineStage(net, self._stage, stages, torch.device("cpu"), group=group)
        self._schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.square().mean())
        self._net = net

    def train(self, words: torch.Tensor) -> None:
        """Run forward and backward passes."""
        ends = {0: words} if self._stage == 0 else {}
        before = self._net.seen.clone() if self._stage == self._last else None
        self._schedule.step(*ends.values(), target=words if self._stage == self._last else None)
        if before is not None:
            self._net.seen.copy_(
                before + 2
            )  # the first time, torch runs the module once more to see its shapes
        tied = self._net.embed if self._stage == 0 else self._net.head if self._stage == self._last else None
        if tied is not None:
            assert tied.weight.grad is not None
            dist.all_reduce(getattr(tied.weight.grad, "_local_tensor", tied.weight.grad), group=self._ends)


class Experts(NamedTuple):
    """Weights of which each rank has some rows, updated by hand."""

    part: Split

    @classmethod
    def of(cls, rank: int, ranks: int) -> Experts:
        first, end = rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks
        rows = torch.arange(first * 20.0, end * 20.0).reshape(end - first, 4, 5)
        return cls(Split(rows, (EXPERTS, 4, 5), (first, 0, 0)))


def gathered(value: Any) -> Any:
    """Return copies of whole tensors."""
    if isinstance(value, Split):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (value.start, value.tensor))
        return torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, dict):
        return type(value)((key, gathered(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value)(gathered(one) for one in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def of_all_ranks(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the state of all stages together, the optimizer's by name."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    saved = optimizer.state_dict()
    numbered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    moments = {numbered[number]: gathered(value) for number, value in saved["state"].items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (gathered({**net.state_dict()}), moments, numbered))
    (group,) = saved["param_groups"]
    group = {**group, "params": [*dict.fromkeys(name for part in parts for name in part[2])]}
    state = {name: value for part in parts for name, value in part[1].items()}
    return {name: value for part in parts for name, value in part[0].items()}, {
        "state": state,
        "param_groups": [group],
    }


def state_of_all_ranks(
    case: str, net: Net, optimizer: torch.optim.Optimizer, experts: Experts
) -> dict[str, Any]:
    """Return the saved state except the RNG, gathered by torch itself. Collective."""
    if case in _STAGES:
        whole, moments = of_all_ranks(net, optimizer)
    else:
        whole, moments = gathered(net.state_dict()), gathered(optimizer.state_dict())
    return {"net": whole, "optimizer": moments, "experts": {"up": gathered(experts.part)}}


def by_name(truth: Any) -> Any:
    """Return a form that does not depend on stages: moments by name, and those of tied weights once."""
    state, (group,) = truth["optimizer"]["state"], truth["optimizer"]["param_groups"]
    names = [name for name, _ in Net().named_parameters()]
    moments = {names[key] if isinstance(key, int) else key: value for key, value in state.items()}
    moments.pop("head.weight", None)
    return {**truth, "optimizer": [moments, {**group, "params": None}]}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf."""
    if isinstance(value, dict | list | tuple):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}/{key}")
    else:
        yield path, value


def differences(one: Any, other: Any) -> list[str]:
    """Return the paths at which two trees differ in any bit."""
    left, right = dict(leaves(one)), dict(leaves(other))
    return sorted(left.keys() ^ right.keys()) + [
        path
        for path in left.keys() & right.keys()
        if not (
            torch.equal(left[path], right[path]) and left[path].dtype == right[path].dtype
            if isinstance(left[path], torch.Tensor)
            else left[path] == right[path]
        )
    ]


def main() -> None:
    out, case, steps, truths = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(3)
    net = Net()
    MESHES[case](net, ranks)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=1e-2, foreach=False
    )  # TP and FSDP do not mix in foreach
    experts = Experts.of(rank, ranks)
    state = {"net": net, "optimizer": optimizer, "experts": {"up": experts.part}}

    pipeline = Pipeline(net, rank, ranks, _STAGES[case]) if case in _STAGES else None

    def truth() -> Any:
        return state_of_all_ranks(case, net, optimizer, experts)

    with Checkpointer({**state, "rng": PerRank(RngState())}) as checkpointer:
        checkpointer.restore()
        first = 0
        if (restored := checkpointer.restored) is not None:
            first = restored.step + 1
            here = truth()
            if rank == 0:
                there = torch.load(truths / f"{restored.step}.pt", weights_only=True)
                report = {"step": restored.step, "differ": differences(by_name(here), by_name(there))}
                out.mkdir()
                (out / "restored.json").write_text(json.dumps(report))
        for step in range(first, steps):
            torch.manual_seed(
                step
            )  # the same dropout on every rank: those that share a region must stay the same
            words = torch.randint(0, WORDS, (4, 7))
            if pipeline is None:
                net(words).square().mean().backward()
            else:
                pipeline.train(words)
            optimizer.step()
            optimizer.zero_grad()
            experts.part.tensor.mul_(1.25)
            here = truth()
            if rank == 0:
                torch.save(here, truths / f"{step}.pt")
            assert checkpointer.save(step), f"step {step} was declined"
            checkpointer.wait_copied()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
