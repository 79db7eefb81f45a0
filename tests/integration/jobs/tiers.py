"""Ranks that keep their slices in local tiers, and restore from them, over real MPI.

    python tiers.py save RUN TIERS OUT STEPS…     each rank keeps these steps, then dies by SIGKILL
    python tiers.py restore RUN TIERS OUT         each rank writes the sources of its bytes to OUT, as JSON

TIERS is a directory with a simulated machine for each rank: memory for rank 0, a disk for the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.config import TrainerConfig
from holdfast.faultpoint import identify
from holdfast.telemetry.events import EventLog
from tests.support.restoring import CountingStore
from tests.support.slices import Checkpoint, checkpoint, keep
from trainer_side.ranks.joined import join_world
from trainer_side.ranks.peers import Peers
from trainer_side.restore.restore import restore
from trainer_side.state.per_rank import PerRank
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.tier import Tier

CHUNK_BYTES = 1 << 16
SIZES = (100_000, 1, 7, 300_000, 33_333)


def model(step: int) -> nn.ParameterList:
    """Return the parameters of a step, in which no two chunks are equal."""
    return nn.ParameterList(torch.arange(size, dtype=torch.float32) + step * 1000 for size in SIZES)


def saved(step: int, *, ranks: int, attempt: int = 1) -> Checkpoint:
    """Return the checkpoint of a step, as all ranks save it."""
    return checkpoint(
        lambda rank: {"model": model(step), "own": PerRank({"rank": rank})},
        ranks=ranks,
        step=step,
        attempt=attempt,
        chunk_bytes=CHUNK_BYTES,
    )


def tier_of(tiers: Path, run: Path, rank: int) -> Tier:
    """Return the tier of a rank, on the rank's own machine."""
    place = tiers / f"machine-{rank}"
    place.mkdir(parents=True, exist_ok=True)
    return open_tier(f"{'nvme' if rank else 'memory'}:{place / 'tier'}", str(run))


def save(peers: Peers, tier: Tier, steps: Sequence[int]) -> None:
    """Keep the steps, each complete once all ranks have sealed it; the last one is only kept by rank 0."""
    for step in steps[:-1]:
        made = saved(step, ranks=peers.ranks)
        keep(tier, made, peers.rank, complete=False)
        assert peers.all_agree(True)
        tier.complete(made.attempt, made.step)
    if peers.rank == 0:
        keep(tier, saved(steps[-1], ranks=peers.ranks), 0, complete=False)
    assert peers.all_agree(True)
    os.kill(os.getpid(), signal.SIGKILL)


def bring_back(peers: Peers, tier: Tier, run: Path, out: Path) -> None:
    """Restore, and write the report."""
    store, own, live = CountingStore(run), PerRank({"rank": -1}), model(0)
    events = EventLog(out / f"events-{peers.rank}", role="trainer", rank=peers.rank)
    state: dict[str, Any] = {"model": live, "own": own}
    restored = restore(state, store, peers, events=events, tiers=[tier])
    assert restored is not None
    expected = model(restored.step)
    report = {
        "step": restored.step,
        "attempt": restored.attempt,
        "same": [torch.equal(a, b) for a, b in zip(live, expected, strict=True)],
        "own": own.value["rank"],
        "sources": {name: use.nbytes for name, use in restored.sources.items()},
        "bytes_read": restored.bytes_read,
        "mended": restored.mended,
        "skipped": restored.skipped,
        "store_requests": len(store.requests),
    }
    (out / f"{peers.rank}.json").write_text(json.dumps(report))


def main() -> None:
    """Run the command in the first argument."""
    what, run, tiers, out = sys.argv[1], *map(Path, sys.argv[2:5])
    peers = join_world(TrainerConfig()).peers()
    identify(f"rank:{peers.rank}")
    tier = tier_of(tiers, run, peers.rank)
    if what == "save":
        save(peers, tier, [int(step) for step in sys.argv[5:]])
    else:
        bring_back(peers, tier, run, out)
    tier.close()


if __name__ == "__main__":
    main()
