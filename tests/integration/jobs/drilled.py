"""A script for `holdfast drill`: `python drilled.py STEPS EVERY [BUG]`, with dropout, and data by a ResumableSampler.

BUG is a mistake that only a restart reveals: `rng` does not save the random state, `data` does not save the position in
the data; `ahead` draws each random batch before the previous step's checkpoint, as nanoGPT does. The state includes a
log with times, like Trainer's.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

SAMPLES, FEATURES, BATCH, STEP_SECONDS = 64, 8, 4, 0.05


class Log:
    """A log of every fifth step, saved as JSON."""

    def __init__(self) -> None:
        self._entries: list[dict[str, float]] = []

    def add(self, step: int, loss: float) -> None:
        if step % 5 == 0:
            self._entries.append({"step": step, "loss": loss, "eval_runtime": time.perf_counter()})

    def state_dict(self) -> dict[str, str]:
        return {"json": json.dumps({"log_history": self._entries})}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        self._entries = json.loads(saved["json"])["log_history"]


class Chance:
    """Random batches, from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> torch.Tensor:
        return torch.randint(SAMPLES, (BATCH,), generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._generator.set_state(saved["generator"])


def main() -> None:
    steps, every, bugs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(1)
    data = torch.randn(SAMPLES, FEATURES)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, FEATURES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = ResumableSampler(SAMPLES, seed=3, rank=rank, ranks=ranks)
    torch.manual_seed(100 + rank)
    log, chance = Log(), Chance(rank)
    state = {"model": model, "optimizer": optimizer, "log": log, "rng": PerRank(RngState())}
    state["data"] = PerRank(chance) if "ahead" in bugs else sampler
    for bug in bugs:
        state.pop(bug, None)
    with Checkpointer(state, every=every) as checkpointer:
        first, batches = checkpointer.restore(), None
        following = chance.draw()
        for step in range(first, steps):
            batches = batches or sampler.batches(BATCH)
            x = data[following if "ahead" in bugs else torch.as_tensor(next(batches))]
            following = chance.draw()
            optimizer.zero_grad()
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            log.add(step, loss.item())
            for parameter in model.parameters():
                assert parameter.grad is not None
                torch.distributed.all_reduce(parameter.grad)
            time.sleep(STEP_SECONDS)
            optimizer.step()
            checkpointer.step(step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
