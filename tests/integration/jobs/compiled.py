"""A DDP training whose step is compiled whole, `checkpointer.step` included: `compiled.py OUT STEPS BACKEND [PAUSE]`.

After PAUSE steps the job waits until a checkpoint is complete, reports that, and waits for the kill.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer_side import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

EVERY = 3
_PAUSE_SECONDS_MAX = 240
_LENGTH, _BATCH, _WIDTH = 64, 4, 32


def main() -> None:
    """Train, and write each loss, this rank's pid and the final state."""
    out, steps, *pause = Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[4:])
    out.mkdir(parents=True, exist_ok=True)
    rank, ranks = init_torch_distributed("gloo")
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(7)
    data = torch.randn(_LENGTH, _WIDTH)
    model = torch.nn.Sequential(torch.nn.Linear(_WIDTH, 64), torch.nn.GELU(), torch.nn.Linear(64, _WIDTH))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ResumableSampler(_LENGTH, seed=3, rank=rank, ranks=ranks)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "rng": PerRank(RngState())}
    with (
        Checkpointer(state, every=EVERY) as checkpointer,
        (out / f"losses-{rank}").open("a", buffering=1) as lines,
    ):
        begin = checkpointer.restore()
        batches = sampler.batches(_BATCH)

        @torch.compile(backend=sys.argv[3])
        def train(step: int, inputs: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (parallel(inputs) - inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step)
            return loss.detach()

        for step in range(begin, steps):
            lines.write(
                json.dumps({"step": step, "loss": float(train(step, data[next(batches)])).hex()}) + "\n"
            )
            if pause and step + 1 == pause[0]:
                _stand_still(checkpointer, out / f"paused-{rank}", saved=step - (step + 1) % EVERY)
    final = {"begin": begin, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(final, out / f"final-{rank}.pt")
    torch.distributed.destroy_process_group()


def _stand_still(checkpointer: Checkpointer, sign: Path, *, saved: int) -> None:
    end = time.monotonic() + _PAUSE_SECONDS_MAX
    while time.monotonic() < end:
        if max(checkpointer.durable_step, checkpointer.kept_step) >= saved:
            sign.touch()
        time.sleep(0.05)
    sys.exit("nobody killed this rank")


if __name__ == "__main__":
    main()
