"""Training jobs whose state is split among two ranks in every way that torch offers, each passed to a `Checkpointer`.

`python split.py OUT [unproven]`. For each kind of split the ranks train, save, and write the result to OUT: the error's
class and message, or the return value of save(). Kinds that are only detected at the first save use one `Checkpointer`,
whose state is replaced in between. `unproven`: one kind only, and every rank reports the same checksums, whatever its
bytes.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, Split, init_torch_distributed
from trainer_side.state import tensor_table

WIDTH = 32
ADVISED_STEP = 100
State = dict[str, Any]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    torch.manual_seed(100 + rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# -- by class, at the start ---------------------------------------------------------------------------------


def fsdp1(rank: int, _: DeviceMesh, *, use_orig_params: bool = False) -> State:
    model = FullyShardedDataParallel(net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = adam(model)
    train(model, optimizer, rank)
    return {"model": model, "optimizer": optimizer}


def fsdp1_orig(rank: int, mesh: DeviceMesh) -> State:
    return fsdp1(rank, mesh, use_orig_params=True)


def fsdp1_sharded(rank: int, mesh: DeviceMesh) -> State:
    state = fsdp1(rank, mesh)
    FullyShardedDataParallel.set_state_dict_type(state["model"], StateDictType.SHARDED_STATE_DICT)
    return state


def zero_redundancy(rank: int, _: DeviceMesh) -> State:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
    train(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)  # as torch's error message demands
    return {"model": model, "optimizer": optimizer}


AT_THE_START: list[Callable[[int, DeviceMesh], State]] = [fsdp1, fsdp1_orig, fsdp1_sharded, zero_redundancy]


# -- by class, at the first save ----------------------------------------------------------------------------


def fsdp2_model(rank: int, mesh: DeviceMesh) -> State:
    model = net()
    fully_shard(model, mesh=mesh)
    optimizer = adam(model)
    train(model, optimizer, rank)
    return {"model": model, "optimizer": optimizer}


def tp_dtensor(rank: int, mesh: DeviceMesh) -> State:
    model = net()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = adam(model)
    train(model, optimizer, rank)
    return {"model": model, "optimizer": optimizer}


def dtensor_on_one_rank(rank: int, mesh: DeviceMesh) -> State:
    """Only rank 1 has a DTensor: rank 0 has nothing to refuse itself, and must not hang."""
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    return {"ema": {"w": tensor if rank == 1 else torch.arange(8.0)}}


def state_dict_of_one_rank(rank: int, _: DeviceMesh) -> State:
    class OnRank0:
        def state_dict(self) -> State:
            if rank:
                raise RuntimeError("the state has not been gathered on this rank")
            return {"w": torch.ones(4)}

        def load_state_dict(self, state: State) -> None:
            raise NotImplementedError

    return {"odd": OnRank0()}


# -- by its bytes, at the first save ------------------------------------------------------------------------


class FlatPartition(torch.optim.Optimizer):
    """Flat partition as in DeepSpeed and Megatron: each rank has the moments of its part of the joined parameters."""

    def __init__(self, parameters: Any, rank: int, ranks: int) -> None:
        self.all = list(parameters)
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.all])
        self.part = nn.Parameter(flat.chunk(ranks)[rank].clone())
        super().__init__([self.part], {"lr": 1e-2})
        self.inner = torch.optim.AdamW([self.part], lr=1e-2)
        self.state = self.inner.state
        self._rank, self._ranks = rank, ranks

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradient = torch.cat([parameter.grad.reshape(-1) for parameter in self.all])
        dist.all_reduce(gradient)
        self.part.grad = gradient.chunk(self._ranks)[self._rank].clone()
        self.inner.step()
        parts = [torch.empty_like(self.part.data) for _ in range(self._ranks)]
        dist.all_gather(parts, self.part.data)
        flat, at = torch.cat(parts), 0
        for parameter in self.all:
            parameter.data.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.all:
            parameter.grad = None


def flat_partition(rank: int, _: DeviceMesh) -> State:
    model = net()
    optimizer = FlatPartition(model.parameters(), rank, dist.get_world_size())
    train(model, optimizer, rank)
    return {"model": model, "optimizer": optimizer}


def flat_partition_of_no_optimizer(rank: int, mesh: DeviceMesh) -> State:
    """An object with `state_dict()` that is not recognized as an optimizer: its tensors would be saved from rank 0."""
    state = flat_partition(rank, mesh)

    class Wrapped:
        def state_dict(self) -> State:
            return {"moments": state["optimizer"].inner.state_dict()["state"]}

        def load_state_dict(self, state: State) -> None:
            raise NotImplementedError

    return {"model": state["model"], "wrapped": Wrapped()}


def fsdp2_local(rank: int, mesh: DeviceMesh) -> State:
    """Local tensors, which do not say where they belong."""
    model = fsdp2_model(rank, mesh)["model"]

    class Local:
        def state_dict(self) -> State:
            return {name: tensor.to_local().detach() for name, tensor in model.state_dict().items()}

        def load_state_dict(self, state: State) -> None:
            raise NotImplementedError

    return {"model": Local()}


def tp_plain(rank: int, _: DeviceMesh) -> State:
    """Tensor parallelism as in Megatron: plain parameters with equal names and shapes; the last bias is replicated."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(7 + rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_() if name.endswith("bias") else parameter.normal_()
    return {"model": model}


