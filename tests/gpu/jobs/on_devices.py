"""A training of replicas, each rank on a device of its own: `python on_devices.py OUT STEPS [PAUSE_AT]`.

Every rank sees the same data, so the replicas stay equal without NCCL. Dropout uses the device's random numbers, a
GradScaler is in the state, and each step's update follows the save at once. With SHARDED in the environment FSDP2
splits the model, and there is no GradScaler.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from trainer_side import Checkpointer, PerRank, RngState, init_torch_distributed
from trainer_side.state.split_tensor import local_of

_PAUSE_SECONDS_MAX = 240
_EVERY = 3


def main() -> None:
    """Train, and write each loss, this rank's pid and the final state."""
    out, steps, *pause = Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:])
    out.mkdir(parents=True, exist_ok=True)
    rank, _ = init_torch_distributed("gloo")
    torch.cuda.set_device(rank)
    torch.manual_seed(7)
    torch.cuda.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
    ).cuda()
    is_sharded = "SHARDED" in os.environ
    if is_sharded:
        for part in (model[0], model[3], model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=not is_sharded)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler, "rng": PerRank(RngState())}
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    with (
        Checkpointer(state, every=_EVERY) as checkpointer,
        (out / f"losses-{rank}").open("a", buffering=1) as losses,
    ):
        for step in range(checkpointer.restore(), steps):
            data = torch.Generator().manual_seed(step)
            inputs, labels = torch.randn(8, 16, generator=data), torch.randint(0, 4, (8,), generator=data)
            loss = torch.nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda())
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            checkpointer.step(step)
            losses.write(json.dumps({"step": step, "loss": float(loss).hex()}) + "\n")
            if pause and step + 1 == pause[0]:
                (out / f"paused-{rank}").touch()
                time.sleep(_PAUSE_SECONDS_MAX)
                sys.exit("nobody killed this rank")
    final = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(tree_map(local_of, final), out / f"final-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
