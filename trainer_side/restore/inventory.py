"""The inventory of a restore: the slices in the tiers of all ranks, and the manifests in the store.

    every rank: its tiers' slices ─► summaries to all ──┐
    rank 0: the store's catalog ─► summary to all ──────┴─► `choice.py` ─► the same candidates everywhere
                                        └─► one manifest, when its turn comes

Rank 0 alone asks the store: ranks that list at different times may see different runs. No byte of a checkpoint is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.checkpoints.catalog import Catalog, CatalogItem
from holdfast.checkpoints.claim import newest_attempt as newest_of_store
from holdfast.errors import DamageError, HoldfastError, ProtocolError, StoreError, StoreMissing
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.image.replicas import DIGEST_FIELD
from holdfast.store.base import Store
from holdfast.wire.frames import peer_error
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import Peers, agree, gather
from trainer_side.restore.choice import (
    NEARNESS_OF_RING,
    NEARNESS_OF_STORE,
    RING,
    Candidate,
    Holder,
    SliceKey,
    StoreCandidate,
)
from trainer_side.tiers.kept_slices import ask_kept
from trainer_side.tiers.tier import Keeps, Kept, Nearness, Tier

_log = logging.getLogger("holdfast.restore")
_T = TypeVar("_T")
_DIGEST_CHARACTERS_MAX = 64
_SECONDS_MAX = 60.0  # where nobody says how long a tier or the store may take
_NEARNESS = {
    Nearness.MEMORY: 0,
    Nearness.PM: 1,
    Nearness.NVME: 2,
    Nearness.FILE: 3,
    Nearness.RING: NEARNESS_OF_RING,
    Nearness.STORE: NEARNESS_OF_STORE + 1,
}


@dataclass
class Found:
    """The slices that all ranks have found.

    Attributes:
        own: Those of this rank; a holder's `number` counts them.
        holders: Those of all.
        lost: Tiers that could not say what they keep, and why; of all ranks.
    """

    own: list[tuple[Keeps, Kept]] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def layout(self, candidate: Candidate, peers: Peers) -> Layout:
        """The layout of a candidate's slices, from a rank that has one of them. Collective.

        Raises:
            DamageError: What that rank sent is not it.
        """
        first = min(
            (holder for some in candidate.slices.values() for holder in some), key=lambda one: one[2:4]
        )
        mine = self.own[first.number][1].layout if first.rank == peers.rank else None
        said = peers.broadcast(mine.to_bytes() if mine is not None else None, first.rank)
        if mine is not None:
            return mine
        try:
            layout = Layout.from_bytes(said)
        except ProtocolError as error:
            raise DamageError(f"{candidate.name}: from rank {first.rank}: {error}") from error
        assert candidate.key is not None
        if layout.digest != candidate.key.digest:
            raise DamageError(
                f"{candidate.name}: the layout that rank {first.rank} sent is not the layout that its slices name"
            )
        return layout


def find(tiers: Sequence[Keeps], peers: Peers, *, seconds_max: float = _SECONDS_MAX) -> Found:
    """Ask every tier of every rank what it keeps. Collective.

    A tier that fails or hangs, and a slice whose layout is not that of its seal, is left out and named: others may have
    it too.

    Args:
        tiers: Of this rank.
        peers: The ranks.
        seconds_max: How long a tier may take to say it.

    Raises:
        PeerLost: A rank is gone.
    """
    found = Found()
    lost: list[str] = []
    for tier in tiers:
        try:
            kept = ask_kept(tier, seconds_max)
        except (HoldfastError, OSError) as error:
            lost.append(f"rank {peers.rank}: {tier.name} cannot say what it keeps: {error}")
            continue
        for one in kept:
            try:
                one.seal.check_layout(one.layout, source=f"{tier.name}: {one.place}")
            except DamageError as error:
                lost.append(f"rank {peers.rank}: {error}")
                continue
            found.own.append((tier, one))
    if peers.all_agree(not tiers):
        return found
    mine = json.dumps([[_row(tier, kept) for tier, kept in found.own], lost]).encode()
    for rank, said in enumerate(gather(peers, mine)):
        rows, lost_there = json.loads(said)
        found.lost += lost_there
        for number, (key, slice_rank, nearness, name, place, absent, *said) in enumerate(rows):
            found.holders.append(
                Holder(
                    SliceKey(*key),
                    slice_rank,
                    rank,
                    number,
                    nearness,
                    name,
                    place,
                    frozenset(absent),
                    *said,
                )
            )
    return found


def _row(tier: Keeps, kept: Kept) -> list[object]:
    seal = kept.seal
    key = SliceKey(seal.attempt, seal.step, seal.ranks, seal.layout_digest, str(seal.record.get("job", "")))
    replicas = str(seal.record.get(DIGEST_FIELD, ""))[:_DIGEST_CHARACTERS_MAX]
    drift = str(seal.record.get("drift", "")) if seal.record.get("job") == RING else ""
    where = [_NEARNESS[tier.nearness], tier.name, kept.place]
    return [key, seal.rank, *where, sorted(kept.absent), replicas, drift]


class Shelf:
    """The checkpoints in the store, as rank 0 has found them.

    Attributes:
        stored: All of them, newest first; the same on every rank.
    """

    def __init__(self, stored: list[StoreCandidate], items: list[CatalogItem]) -> None:
        self.stored, self._items = stored, items

    @classmethod
    def look(
        cls, store: Store | None, peers: Peers, *, seconds_max: float = _SECONDS_MAX
    ) -> tuple[Shelf, HoldfastError | None]:
        """List the store, on rank 0. Collective.

        Args:
            store: The run.
            peers: The ranks.
            seconds_max: For what is done with it afterwards; the list has half of it.

        Returns:
            What is there; and why nothing is known, where the store does not answer.

        Raises:
            HoldfastError: Anything else that went wrong on rank 0.
        """
        items: list[CatalogItem] = []
        said = b""
        failed: HoldfastError | None = None
        silent: HoldfastError | None = None
        if peers.rank == 0:
            try:
                items = [] if store is None else _in_time(_list, store, seconds_max / 2)
                said = json.dumps(_stored(items)).encode()
            except StoreError as error:
                silent, said = error, json.dumps({"code": error.code, "text": str(error)}).encode()
            except HoldfastError as error:
                failed = error
        problem = agree(peers, failed)
        if problem is not None:
            raise DamageError(problem)
        answer = json.loads(peers.broadcast(said if peers.rank == 0 else None))
        if isinstance(answer, dict):
            return cls([], []), silent or peer_error(answer["code"], f"rank 0: {answer['text']}")
        return cls([StoreCandidate(*row) for row in answer], items), None

    def manifest(self, number: int, peers: Peers) -> Manifest:
        """One of the manifests. Collective."""
        mine = self._items[number].manifest if peers.rank == 0 else None
        said = peers.broadcast(mine.to_bytes() if mine is not None else None)
        return mine or Manifest.from_bytes(said, source="the store (from rank 0)")


def _list(store: Store) -> list[CatalogItem]:
    return list(Catalog(store).list())


def _in_time(ask: Callable[[Store], _T], store: Store, seconds_max: float) -> _T:
    try:
        return within(lambda: ask(store), seconds_max, name="holdfast-store-ask")
    except TimeoutError:
        raise StoreError(
            f"{store.url}: rank 0 waited {seconds_max:g} s for the list of checkpoints; the store hangs: look at its "
            "mount, or at the network to it",
            retriable=True,
        ) from None


def _stored(items: Sequence[CatalogItem]) -> list[StoreCandidate]:
    """What the catalog lists; one that cannot be read stands where the newest attempt would have put it."""
    newest = max((item.manifest.attempt for item in items if item.manifest), default=0)
    return [
        StoreCandidate(number, newest, item.step, 0, "", item.fault)
        if item.manifest is None
        else StoreCandidate(
            number,
            item.manifest.attempt,
            item.manifest.step,
            item.manifest.ranks,
            item.manifest.layout_digest,
            item.fault,
            item.drift,
        )
        for number, item in enumerate(items)
    ]


def newest_attempt(
    tiers: Sequence[Tier],
    store: Store | None,
    peers: Peers,
    *,
    without_store: bool = False,
    seconds_max: float = _SECONDS_MAX,
) -> int:
    """The highest attempt that any tier of any rank, or the store, knows of; 0 on a new run. Collective.

    A job without a stager, which claims one, takes the next.

    Args:
        tiers: Of this rank.
        store: The run; only rank 0 asks it.
        peers: The ranks.
        without_store: Whether the tiers alone may answer when the store does not.
        seconds_max: How long the store, and each tier, may take to say it.

    Raises:
        StoreError: The store does not answer, and the tiers alone may not.
        PeerLost: A rank is gone.
    """
    found = find(tiers, peers, seconds_max=seconds_max)
    newest = max((holder.key.attempt for holder in found.holders), default=0)
    said, error = 0, None
    if peers.rank == 0 and store is not None:
        try:
            said = _in_time(newest_of_store, store, seconds_max)
        except StoreMissing:
            said = 0
        except StoreError as refused:
            if not without_store:
                error = refused
            else:
                _log.warning(
                    "the store does not answer, so the newest attempt is the newest that the local tiers have: %s",
                    refused,
                )
    agree(peers, error)
    return max(newest, int(peers.broadcast(b"%d" % said if peers.rank == 0 else None)))
