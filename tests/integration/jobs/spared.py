"""A training whose ranks need nobody: each makes the same updates. So those that are left go on when one is killed.

`python spared.py OUT FIRST`: trains until there is a file `end` in OUT; saves step FIRST, and what is appointed. Writes
to OUT, per rank: pid, and for each step that was saved what the file must hold. Each rank says that it is on a machine
of its own. Once the first checkpoint is durable, HOLDFAST_FAULT is what SPARED_FAULT says, counted from then on, and
there is a file `armed-RANK`.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from holdfast import faultpoint
from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank

STEPS_MAX = 10_000


class Own:
    """What only this rank has."""

    def __init__(self, rank: int) -> None:
        self.value = torch.full((300,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


def main() -> None:
    out, first = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    platform.node = lambda: f"spot-{rank}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    do_without_compiler()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own, armed = Own(rank), False
    state = {"model": model, "optimizer": optimizer, "own": PerRank(own)}
    with Checkpointer(state, every=0) as checkpointer:
        for step in range(checkpointer.restore(), STEPS_MAX):
            optimizer.zero_grad()
            model(torch.randn(8, 96)).square().mean().backward()
            optimizer.step()
            own.value += 1
            time.sleep(0.02)
            if checkpointer.step(step) or (step == first and checkpointer.save(step)):
                held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "own": own.value}
                torch.save(held, out / f"saved-{step}-{rank}.pt")
            if checkpointer.durable_step >= 0 and not armed:
                armed = True
                os.environ[faultpoint.VARIABLE] = os.environ["SPARED_FAULT"]
                faultpoint.identify(f"rank:{rank}")
                (out / f"armed-{rank}").touch()
            if (out / "end").exists():
                break


if __name__ == "__main__":
    main()
