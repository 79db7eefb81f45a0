"""Trains a pipeline of two ranks, each with one stage of two layers or with two stages of one, and saves every step.

    python virtual_stages.py OUT CASE STEPS TRUTHS PAUSE_AT      CASE: gpipe, interleaved, or whole on one rank

Each rank saves one model with the layers of all its stages. In each step rank 0 writes `TRUTHS/STEP.pt`, the state of
all ranks. A restored job writes to `OUT/restored.json` the step, and the values that differ from its truth. After step
PAUSE_AT the ranks wait to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.integration.jobs.sharded import differences, of_all_ranks
from trainer_side import Checkpointer, init_torch_distributed

LAYERS, WIDTH, BATCH, PARTS, PAUSE_SECONDS_MAX = 4, 24, 8, 4, 240.0
# Case → for each rank its stages, each with its layers.
STAGES = {
    "gpipe": (((0, 1),), ((2, 3),)),
    "interleaved": (((0,), (2,)), ((1,), (3,))),
    "whole": (((0, 1, 2, 3),),),
}


class Deep(nn.Module):
    """Some layers, under their names in the whole model."""

    def __init__(self, mine: list[int]) -> None:
        super().__init__()
        whole = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH + at), nn.Linear(WIDTH + at, WIDTH)) for at in range(LAYERS)
        ]
        self.layers = nn.ModuleList(whole[at] if at in mine else nn.Identity() for at in range(LAYERS))


def schedule_of(case: str, model: Deep, rank: int) -> ScheduleGPipe | ScheduleInterleaved1F1B:
    """Return torch's own schedule over this rank's stages."""
    ranks = len(STAGES[case])
    stages = [
        PipelineStage(
            nn.Sequential(*(model.layers[at] for at in layers)),
            rank + number * ranks,
            ranks * len(STAGES[case][rank]),
            torch.device("cpu"),
        )
        for number, layers in enumerate(STAGES[case][rank])
    ]
    if case == "gpipe":
        return ScheduleGPipe(stages[0], PARTS, loss_fn=nn.functional.mse_loss)
    return ScheduleInterleaved1F1B([*stages], PARTS, loss_fn=nn.functional.mse_loss)


def by_number(truth: tuple[Any, Any]) -> Any:
    """Return a form that does not depend on stages: without the optimizer's order of parameters."""
    net, optimizer = truth
    (group,) = optimizer["param_groups"]
    return {"net": net, "state": optimizer["state"], "group": {**group, "params": sorted(group["params"])}}


def main() -> None:
    out, case, steps, truths = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    pause_at = int(sys.argv[5])
    rank, ranks = init_torch_distributed("gloo")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(3)
    model = Deep([at for layers in STAGES[case][rank] for at in layers])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer({"net": model, "optimizer": optimizer}) as checkpointer:
        first = checkpointer.restore()
        if checkpointer.restored is not None:
            here = by_number(of_all_ranks(model, optimizer))
            if rank == 0:
                there = torch.load(truths / f"{first - 1}.pt", weights_only=True)
                report = {
                    "step": first - 1,
                    "differ": differences(here, there),
                    "sources": [*checkpointer.restored.sources],
                }
                (out / "restored.json").write_text(json.dumps(report))
        schedule = schedule_of(case, model, rank) if ranks > 1 else None
        for step in range(first, steps):
            torch.manual_seed(step)
            x, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
            assert schedule is not None, "one rank restores only"
            schedule.step(*[x][rank:], target=target if rank == ranks - 1 else None)
            optimizer.step()
            optimizer.zero_grad()
            here = by_number(of_all_ranks(model, optimizer))
            if rank == 0:
                torch.save(here, truths / f"{step}.pt")
            assert checkpointer.save(step), f"step {step} was declined"
            checkpointer.wait_copied()
            if step == pause_at:
                (out / f"paused-{rank}").touch()
                time.sleep(PAUSE_SECONDS_MAX)
                sys.exit("nobody killed this rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
