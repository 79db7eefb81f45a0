"""The inventory of a restore: the slices in the tiers of all ranks, and the manifests in the store.

    every rank: its tiers' slices ─► summaries to all ─┐
    rank 0: the store's manifests, newest first, ────┴─► `choice.py` ─► the same candidates everywhere
            as many as are needed ─► summaries to all            └─► one manifest, when its turn comes

Only rank 0 asks the store: ranks that list at different times may see different runs. No checkpoint bytes are read.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.checkpoints.branches import Branches, Rewind
from holdfast.checkpoints.catalog import CatalogItem, CatalogListing
from holdfast.checkpoints.lease import newest_attempt as newest_of_store
from holdfast.checkpoints.manifest_order import ListedManifest
from holdfast.errors import DamageError, HoldfastError, ProtocolError, StoreError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.store.base import Store
from holdfast.wire.frames import peer_error
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import Peers, gather, raise_agreed
from trainer_side.restore.choice import (
    NEARNESS_OF_RING,
    RING,
    Candidate,
    Holder,
    RankPlace,
    SkippedCheckpoint,
    SliceKey,
    StoreCandidate,
    candidates,
    skip_set_aside,
)
from trainer_side.tiers.tier import Nearness, SealedSlice, SliceKeeper
from trainer_side.tiers.tier_inventory import list_kept

_log = logging.getLogger("holdfast.restore")
_T = TypeVar("_T")
_DIGEST_CHARACTERS_MAX = 64
_DAMAGE_REPORTED_MAX = 100  # of one tier
_BATCH_SIZE_MAX = 64  # manifests that are read and kept at once
_SECONDS_MAX = 60.0  # default limit for the store
_NEARNESS = {
    Nearness.MEMORY: 0,
    Nearness.PM: 1,
    Nearness.NVME: 2,
    Nearness.FILE: 3,
    Nearness.RING: NEARNESS_OF_RING,
}


@dataclass
class TierListing:
    """The slices that all ranks have found."""

    # This rank has found them, by `Holder.number`.
    own: list[tuple[SliceKeeper, SealedSlice]] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    # Why tiers of any rank could not be listed, and damage in them.
    problems: list[str] = field(default_factory=list)
    # Entries of `problems` that may hide slices of a whole checkpoint.
    blocking_problems: list[str] = field(default_factory=list)
    places: list[RankPlace] = field(default_factory=list)  # where each rank is; empty if no rank has a tier

    def layout(self, candidate: Candidate, peers: Peers) -> Layout:
        """Return the layout of a candidate's slices, from a rank that has one. Collective. DamageError: damaged."""
        holders = [holder for some in candidate.slices.values() for holder in some]
        first = min(holders, key=lambda one: (one.rank, one.number))
        layout = self.own[first.number][1].layout if first.rank == peers.rank else None
        layout_bytes = peers.broadcast(layout.to_bytes() if layout is not None else None, first.rank)
        problem: DamageError | None = None
        if layout is None:
            try:
                layout = Layout.from_bytes(layout_bytes)
            except ProtocolError as error:
                problem = DamageError(f"{candidate.name}: from rank {first.rank}: {error}")
            if layout is not None and candidate.key is not None and layout.digest != candidate.key.digest:
                problem = DamageError(
                    f"{candidate.name}: the layout that rank {first.rank} sent is not the layout that its slices name"
                )
        raise_agreed(peers, problem)
        assert layout is not None
        return layout


def ask_rank_0(peers: Peers, ask: Callable[[], bytes]) -> bytes:
    """Return rank 0's answer on every rank. Collective. HoldfastError: `ask` raised it on rank 0; on every rank."""
    answer: bytes | None = None
    failed: HoldfastError | None = None
    if peers.rank == 0:
        try:
            answer = ask()
        except HoldfastError as error:
            failed = error
    raise_agreed(peers, failed)
    return peers.broadcast(answer)


