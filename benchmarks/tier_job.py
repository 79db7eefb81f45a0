"""One training rank that saves into a local tier, without a stager; rank 0 writes all ranks' figures.

    for each run of the plan:  gate layer-wise or coarse ─► iterations of a timed wait, an update that takes as long as
                               a device's would, a save every K of them
    then:                      restore from the tier into zeroed tensors, three times

HOLDFAST_TIERS, HOLDFAST_TIER_SLOTS and similar variables choose the measured setting.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.complete import leaves
from benchmarks.device_update import install
from benchmarks.rank import force_gate
from benchmarks.training import train
from benchmarks.workload import Workload
from holdfast import Checkpointer
from holdfast.config import TrainerConfig

__all__ = ["main"]

_RESTORES = 3
_WARM_UP_SAVES = 3  # the largest number of slots: each is touched once


class _Tiered:
    """holdfast's tiers as a `Peer` for `train`: a save is done when all ranks have sealed it."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer, self._step = checkpointer, -1

    def save(self, step: int) -> None:
        self._step = step
        if not self._checkpointer.save(step):
            raise RuntimeError(f"step {step} was declined, though holdfast was told to wait")

    def before_update(self) -> None:
        """Do nothing: the optimizer's own hook waits."""

    def done(self) -> bool:
        return self._checkpointer.kept_step >= self._step

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        return 0

    def clean(self) -> None:
        """Do nothing: slots are reused."""

    def close(self) -> None:
        self._checkpointer.close()


def _sums(workload: Workload) -> list[int]:
    return [
        int(value.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
        for _, value in leaves(workload.state_dict())
        if isinstance(value, torch.Tensor)
    ]


def _restored(checkpointer: Checkpointer, workload: Workload) -> dict[str, Any]:
    before = _sums(workload)
    with torch.no_grad():
        for _, value in leaves(workload.state_dict()):
            if isinstance(value, torch.Tensor):
                value.zero_()
    dist.barrier()
    begun = time.monotonic()
    checkpointer.restore()
    seconds = time.monotonic() - begun
    if _sums(workload) != before:
        raise RuntimeError("a tensor is not what it was")
    assert checkpointer.restored is not None
    return {"seconds": seconds, "phases": dict(checkpointer.restored.seconds)}


def main() -> None:
    """Run a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--plan", required=True, help="JSON: a list of {round, iterations, every, seconds, update, coarse}"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(arguments.model)
    checkpointer = Checkpointer(workload.state(), config=TrainerConfig.from_sources(on_full="wait"))
    checkpointer.restore()
    copies: list[float] = []

    def hear(event: str, fields: Mapping[str, Any], _: int | None) -> None:
        if event == "save":
            copies.append(fields["copy_seconds"])

    checkpointer._events.add_listener(hear)
    peer = _Tiered(checkpointer)
    for step in range(_WARM_UP_SAVES):
        peer.save(step)
        while not peer.done():
            time.sleep(0.001)
    first, runs = _WARM_UP_SAVES, []
    alone: dict[tuple[object, ...], float] = {}  # runs without saves; one per round is enough
    for order in json.loads(arguments.plan):
        install(workload, order["update"])
        force_gate(coarse=order["coarse"])
        stalls_before = len(checkpointer.stats.cst_seconds)
        copies.clear()
        found: dict[str, float] = {}
        same = tuple(order[name] for name in ("round", "iterations", "seconds", "update"))
        for name in ("none", "tier"):
            if name == "none" and same in alone:
                found[name] = alone[same]
                continue
            run = train(
                peer if name == "tier" else None,
                workload,
                first_step=first,
                iterations=order["iterations"],
                every=order["every"],
                compute=lambda seconds=order["seconds"]: time.sleep(seconds),  # type: ignore[misc]
                meet=dist.barrier,
            )
            first += order["iterations"]
            found[name] = run.end - run.start
        alone[same] = found["none"]
        found["tier_durable"] = run.durable - run.start
        stalls = checkpointer.stats.cst_seconds[stalls_before:]
        copy_seconds = sum(copies) / len(copies)
        runs.append(
            {**order, **found, "stall_seconds": sum(stalls) / len(stalls), "copy_seconds": copy_seconds}
        )
    restores = [_restored(checkpointer, workload) for _ in range(_RESTORES)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"runs": runs, "restores": restores, "kept": checkpointer.stats.kept})
    if rank == 0:
        arguments.out.write_text(json.dumps(gathered))
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