def pipeline_equal_names(rank: int, _: DeviceMesh) -> State:
    model = net(7 + rank)
    optimizer = adam(model)
    train(model, optimizer, rank)
    return {"model": model, "optimizer": optimizer}


def pipeline_one_equal_name(rank: int, _: DeviceMesh) -> State:
    torch.manual_seed(7 + rank)
    layers = {f"layer{rank}": nn.Linear(WIDTH, WIDTH), "norm": nn.Linear(WIDTH, WIDTH)}
    return {"model": nn.ModuleDict(layers)}


def pipeline_plain_value(rank: int, _: DeviceMesh) -> State:
    layers = nn.ModuleDict({f"layer{rank}": nn.Linear(WIDTH, WIDTH)})
    return {"model": layers, "notes": {"epoch": 1, "seen": 2} if rank else {"epoch": 1}}


class Experts(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(50 + rank)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.expert(self.dense(x))
        return out


def experts(rank: int, _: DeviceMesh) -> State:
    inner = Experts(rank)
    ignored = ["expert.weight", "expert.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(inner)
    optimizer = adam(model)
    train(model, optimizer, rank)
    return {"model": inner, "optimizer": optimizer}


def average_before_ddp(rank: int, _: DeviceMesh) -> State:
    """An average that is not in use yet: its first update copies the weights, which are equal by then."""
    inner = net(rank)
    average = torch.optim.swa_utils.AveragedModel(inner)
    model = DistributedDataParallel(inner)
    optimizer = adam(model)
    train(model, optimizer, rank)
    return {"average": average, "model": model, "optimizer": optimizer}


def one_bit(rank: int, _: DeviceMesh) -> State:
    """One different value, in a row that is not sampled."""
    model = nn.Linear(1024, 1024, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        if rank == 1:
            model.weight[1023, 1022] = 1e-30
    return {"model": model}


AT_THE_FIRST_SAVE: list[Callable[[int, DeviceMesh], State]] = [
    dtensor_on_one_rank,
    state_dict_of_one_rank,
    flat_partition,
    flat_partition_of_no_optimizer,
    fsdp2_local,
    tp_plain,
    pipeline_equal_names,
    pipeline_one_equal_name,
    pipeline_plain_value,
    experts,
    average_before_ddp,
    one_bit,
]


# -- state changed as the messages advise -------------------------------------------------------------------


def advised(rank: int, mesh: DeviceMesh) -> State:
    sharded, stage = fsdp2_model(rank, mesh), pipeline_equal_names(rank, mesh)
    plain = tp_plain(rank, mesh)["model"][0]
    statistics = nn.BatchNorm1d(WIDTH)
    torch.manual_seed(rank)
    statistics(torch.randn(8, WIDTH))
    return {
        "sharded": sharded["model"],
        "optimizer": sharded["optimizer"],
        "parallel": tp_dtensor(rank, mesh)["model"],
        "split": {
            "weight": Split(plain.weight, (dist.get_world_size() * WIDTH, WIDTH), (rank * WIDTH, 0)),
            "bias": Split(plain.bias, (WIDTH,), (0,)),
        },
        "stage": PerRank(stage["model"], same_ranks=True),
        "statistics": statistics,
        "generator": torch.tensor([rank, 3], dtype=torch.int64),
    }


def truth_of(state: State) -> State:
    """Return the expected content of the file, gathered by torch."""

    def full(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()
            for name, tensor in tensors.items()
        }

    weight = state["split"]["weight"].tensor.detach()
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight)
    return {
        "sharded": full(state["sharded"].state_dict()),
        "moments": {
            place: full(moments) for place, moments in state["optimizer"].state_dict()["state"].items()
        },
        "parallel": full(state["parallel"].state_dict()),
        "split": {"weight": torch.cat(parts), "bias": state["split"]["bias"].tensor.detach().clone()},
        "stage": full(state["stage"].value.state_dict()),
    }


def main() -> None:
    out, unproven = Path(sys.argv[1]), "unproven" in sys.argv
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    mesh = init_device_mesh("cpu", (ranks,))
    said: dict[str, Any] = {}
    kinds = [tp_plain] if unproven else AT_THE_FIRST_SAVE

    def note(kind: str, attempt: Callable[[], Any]) -> None:
        begun = time.monotonic()
        try:
            said[kind] = {"saved": attempt()}
        except Exception as error:  # noqa: BLE001 - that is what is noted
            said[kind] = {"class": type(error).__name__, "message": str(error)}
        said[kind]["seconds"] = time.monotonic() - begun

    if unproven:
        vars(tensor_table)["checksums"] = lambda found, _: (0,) * len(found.specs)
    else:
        for make in AT_THE_START:
            state = make(rank, mesh)
            note(make.__name__, lambda state=state: Checkpointer(state))  # type: ignore[misc]
    with Checkpointer({"nothing": 0}) as checkpointer:
        for step, make in enumerate(kinds):
            checkpointer._state.clear()
            checkpointer._state.update(make(rank, mesh))
            note(make.__name__, lambda step=step: checkpointer.save(step))  # type: ignore[misc]
        if not unproven:
            checkpointer._state.clear()
            state = advised(rank, mesh)
            checkpointer._state.update(state)
            note("advised", lambda: checkpointer.save(ADVISED_STEP))
            torch.save(truth_of(state), out / f"truth-{rank}.pt")
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