def list_tiers(tiers: Sequence[SliceKeeper], peers: Peers, *, seconds_max: float) -> TierListing:
    """List the slices in every tier of every rank, in at most `seconds_max` per tier. Collective.

    Tiers that fail or hang, and slices whose layout is not that of their seal, are left out and named in `problems`:
    other tiers may have the same bytes.
    """
    found = TierListing()
    problems: list[tuple[str, bool]] = []  # reason, and whether a whole checkpoint may be missed
    for tier in tiers:
        try:
            kept = list_kept(tier, seconds_max)
        except (HoldfastError, OSError) as error:
            problems.append((f"rank {peers.rank}: {tier.name} cannot list its slices: {error}", True))
            continue
        damage = tier.damage()[:_DAMAGE_REPORTED_MAX]
        problems += [(f"rank {peers.rank}: {tier.name}: {reason}", True) for reason in damage]
        for one in kept:
            try:
                one.seal.check_layout(one.layout, source=f"{tier.name}: {one.place}")
            except DamageError as error:
                problems.append((f"rank {peers.rank}: {error}", one.complete))
                continue
            found.own.append((tier, one))
    if peers.all_agree(not tiers):
        return found
    names = [tier.name for tier in tiers if tier.nearness is not Nearness.RING]
    rows = [_row(tier, kept) for tier, kept in found.own]
    mine = json.dumps([rows, problems, [socket.gethostname(), names]]).encode()
    for rank, message in enumerate(gather(peers, mine)):
        rows, problems_there, (host, tiers_there) = json.loads(message)
        found.problems += [what for what, _ in problems_there]
        found.blocking_problems += [what for what, is_missed in problems_there if is_missed]
        found.places.append(RankPlace(host, tuple(tiers_there)))
        for number, (key, slice_rank, nearness, name, place, absent, *seal) in enumerate(rows):
            location = nearness, name, place, frozenset(absent)
            found.holders.append(Holder(SliceKey(*key), slice_rank, rank, number, *location, *seal))
    return found


def _row(tier: SliceKeeper, kept: SealedSlice) -> list[object]:
    seal, record = kept.seal, kept.seal.save_record
    key = SliceKey(seal.attempt, seal.step, seal.ranks, seal.layout_digest, record.job or "")
    replicas = (record.replicas_digest or "")[:_DIGEST_CHARACTERS_MAX]
    drift = kept.doubt or (record.drift or "" if record.job == RING else "")
    where = [_NEARNESS[tier.nearness], tier.name, kept.place]
    trackers = [record.trackers] if record.trackers and seal.rank == 0 else []
    return [key, seal.rank, *where, sorted(kept.absent), replicas, drift, kept.complete, *trackers]


