"""The training job that is killed: dropout, BatchNorm, AdamW, a scheduler, data order, RNG; takes a second in all.

`python job.py OUT STEPS EVERY`: as tests/integration/jobs/train.py, with gradients averaged by hand. CHAOS_WIDTH in the
environment sets the size of the state: 420 bytes for each unit. CHAOS_TORN is `STEP:FILE`: once that file exists, and
before the copy of that step has begun, rank 0 changes a weight, and undoes the change when the copy is over.
CHAOS_DOUBTED is a step for which rank 0 does the same, but by numpy, which torch does not count. The torn checkpoint is
published, and then doubted.

With CHAOS_SPLIT FSDP2 splits the model among the ranks. Before each save rank 0 writes `OUT/truth-STEP.pt`: the state
in whole tensors, gathered by torch itself.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, PerRank, ResumableSampler, RngState, init_torch_distributed

SAMPLES, FEATURES, BATCH = 96, 16, 4
STAGED_SECONDS_MAX = DURABLE_SECONDS_MAX = 60.0
TEAR_SECONDS_MAX = 60.0
PLACE = 37  # of a number that is not among the four sampled words of a piece


def main() -> None:
    out, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rank, ranks = init_torch_distributed("gloo")
    is_split = "CHAOS_SPLIT" in os.environ
    if not is_split:
        do_without_compiler()
    out.mkdir(parents=True, exist_ok=True)
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(1)
    width = int(os.environ["CHAOS_WIDTH"])
    data = torch.randn(SAMPLES, FEATURES)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, FEATURES),
    )
    if is_split:  # FSDP2 cannot do without the compiler's modules, which take a second to load
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from tests.integration.jobs.sharded import gathered

        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    sampler = ResumableSampler(SAMPLES, seed=3, rank=rank, ranks=ranks)
    torch.manual_seed(100 + rank)
    np.random.seed(100 + rank)
    random.seed(100 + rank)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": sampler,
        "rng": PerRank(RngState()),
    }
    weight = model[0].weight
    assert isinstance(weight, torch.Tensor)

    def whole() -> dict[str, Any]:
        flat = {name: state[name].state_dict() for name in ("model", "optimizer", "scheduler", "data")}
        return gathered(flat) if is_split else flat

    doubted = os.environ.get("CHAOS_DOUBTED")
    tear = UnseenTear(weight, doubted) if doubted else Tear(weight, os.environ.get("CHAOS_TORN", "-1:"))
    with Checkpointer(state, every=every) as checkpointer, (out / f"losses-{rank}").open("a") as losses:
        start = checkpointer.restore()
        if rank == 0:
            tear.hold_back(checkpointer)
        batches = sampler.batches(BATCH)
        for step in range(start, steps):
            indices = next(batches)
            x = data[torch.as_tensor(indices)]
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in [] if is_split else model.parameters():  # FSDP2 averages gradients itself
                assert parameter.grad is not None
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= ranks
            optimizer.step()
            scheduler.step()
            losses.write(
                json.dumps({"step": step, "loss": loss.item().hex(), "samples": list(indices)}) + "\n"
            )
            losses.flush()
            if (step + 1) % every == 0:
                _wait_for_the_one_before(checkpointer)
                if is_split and (truth := whole()) and rank == 0:
                    torch.save(truth, out / f"truth-{step}.pt")
            checkpointer.step(step)
            if step == tear.step and rank == 0:
                tear.strike(checkpointer, out / f"torn-{rank}")
    torch.save({**whole(), "start": start}, out / f"final-{rank}.pt")
    torch.distributed.destroy_process_group()


class Tear:
    """Changes a weight during its copy, outside an optimizer's step."""

    def __init__(self, weight: torch.Tensor, spec: str) -> None:
        self._weight, self._struck = weight, threading.Event()
        step, _, self._when = spec.partition(":")
        self.step = int(step)

    def hold_back(self, checkpointer: Checkpointer) -> None:
        """Delay the copy of the step until the change."""
        copier = checkpointer._copier
        copy = copier._copy

        def copy_later(job: Any) -> None:
            if job.transfer.step == self.step:
                assert self._struck.wait(TEAR_SECONDS_MAX)
            copy(job)

        copier._copy = copy_later  # type: ignore[method-assign]

    @torch.no_grad()
    def strike(self, checkpointer: Checkpointer, marker: Path) -> None:
        """Tear the copy of the saved step; multiplying by a power of two and back leaves training unchanged."""
        deadline = time.monotonic() + TEAR_SECONDS_MAX
        while not Path(self._when).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._weight *= 2
        self._struck.set()
        checkpointer.wait_copied()
        self._weight /= 2
        marker.write_text("torn")


class UnseenTear(Tear):
    """Changes one number by numpy. A comparison finds the change once the torn step is durable."""

    def __init__(self, weight: torch.Tensor, step: str) -> None:
        super().__init__(weight, f"{step}:")

    def strike(self, checkpointer: Checkpointer, marker: Path) -> None:
        """Tear the copy of the saved step."""
        numbers = self._weight.detach().numpy().reshape(-1)
        numbers[PLACE] *= 2
        self._struck.set()
        checkpointer.wait_copied()
        numbers[PLACE] /= 2
        deadline = time.monotonic() + DURABLE_SECONDS_MAX
        while checkpointer.durable_step < self.step and time.monotonic() < deadline:
            time.sleep(0.001)
        marker.write_text("torn")
        checkpointer._parts.copy_policy.distrust("model/0.weight was changed by numpy")


def _wait_for_the_one_before(checkpointer: Checkpointer) -> None:
    """Wait until the previous step is staged or given up, and its memory is free: a slow machine declines no step."""
    deadline = time.monotonic() + STAGED_SECONDS_MAX
    before, tiers = checkpointer._parts.areas.in_flight(), checkpointer._tiers

    def over() -> bool:
        return (
            all(flight.settled.is_set() and flight.released.is_set() for flight in before) and tiers.is_idle
        )

    while not over() and time.monotonic() < deadline:
        time.sleep(0.001)


if __name__ == "__main__":
    main()
