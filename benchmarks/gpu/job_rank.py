"""A rank of a job that is killed and resumes.

    python -m benchmarks.gpu.job_rank KIND BACKEND OUT STEPS KILLED_AT ENDS [--quick]

KIND is `alone` (one rank, a tier in shared memory), `ddp` or `fsdp2` (with the stager that the environment names).
Deterministic algorithms; dropout on the device. A rank that torchrun has restarted is not killed again. Shortly before
ENDS, on the monotonic clock, when it would be killed, the rank prints the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
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

_STACKS_SECONDS = 4.0
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
    parser.add_argument("ends", type=float)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    faulthandler.dump_traceback_later(max(1.0, asked.ends - _STACKS_SECONDS - time.monotonic()))
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        asked.killed_at = 0
    _train(asked, QUICK if asked.quick else FULL)


def _train(asked: argparse.Namespace, sizes: Sizes) -> None:
    from benchmarks.gpu.device_training import join_alone
    from holdfast import Checkpointer, PerRank, RngState, init_torch_distributed

    _say(asked, "has its imports")
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
    _say(asked, "has its model")
    with Checkpointer(state, every=_EVERY) as checkpointer:
        first = checkpointer.restore()
        _say(asked, f"begins with step {first}")
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
                _say(asked, "is killed")
                os.kill(os.getpid(), signal.SIGKILL)
        _say(asked, "has trained")
    asked.out.with_name(f"{asked.out.name}-{rank}.json").write_text(
        json.dumps({"first_step": first, "digests": _digests(model, optimizer)}), encoding="utf-8"
    )
    if asked.kind != "alone":
        torch.distributed.destroy_process_group()


def _model(kind: str, sizes: Sizes) -> tuple[nn.Module, nn.Module]:
    """Return the module to save, and the module to call."""
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


def _say(asked: argparse.Namespace, what: str) -> None:
    """Print a line with the seconds left, to show where a slow job was slow."""
    left = asked.ends - time.monotonic()
    print(f"rank {os.environ.get('RANK', '0')}, {left:.1f} s left: {what}", flush=True)


def _wait_saved(checkpointer: Any, *, alone: bool) -> None:
    deadline = time.monotonic() + _SAVED_SECONDS_MAX
    while (checkpointer.kept_step if alone else checkpointer.staged_step) < _EVERY - 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step was saved: {checkpointer.stats}")
        time.sleep(0.01)


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of this rank's model, moments and random state."""
    moments = [
        value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)
    ]
    parts = {
        "model": [*model.state_dict().values()],
        "moments": moments,
        "random": [torch.cuda.get_rng_state()],
    }
    found = {}
    for name, tensors in parts.items():
        seen = hashlib.sha256()
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            seen.update(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = seen.hexdigest()
    return found


if __name__ == "__main__":
    _main()
