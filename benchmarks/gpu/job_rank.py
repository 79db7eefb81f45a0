"""A rank of a job that is killed and goes on.

    python -m benchmarks.gpu.job_rank KIND BACKEND OUT STEPS KILLED_AT [--quick]

KIND is `alone` (one rank, a tier in shared memory), `ddp` or `fsdp2` (with the stager that the environment names), or
`probe`: no training, but whether NCCL takes these ranks. Deterministic algorithms; dropout on the device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.measured import FULL, QUICK, Sizes

__all__: list[str] = []

_SAVED_SECONDS_MAX = 30.0
_LAYERS = 4
_EVERY = 3


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("backend")
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("killed_at", type=int)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.kind == "probe":
        torch.distributed.init_process_group("nccl")
        torch.cuda.set_device(0)
        torch.distributed.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        return
    _train(asked, QUICK if asked.quick else FULL)


def _train(asked: argparse.Namespace, sizes: Sizes) -> None:
    from benchmarks.gpu.device_training import join_alone
    from holdfast import Checkpointer, PerRank, RngState, init_torch_distributed

    if asked.kind == "alone":
        join_alone()
        rank = 0
    else:
        rank, _ = init_torch_distributed(asked.backend)
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model, net = _model(asked.kind, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=asked.kind != "fsdp2")
    scaler = torch.amp.GradScaler("cuda", enabled=asked.kind != "fsdp2")
    state = {"model": model, "optimizer": optimizer, "scaler": scaler, "rng": PerRank(RngState())}
    with Checkpointer(state, every=_EVERY) as checkpointer:
        first = checkpointer.restore()
        for step in range(first, asked.steps):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            data = torch.randn(sizes.tiny.batch, sizes.tiny.width, generator=generator).cuda()
            scaler.scale(net(data).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            checkpointer.step(step)
            if asked.killed_at and step == asked.killed_at:
                _wait_saved(checkpointer, alone=asked.kind == "alone")
                os.kill(os.getpid(), signal.SIGKILL)
    asked.out.with_name(f"{asked.out.name}-{rank}.json").write_text(
        json.dumps({"first_step": first, "digest": _digest(model, optimizer)}), encoding="utf-8"
    )
    if asked.kind != "alone":
        torch.distributed.destroy_process_group()


def _model(kind: str, sizes: Sizes) -> tuple[nn.Module, nn.Module]:
    """What is saved, and what is called."""
    width = sizes.tiny.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).cuda()
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    return model, model


def _wait_saved(checkpointer: Any, *, alone: bool) -> None:
    deadline = time.monotonic() + _SAVED_SECONDS_MAX
    while (checkpointer.kept_step if alone else checkpointer.staged_step) < _EVERY - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step was saved: {checkpointer.stats}")
        time.sleep(0.01)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of this rank's state."""
    moments = [
        value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)
    ]
    seen = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *moments, torch.cuda.get_rng_state()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        seen.update(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()


if __name__ == "__main__":
    _main()
