"""torch.distributed.checkpoint under FSDP2 on two ranks, without holdfast: writes and reads others' checkpoints.

    python -m tests.integration.jobs.dcp_fsdp save FOLDER TRUTH ROWS
    python -m tests.integration.jobs.dcp_fsdp load FOLDER TRUTH

`save` trains a small net and writes it, with large tensors of ROWS rows, to FOLDER by dcp.save; TRUTH gets the small
tensors, gathered by torch. `load` fills another net from FOLDER by dcp.load, and compares it with TRUTH.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import start_processes

from tests.integration.jobs.sharded import MESHES, WORDS, Net, differences, gathered
from tests.support.no_compiler import do_without_compiler

RANKS, LARGE, COLUMNS = 2, 4, 10_000


def large_tensor(number: int, rows: int) -> torch.Tensor:
    """One of the large tensors, whole."""
    return torch.arange(number, number + rows * COLUMNS, dtype=torch.int32).reshape(rows, COLUMNS)


def _large_part(number: int, rows: int, mesh: DeviceMesh) -> DTensor:
    whole = large_tensor(number, rows)
    local = whole.chunk(RANKS, number % 2)[dist.get_rank()].contiguous()
    places = [Shard(number % 2)]
    return DTensor.from_local(local, mesh, places, run_check=False, shape=whole.size(), stride=whole.stride())


def _sharded() -> Net:
    net = Net()
    MESHES["fsdp"](net, RANKS)
    return net


def _save(folder: Path, truth: Path, rows: str) -> None:
    torch.manual_seed(3)
    net = _sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    net(torch.randint(0, WORDS, (4, 7))).square().mean().backward()
    optimizer.step()
    model, moments = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"net": model, "optimizer": moments}
    whole = gathered(state)
    if dist.get_rank() == 0:
        torch.save(whole, truth)
    mesh = init_device_mesh("cpu", (RANKS,))
    state["large"] = {str(number): _large_part(number, int(rows), mesh) for number in range(LARGE)}
    save(state, checkpoint_id=folder)


def _load(folder: Path, truth: Path) -> None:
    torch.manual_seed(4)
    net = _sharded()
    state = {"net": net.state_dict()}
    load(state, checkpoint_id=folder)
    found, expected = gathered(state["net"]), torch.load(truth, weights_only=True)["net"]
    assert isinstance(state["net"]["two"], DTensor)
    assert differences(found, expected) == []


def _rank(rank: int, act: Callable[..., None], folder: str, truth: str, *more: str) -> None:
    place = f"file://{Path(truth).absolute()}.{act.__name__}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    act(Path(folder), Path(truth), *more)
    dist.destroy_process_group()


if __name__ == "__main__":
    do_without_compiler()
    acts = {"save": _save, "load": _load}
    start_processes(  # type: ignore[no-untyped-call]
        _rank, (acts[sys.argv[1]], *sys.argv[2:]), nprocs=RANKS, start_method="fork"
    )
