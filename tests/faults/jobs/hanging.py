"""Ranks that restore while the disk of one of them hangs, and then begin a job on it; over real MPI.

    python hanging.py RUN TIERS OUT     writes the sources and messages of each rank to OUT, as JSON

The rules of `tests/faults/failing_disk.py` decide which calls hang; this script adds the reads of tiers to them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import StoreError
from tests.integration.jobs.tiers import model, tier_of
from tests.support.restoring import CountingStore
from trainer_side.ranks.joined import join_world
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions
from trainer_side.state.per_rank import PerRank
from trainer_side.tiers.tier_inventory import take_inventory

RESTORE_SECONDS_MAX, START_SECONDS_MAX = 10.0, 1.0


def main() -> None:
    """Restore, report, begin a job."""
    run, tiers, out = map(Path, sys.argv[1:4])
    peers = join_world(TrainerConfig()).peers()
    tier, store, live = tier_of(tiers, run, peers.rank), CountingStore(run), model(0)
    state = {"model": live, "own": PerRank({"rank": -1})}
    restored = restore(
        state,
        store,
        peers,
        events=None,
        tiers=[tier],
        options=RestoreOptions(seconds_max=RESTORE_SECONDS_MAX),
    )
    assert restored is not None
    if peers.rank == 0:
        (Path(os.environ["FAILING_CALLS"]) / "pread").write_text("0 0 -1")
    peers.all_agree(True)
    said = ""
    try:
        take_inventory(peers, [tier], seconds_max=START_SECONDS_MAX)
    except StoreError as error:
        said = str(error)
    report = {
        "step": restored.step,
        "same": [torch.equal(a, b) for a, b in zip(live, model(restored.step), strict=True)],
        "sources": sorted(restored.sources),
        "mended": restored.mended,
        "said": said,
    }
    (out / f"{peers.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
