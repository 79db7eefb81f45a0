"""The main job: a small training with all kinds of state: dropout, BatchNorm, AdamW, a scheduler, data order, RNG.

`python train.py OUT STEPS EVERY [PAUSE_AT]`: trains to STEPS, saves every EVERY steps. Writes to OUT, per rank: pid,
each step's loss and samples, and the final state. After step PAUSE_AT the ranks wait to be killed, or for a file
`go-on` in OUT. In the environment: TRAIN_WIDTH makes the state larger, 420 bytes per unit. TRAIN_STAGED_SECONDS_MAX is
the longest wait of a save until the previous one is staged, or with TRAIN_WAITS_FOR=kept in every rank's local tier.
TRAIN_STEP_SECONDS is added to each step. TRAIN_MAY_LACK names state that the first checkpoint may lack.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

SAMPLES, FEATURES, BATCH = 96, 16, 4
PAUSE_SECONDS_MAX = 240
STAGED_SECONDS_MAX = 60.0


def main() -> None:
    out, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    pause_at = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(1)
    width = int(os.environ.get("TRAIN_WIDTH", "64"))
    data = torch.randn(SAMPLES, FEATURES)
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, FEATURES),
    )
    # DDP reorders its buckets after each process's first step. From three ranks on that changes in which order a
    # gradient's parts are added, hence the last bits of the first step after a restart; with this it never does.
    model = DistributedDataParallel(net, find_unused_parameters=ranks > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    sampler = ResumableSampler(SAMPLES, seed=3, rank=rank, ranks=ranks)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)  # so that two runs save the same bytes
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,
        "rng": PerRank(RngState()),
    }
    with Checkpointer(state, every=every) as checkpointer, (out / f"losses-{rank}").open("a") as losses:
        start = checkpointer.restore(may_lack=os.environ.get("TRAIN_MAY_LACK", "").split())
        if start:
            torch.save(_flat(state), out / f"restored-{rank}.pt")
        saved = -1
        batches = sampler.batches(BATCH)
        for step in range(start, steps):
            indices = next(batches)
            x = data[torch.as_tensor(indices)]
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            time.sleep(float(os.environ.get("TRAIN_STEP_SECONDS", "0")))
            optimizer.step()
            scheduler.step()
            losses.write(
                json.dumps({"step": step, "loss": loss.item().hex(), "samples": list(indices)}) + "\n"
            )
            losses.flush()
            if (step + 1) % every == 0:
                wait_until_staged(checkpointer, saved)
            if checkpointer.step(step):
                saved = step
            if step == pause_at:
                (out / f"paused-{rank}").touch()
                _pause(out / "go-on")
    torch.save({**_flat(state), "start": start}, out / f"final-{rank}.pt")
    torch.distributed.destroy_process_group()


def _pause(go_on: Path) -> None:
    deadline = time.monotonic() + PAUSE_SECONDS_MAX
    while not go_on.exists():
        if time.monotonic() > deadline:
            sys.exit("nobody killed this rank")
        time.sleep(0.01)


def wait_until_staged(checkpointer: Checkpointer, step: int) -> None:
    """Wait, so that no step is declined because the previous one is in flight on a slow machine or store."""
    seconds_max = float(os.environ.get("TRAIN_STAGED_SECONDS_MAX", STAGED_SECONDS_MAX))
    deadline = time.monotonic() + seconds_max
    kept = os.environ.get("TRAIN_WAITS_FOR") == "kept"
    while time.monotonic() < deadline:
        if kept and checkpointer.kept_step >= step and checkpointer._tiers.is_idle:
            break
        if not kept and checkpointer.staged_step >= step:
            break
        time.sleep(0.001)


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name].state_dict() for name in ("model", "optimizer", "scheduler", "data")}


if __name__ == "__main__":
    main()