class StoreListing:
    """The checkpoints in the store, as rank 0 lists them: newest first, manifests read on demand."""

    def __init__(self, store: Store | None, seconds_max: float, step: int | None = None) -> None:
        self.step = step  # the only step that is listed; None: all are
        # The manifests read so far, newest first; the same on every rank.
        self.stored: list[StoreCandidate] = []
        self.unread: CheckpointId | None = None  # the newest manifest that was not read; None: all were
        self.newest: CheckpointId | None = None  # of the current branch, regardless of `step`
        # None: never rewound. Checkpoints of older branches are not read.
        self.branches: Branches | None = None
        self.older_branch_count = 0  # number of listed checkpoints that belong to older branches
        self._store, self._seconds_max = store, seconds_max
        self._catalog: CatalogListing | None = None  # on rank 0
        self._unread_manifests: list[tuple[int, ListedManifest]] = []  # unread manifests, numbered
        self._items: dict[int, CatalogItem] = {}  # manifests of the last read, by number
        self._batch_size = 1

    @classmethod
    def open(
        cls,
        store: Store | None,
        peers: Peers,
        *,
        step: int | None = None,
        also: Collection[CheckpointId] = (),
        seconds_max: float = _SECONDS_MAX,
    ) -> tuple[StoreListing, HoldfastError | None]:
        """List the store, on rank 0, and read the newest manifest. Collective.

        `step`: List only this step; None: all steps. `also`: Checkpoints whose manifests are read as well, the same on
        every rank. `seconds_max`: Limit of the restore; each access to the store may take half of it. Returns the
        listing, and the error if the store does not answer. Any other failure on rank 0 is raised.
        """
        store_listing = cls(store, seconds_max / 2, step)

        def begin(store: Store) -> list[StoreCandidate]:
            store_listing._catalog = catalog = CatalogListing(store, step)
            if step is None and catalog.old_slices:
                _log.warning("%s", catalog.old_slices)
            store_listing.branches, current = catalog.branches, catalog.current
            names = current if current or step is None else CatalogListing(store).current
            store_listing.newest = names[0].order if names else None
            store_listing.older_branch_count = len(catalog.manifests) - len(current)
            store_listing._unread_manifests = [
                (number, listed)
                for number, listed in enumerate(catalog.manifests)
                if store_listing.branches is None or store_listing.branches.is_current(listed.order)
            ]
            numbers = [number for number, listed in store_listing._unread_manifests if listed.order in also]
            return store_listing._read_manifests([*store_listing._first_unread(1), *numbers])

        return store_listing, store_listing._read_on_rank_0(peers, begin)

    def read_more(self, peers: Peers) -> None:
        """Read the next manifests, twice as many each time. Collective; raises as `open`, and `StoreError`."""
        count = self._batch_size = min(2 * self._batch_size, _BATCH_SIZE_MAX)
        store_error = self._read_on_rank_0(peers, lambda _: self._read_manifests(self._first_unread(count)))
        if store_error is not None:
            raise store_error

    def manifest(self, number: int, peers: Peers) -> Manifest:
        """Return the manifest with this number. Collective."""
        found: list[Manifest] = []  # on rank 0

        def ask() -> bytes:
            found.append(self._manifest(number))
            return b"" if peers.ranks == 1 else found[0].to_bytes()

        data = ask_rank_0(peers, ask)
        return found[0] if found else Manifest.from_bytes(data, source="the store (from rank 0)")

    # -- on rank 0

    def _first_unread(self, count: int) -> list[int]:
        return [number for number, _ in self._unread_manifests[:count]]

    def _read_manifests(self, numbers: Collection[int]) -> list[StoreCandidate]:
        assert self._catalog is not None
        wanted = {one.name: number for number, one in self._unread_manifests if number in numbers}
        self._unread_manifests = [one for one in self._unread_manifests if one[0] not in numbers]
        by_name = {self._catalog.manifests[number].name: number for number in wanted.values()}
        listed = [self._catalog.manifests[number] for number in sorted(wanted.values())]
        self._items = {by_name[item.name]: item for item in self._catalog.items(listed)}
        return [_candidate(number, item) for number, item in self._items.items()]

    def _manifest(self, number: int) -> Manifest:
        item = self._items.get(number)
        if item is None:
            assert self._catalog is not None
            listed = self._catalog.manifests[number]
            item = next(self._catalog.items([listed]), None)
            if item is None or _candidate(number, item) not in self.stored:
                raise DamageError(f"{listed.name}: was removed or replaced meanwhile")
        assert item.manifest is not None
        return item.manifest

    def _read_on_rank_0(
        self, peers: Peers, read: Callable[[Store], list[StoreCandidate]]
    ) -> HoldfastError | None:
        """Call `read` on rank 0, and broadcast the result. Returns the error if the store does not answer."""
        store_errors: list[StoreError] = []  # on rank 0

        def ask() -> bytes:
            try:
                rows = [] if self._store is None else _query_store(read, self._store, self._seconds_max)
            except StoreError as error:
                store_errors.append(error)
                return json.dumps({"code": error.code, "text": str(error)}).encode()
            unread = self._unread_manifests[0][1].order if self._unread_manifests else None
            rewinds = [one.model_dump(mode="json") for one in self.branches.rewinds] if self.branches else []
            return json.dumps([rows, unread, self.newest, self.older_branch_count, rewinds]).encode()

        answer = json.loads(ask_rank_0(peers, ask))
        if isinstance(answer, dict):
            return next(iter(store_errors), None) or peer_error(answer["code"], f"rank 0: {answer['text']}")
        rows, unread, newest, self.older_branch_count, rewinds = answer
        if self.branches is None and rewinds:
            self.branches = Branches(map(Rewind.model_validate, rewinds))
        self.unread, self.newest = (None if one is None else CheckpointId(*one) for one in (unread, newest))
        self.stored = sorted([*self.stored, *(StoreCandidate(*row) for row in rows)])
        return None


