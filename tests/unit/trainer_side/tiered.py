"""A small state, its checkpoints as slices, and its restore on several ranks, each with its own tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.support.restoring import CountingStore, Ranks, ThreadPeers
from tests.support.slices import Checkpoint, checkpoint
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored, RestoreOptions
from trainer_side.state.per_rank import PerRank
from trainer_side.tiers.tier import Tier


class Vector(nn.Module):
    """Parameters of one value: the ranks share them out. (A bare tensor would be rank 0's.)"""

    def __init__(self, value: float, size: int = 20_000) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((size,), value))


def saved(step: int, *, ranks: int = 2, attempt: int = 1, size: int = 20_000, job: str = "") -> Checkpoint:
    """Tensors that hold the step, and what differs per rank."""
    return checkpoint(
        lambda rank: {
            "model": Vector(float(step), size),
            "y": torch.arange(7),
            "own": PerRank({"rank": rank}),
        },
        ranks=ranks,
        step=step,
        attempt=attempt,
        job=job,
    )


def bring_back(
    store: CountingStore | None,
    tiers: Sequence[Sequence[Tier]],
    *,
    size: int = 20_000,
    fetch: Any = None,
    **options: Any,
) -> tuple[list[Restored | None], list[Vector]]:
    """Restore on as many ranks as there are lists of tiers; what each says, and its tensor."""
    targets = [Vector(0.0, size) for _ in tiers]
    own = [PerRank({"rank": -1}) for _ in tiers]

    def work(peers: ThreadPeers) -> Restored | None:
        state = {"model": targets[peers.rank], "y": torch.zeros(7, dtype=torch.int64), "own": own[peers.rank]}
        mine, wanted = tiers[peers.rank], RestoreOptions(**options)
        return restore(state, store, peers, events=None, tiers=mine, fetch=fetch, options=wanted)

    outcomes: list[Restored | None] = [None] * len(tiers)

    def keep(peers: ThreadPeers) -> bool:
        outcomes[peers.rank] = work(peers)
        return True

    Ranks(len(tiers)).run(keep)
    return outcomes, targets


def assert_step(results: Sequence[Restored | None], targets: Sequence[Vector], step: int) -> list[Restored]:
    """Every rank has restored this step, bit for bit."""
    found = []
    for result, target in zip(results, targets, strict=True):
        assert result is not None
        assert result.step == step
        assert torch.equal(target.x, torch.full_like(target.x, float(step)))
        found.append(result)
    return found
