"""A training job in which one rank's replicas drift, or none do.

`python drifting.py OUT SCENARIO STEPS`. Scenarios: `none`; `element`: from step 2 on the last rank has a different
element in `head.weight`; `tensor`: all elements differ; `hidden`: one element of a tensor of which a checkpoint samples
every 17th row. Dropout, and BatchNorm's statistics, differ between ranks by nature. Writes to OUT, per rank, the number
of failed steps, and why they failed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

FEATURES, WIDTH = 16, 64
HIDDEN_NUMEL = 17 * 64 * 16  # float32: 17 times the 64 rows of 64 bytes that a checkpoint samples
HIDDEN_ELEMENT = HIDDEN_NUMEL // 2 + 160  # in a row that is sampled soon, but not at once
DRIFT_AT = 2
WAIT_SECONDS_MAX = 120.0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, WIDTH),
            torch.nn.BatchNorm1d(WIDTH),
            torch.nn.GELU(),
            torch.nn.Dropout(0.3),
        )
        self.head = torch.nn.Linear(WIDTH, FEATURES)
        self.large = torch.nn.Parameter(torch.ones(HIDDEN_NUMEL))
        self.frozen = torch.nn.Parameter(torch.randn(9), requires_grad=False)  # not behind the gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x)) * self.large.mean() + self.frozen.sum()
        return out


def main() -> None:
    out, scenario, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(1)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(100 + rank)
    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        for step in range(steps):
            x = torch.randn(4, FEATURES)
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == DRIFT_AT and rank == ranks - 1:
                drift(net, scenario)
            checkpointer.save(step)
            wait_for_verdict(checkpointer)
    said: dict[str, Any] = {"failed": checkpointer.stats.failed, "causes": checkpointer.stats.causes}
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


@torch.no_grad()
def drift(net: Net, scenario: str) -> None:
    if scenario == "element":
        net.head.weight[3, 5] += 1e-3
    elif scenario == "tensor":
        net.head.weight += 1e-3
    elif scenario == "hidden":
        net.large[HIDDEN_ELEMENT] += 1e-3


def wait_for_verdict(checkpointer: Checkpointer) -> None:
    """Wait for the verdict, so that each step is accepted, or refused only for its content."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while checkpointer._parts.areas.in_flight() or not checkpointer._tiers.is_idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)


if __name__ == "__main__":
    main()
