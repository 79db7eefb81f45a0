"""The steps that the tiers of all ranks hold when a job begins: complete or not, in each tier, and the newest attempt.

    every rank: kept_slices() ─► sent to all ─► the same inventory on every rank

This is collective, in the main thread, before the first step. Slices of jobs with other numbers of ranks count as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError, HoldfastError, StoreError
from holdfast.wire.frames import peer_error
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import Peers, gather
from trainer_side.tiers.tier import Order, SealedSlice, SliceKeeper, StepVerdict, Tier

_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class TierInventory:
    """The steps in the tiers of all ranks, per tier and newest first; equal on every rank."""

    newest_attempt: int  # of any slice in any tier; 0 if there is no slice
    complete: tuple[tuple[Order, ...], ...]  # every rank's slice was found
    partial: tuple[tuple[Order, ...], ...]  # a slice is missing

    def verdicts(
        self, number: int, name: str, restored: Order | None, whole_in: Collection[str]
    ) -> list[StepVerdict]:
        """Return the verdicts for a tier on the steps found in it, in order, before the first step of this job.

        They protect the newest step that all ranks have whole until there is a newer one. That step comes first, and
        the useless newer steps after it: a rank that is killed in between loses nothing.

        For `restored` (None: nothing was restored) and `intact_in` see `TierSet.set_restored`.
        """
        complete, partial = self.complete[number], self.partial[number]
        damaged = bool(whole_in) and name not in whole_in  # damaged here, and whole elsewhere
        usable = [
            order
            for order in complete
            if restored is None or order < restored or (order == restored and not damaged)
        ]
        verdicts = [StepVerdict(number, order, complete=True) for order in usable[:1]]
        if restored is None:
            return verdicts
        for order in (*complete, *partial):
            # A damaged step has all seals. A step that an earlier job has given up lacks the overwritten ones.
            is_behind = order > usable[0] if usable else order == restored and order in complete
            if order > restored or (damaged and is_behind):
                verdicts.append(StepVerdict(number, order, complete=False))
        return verdicts


def list_kept(tier: SliceKeeper, seconds_max: float) -> list[SealedSlice]:
    """Return the slices that a tier keeps. StoreError: the tier has not answered in time."""
    try:
        return within(tier.kept_slices, seconds_max, name="holdfast-tier-kept")
    except TimeoutError:
        raise StoreError(
            f"{tier.name} hangs: it has not listed its slices within {seconds_max:g} s; look at the kernel's messages "
            "about the device (dmesg), mount it again, or take it out of tiers"
        ) from None


def take_inventory(
    peers: Peers,
    tiers: Sequence[Tier],
    error: HoldfastError | None = None,
    *,
    seconds_max: float = _SECONDS_MAX,
) -> TierInventory:
    """Exchange the inventories of all ranks. `error`: Why this rank's tiers could not be opened; raised on every rank.

    On every rank: ConfigError: the ranks' tiers differ, or one is not usable. StoreError: a device failed or hangs.
    """
    said = [json.loads(text) for text in gather(peers, _own_inventory(tiers, error, seconds_max))]
    for rank, other in enumerate(said):
        if "error" in other:
            said_error = peer_error(*other["error"])
            raise said_error if rank == peers.rank else type(said_error)(f"rank {rank}: {said_error}")
    names = said[0]["tiers"]
    for rank, other in enumerate(said):
        if other["tiers"] != names:
            raise ConfigError(
                f"trainer setting tiers: rank {rank} has {other['tiers']}, rank 0 has {names}; give all ranks the same"
            )
    complete, partial = [], []
    for number in range(len(tiers)):
        found: dict[tuple[int, int, int, str], set[int]] = {}
        for other in said:
            for attempt, step, rank, ranks, layout in other["kept"][number]:
                found.setdefault((attempt, step, ranks, layout), set()).add(rank)
        whole = {key[:2] for key, holders in found.items() if len(holders) == key[2]}
        complete.append(tuple(sorted(whole, reverse=True)))
        partial.append(tuple(sorted({key[:2] for key in found} - whole, reverse=True)))
    attempts = [order[0] for orders in (*complete, *partial) for order in orders]
    return TierInventory(max(attempts, default=0), tuple(complete), tuple(partial))


def _own_inventory(tiers: Sequence[Tier], error: HoldfastError | None, seconds_max: float) -> bytes:
    try:
        if error is not None:
            raise error
        seals = [[one.seal for one in list_kept(tier, seconds_max)] for tier in tiers]
    except HoldfastError as refused:
        return json.dumps({"error": [refused.code, str(refused)]}).encode()
    kept = [[(*one.order, one.rank, one.ranks, one.layout_digest) for one in some] for some in seals]
    return json.dumps({"tiers": [tier.name for tier in tiers], "kept": kept}).encode()
