"""A training job that changes its state in one of the ways of tests/support/changes.py, and saves after every update.

`python changing.py OUT TRAINING SAVES [OPTION …]`. Writes the state at each save to OUT: `STEP.json` has the CRC-32 of
each tensor by path, `stats-RANK.json` a rank's counters. Options: `--blind`: no detection, no waits. `--trusting`: no
waits, to test detection alone. `--from STEP`: the first step that changes a few bytes. `--drawn STEP,STEP`: saves after
which the whole state is compared, in addition to those before the hooks are proven. `--only`: only one rank changes a
few bytes, and each writes its own state at each save to `truth-STEP-RANK.pt`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from holdfast.crc import crc32
from tests.support import changes
from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed
from trainer_side.save.hook_coverage import CopyPolicy
from trainer_side.state.tree import collect, tensor_paths

BATCH_SECONDS = 0.002


def sums(tree: Any) -> dict[str, int]:
    """Return the CRC-32 of each tensor of a state, by path."""
    found = tensor_paths(tree)
    return {named.path: crc32(named.tensor.detach().contiguous().numpy().tobytes()) for named in found}


def kinds() -> dict[str, type[changes.Training]]:
    """Return all trainings, by name."""
    every = (*changes.WAITING, *changes.TEARING, *changes.FEW_BYTES, *changes.OF_ALL)
    return {kind.__name__: kind for kind in every} | changes.PACKAGES


def _option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


def main() -> None:
    out, kind, saves = Path(sys.argv[1]), kinds()[sys.argv[2]], int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    changes.copy_slowly(BATCH_SECONDS)
    if "--blind" in sys.argv:
        changes.see_nothing()
    if "--trusting" in sys.argv:
        changes.trust_everything()
    if "--uncompared" in sys.argv:
        changes.never_compare()
    if drawn := {int(step) for step in _option("--drawn").split(",") if step}:
        setattr(CopyPolicy, "is_sampled", drawn.__contains__)  # noqa: B010
    changes.RowsThroughData.begins = int(_option("--from") or 0)
    only = _option("--only")
    if only and int(only) != rank:
        changes.RowsThroughData.begins = saves
    training = kind()
    training.step(0)
    checkpointer = Checkpointer(training.state)
    if kind is changes.PatientAverage:
        training.waits = checkpointer.wait_copied
    if kind is changes.AverageInContext:
        training.changing = checkpointer.changing
    for step in range(saves):
        if rank == 0:
            (out / f"{step}.json").write_text(json.dumps(sums(collect(training.state))))
        if only:
            torch.save(collect(training.state), out / f"truth-{step}-{rank}.pt")
        checkpointer.save(step)
        training.saved(step)
        training.step(step + 1)
        torch.distributed.barrier()
    checkpointer.close()
    stats = checkpointer.stats
    (out / f"stats-{rank}.json").write_text(
        json.dumps(
            {
                "saved": stats.saved,
                "failed": stats.failed,
                "causes": stats.causes,
                "kept": stats.kept,
                "kept_step": checkpointer.kept_step,
                "compared": stats.compared,
            }
        )
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
