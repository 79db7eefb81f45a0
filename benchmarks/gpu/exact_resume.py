"""A training that is killed by SIGKILL and goes on, against one that went through: every bit of its state.

    python -m benchmarks.gpu.exact_resume FOLDER RESULT STEPS KILLED_AT [--quick]

Deterministic algorithms, dropout from the device's generator, the default strategy, a tier in shared memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.measured import FULL, QUICK, Measured, Sizes

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parents[2]
_KEPT_SECONDS_MAX = 60.0
_LAYERS = 4
_EVERY, _STEPS, _KILLED_AT = 3, 14, 8
_END_SECONDS = 2.0


def measure(measured: Measured, sizes: Sizes) -> None:
    quick = sizes == QUICK
    through = _train(measured, "through", 0, quick=quick)
    measured.put(through=through)
    killed = _train(measured, "killed", _KILLED_AT, quick=quick)
    assert killed["code"] == -signal.SIGKILL, killed
    measured.put(killed_at=_KILLED_AT)
    resumed = _train(measured, "killed", 0, quick=quick)
    measured.put(resumed=resumed)
    same = through["digest"] == resumed["digest"]
    measured.put(same_bits=same)
    if not same or not resumed["first_step"]:
        raise RuntimeError(f"not the same: {through} went through, {resumed} went on")


def _train(measured: Measured, name: str, killed_at: int, *, quick: bool) -> dict[str, Any]:
    result = measured.folder / f"{name}.json"
    result.unlink(missing_ok=True)
    folder = measured.folder / name
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.exact_resume", str(folder), str(result)),
        *(str(_STEPS), str(killed_at), *(["--quick"] if quick else [])),
    ]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        timeout=measured.seconds_left() - _END_SECONDS,
        check=False,
    )
    if done.returncode != (-signal.SIGKILL if killed_at else 0):
        raise RuntimeError(f"the training ended with {done.returncode}")
    return {"code": done.returncode} if killed_at else json.loads(result.read_text(encoding="utf-8"))


def _main() -> None:
    from benchmarks.gpu.device_training import join_alone
    from holdfast.config import TrainerConfig
    from trainer_side import Checkpointer, PerRank, RngState

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("killed_at", type=int)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    join_alone()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    sizes = QUICK if asked.quick else FULL
    layers = [
        nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.GELU(), nn.Dropout(0.1)) for _ in range(_LAYERS)
    ]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer, "rng": PerRank(RngState())}
    (asked.folder / "tier").mkdir(exist_ok=True)
    config = TrainerConfig.from_sources(
        store=str(asked.folder / "store"), tiers=[f"memory:{asked.folder / 'tier'}"], on_full="wait"
    )
    with Checkpointer(state, config=config, every=_EVERY) as checkpointer:
        first = checkpointer.restore()
        for step in range(first, asked.steps):
            data = torch.randn(sizes.batch, sizes.width, generator=torch.Generator().manual_seed(step)).cuda()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            checkpointer.step(step)
            if step == asked.killed_at and asked.killed_at:
                _wait_kept(checkpointer)
                os.kill(os.getpid(), signal.SIGKILL)
    asked.result.write_text(
        json.dumps({"first_step": first, "digest": _digest(model, optimizer)}), encoding="utf-8"
    )


def _wait_kept(checkpointer: Any) -> None:
    deadline = time.monotonic() + _KEPT_SECONDS_MAX
    while checkpointer.kept_step < _EVERY - 1:
        if time.monotonic() > deadline:
            raise TimeoutError("no step was kept")
        time.sleep(0.01)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the state."""
    moments = [
        value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)
    ]
    seen = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *moments, torch.cuda.get_rng_state()):
        seen.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()


if __name__ == "__main__":
    _main()
