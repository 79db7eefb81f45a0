"""A training loop that saves after every step, and records the errors that its script gets.

`python guarded.py OUT SCENARIO STEPS`. Scenarios: `plain`; `hold`: wait after the first step until OUT/go is there;
`layouts`: rank 1 has another model; `untiered`: rank 1 has no local tiers; `numpy-rank-0`: an array in the
state; `rank-0-alone`: only rank 0 calls `step()`, and rank 1 waits for it as in a collective call. In the first four
each step waits until it is durable. Writes to OUT, per rank: the last step, the restored step, and the error that
ended it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.errors import HoldfastError
from trainer_side import Checkpointer

WAIT_SECONDS_MAX = 120.0
POLL_SECONDS = 0.01


def main() -> None:
    out, scenario, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    said: dict[str, Any] = {
        "pid": os.getpid(),
        "start": None,
        "skipped": [],
        "mark": None,
        "taken": [],
        "durable": -1,
        "error": None,
    }
    if scenario == "untiered" and rank == 1:
        del os.environ["HOLDFAST_TIERS"]
    try:
        train(out, scenario, steps, rank, said)
    except HoldfastError as error:
        said["error"] = {"class": type(error).__name__, "message": str(error)}
        raise
    finally:
        (out / f"rank-{rank}.json").write_text(json.dumps(said))


def train(out: Path, scenario: str, steps: int, rank: int, said: dict[str, Any]) -> None:
    """Train: every parameter is the number of the step."""
    wide = scenario == "layouts" and rank == 1
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 30 if wide else 20))
    state: dict[str, Any] = {"model": model, "extra": {"history": [0.5, 1.5]}}
    if scenario == "numpy-rank-0" and rank == 0:
        state["extra"]["history"].append(np.arange(3))
    with Checkpointer(state, every=1 if scenario == "rank-0-alone" else 0) as checkpointer:
        said["start"] = checkpointer.restore()
        if checkpointer.restored is not None:
            said["skipped"] = checkpointer.restored.skipped
            said["mark"] = sorted(
                {float(value) for part in model.parameters() for value in part.flatten().tolist()}
            )
        for step in range(said["start"], steps):
            said["taken"].append(step)
            with torch.no_grad():
                for part in model.parameters():
                    part.fill_(step)
            if scenario == "rank-0-alone":
                if rank == 0:
                    checkpointer.step(step)
                wait_for((out / "rank-0.json").exists)
            else:
                checkpointer.save(step)
            if scenario not in {"numpy-rank-0", "rank-0-alone"}:
                wait_for(lambda step=step: checkpointer.durable_step >= step)
            if scenario == "hold" and step == 0:
                (out / f"holding-{rank}").touch()
                wait_for((out / "go").exists)
    said["durable"] = checkpointer.durable_step


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("waited in vain")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