def _candidate(number: int, item: CatalogItem) -> StoreCandidate:
    order, manifest = (item.attempt, item.step), item.manifest
    if manifest is None:
        return StoreCandidate(number, *order, 0, "", item.fault, is_unreadable=item.is_unreadable)
    best = () if manifest.best is None else (manifest.best.metric, manifest.best.mode)
    content = manifest.ranks, manifest.layout_digest
    return StoreCandidate(number, *order, *content, item.fault, item.caveat, False, manifest.metrics, *best)


def _query_store(query: Callable[[Store], _T], store: Store, seconds_max: float) -> _T:
    try:
        return within(lambda: query(store), seconds_max, name="holdfast-store-ask")
    except TimeoutError:
        raise StoreError(
            f"{store.url}: rank 0 waited {seconds_max:g} s for the list of checkpoints; the store hangs: look at its "
            "mount, or at the network to it",
            retriable=True,
        ) from None


def newest_attempt(
    in_tiers: int,
    store: Store | None,
    peers: Peers,
    *,
    without_store: bool = False,
    seconds_max: float = _SECONDS_MAX,
) -> int:
    """Return the highest attempt that the store knows, or that is in the tiers; 0 on a new run. Collective.

    Only rank 0 asks the store. `without_store`: If the store does not answer, return that of the tiers; else
    StoreError.
    """

    def ask() -> bytes:
        try:
            return b"0" if store is None else b"%d" % _query_store(newest_of_store, store, seconds_max)
        except StoreMissing:
            return b"0"
        except StoreError as error:
            if not without_store:
                raise
            _log.warning(
                "the store does not answer, so the newest attempt is the newest that the local tiers have: %s",
                error,
            )
            return b"0"

    return max(in_tiers, int(ask_rank_0(peers, ask)))


class CandidateListing:
    """All checkpoints, newest first, each as a candidate or with the reason why it is not.

    Iterating is collective, and raises as `StoreListing.read_more`. Checkpoints of older branches are left out; if
    there are any, the last item says so.

    `set_aside`: Checkpoints to skip. `places`: Where each rank is, for messages.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        store_listing: StoreListing,
        peers: Peers,
        set_aside: Collection[CheckpointId] = (),
        places: Sequence[RankPlace] = (),
    ) -> None:
        self._store_listing, self._peers = store_listing, peers
        self._holders, self._places, self._set_aside = holders, places, set_aside
        self._older_branches: list[Candidate | SkippedCheckpoint] = []
        if (branches := store_listing.branches) is not None:
            self._holders = [one for one in holders if branches.is_current(CheckpointId(*one.key[:2]))]
            if store_listing.older_branch_count or len(self._holders) < len(holders):
                fork = branches.rewinds[-1].fork
                reason = (
                    f"the run was rewound to {fork}, and checkpoints of older branches are not restored; "
                    "`holdfast rewind --to` goes back to one of them"
                )
                was_complete = store_listing.step is None
                left_out = SkippedCheckpoint(fork.attempt, fork.step, reason, was_complete=was_complete)
                self._older_branches = [left_out]

    def __iter__(self) -> Iterator[Candidate | SkippedCheckpoint]:
        number = 0
        while True:
            listed = self.known_candidates()
            while number < len(listed) and self._is_position_final(listed[number]):
                yield listed[number]
                number += 1
            if self._store_listing.unread is None:
                return
            # Candidates read from now on sort after those already yielded: they are older, and no drifted one was
            # yielded yet.
            self._store_listing.read_more(self._peers)

    def known_candidates(self) -> Sequence[Candidate | SkippedCheckpoint]:
        """Return the candidates known so far, in order; unread ones may belong between them. Not collective."""
        known = candidates(self._holders, self._store_listing.stored, self._places)
        listed = skip_set_aside(known, self._set_aside)
        return listed if self._store_listing.unread is not None else [*listed, *self._older_branches]

    def first(self) -> Candidate | None:
        """Return the first candidate, once all newer checkpoints are known. Collective."""
        return next((one for one in self if isinstance(one, Candidate)), None)

    def _is_position_final(self, one: Candidate | SkippedCheckpoint) -> bool:
        """Whether no unread checkpoint can come before this one."""
        unread = self._store_listing.unread
        if unread is None:
            return True
        is_drifted = isinstance(one, Candidate) and bool(one.drift)
        return not is_drifted and CheckpointId(one.attempt, one.step) > unread
