"""Brings the state back from the newest good checkpoint, on any number of ranks.

    rank 0: catalog ─► candidate, newest first ─► broadcast ◄────────────────────┐
                                                     ▼                           │ damage on any rank: the next
    every rank: structure ─► names, shapes fit? ─► read 1/R, share the rest ─► all agree
                                                                                 ▼
                                   load_state_dict of each object, PerRank and RNG states last

1. Every rank takes the same way: each stage ends with an agreement, and an error of one rank becomes an error of all.
2. Damage (a CRC, a size, a structure, a file that is gone) leads to the checkpoint before. All else is raised: a
   store that does not answer or a state of other shapes is not mended by going back in time.
3. Live tensors are read into directly (`Structure.adopt`), so after an error they may hold bytes of any checkpoint:
   after an exception, do not train on with this state.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.catalog import Catalog, CatalogItem
from holdfast.errors import DamageError, HoldfastError, StoreMissing
from holdfast.events import EventLog
from holdfast.manifest import Manifest
from holdfast.storage.base import Store
from holdfast.wire import peer_error
from trainer_side.loading import check, live_trees, load
from trainer_side.peers import Peers
from trainer_side.reading import Target, check_received, read
from trainer_side.structure import Structure, read_structure_bytes

__all__ = ["Restored", "restore"]

_log = logging.getLogger("holdfast.restore")
_NAMED = 3  # of many ranks that met damage, so many are named


@dataclass(frozen=True)
class Restored:
    """What was restored, and how.

    Attributes:
        step: The saved step; the next one to run is one more.
        attempt: The attempt that wrote it.
        seconds: Of each phase on this rank: catalog, structure, read, exchange and check (several ranks), load.
        bytes_read: From the store by this rank, tensors and what lies between them.
        skipped: Newer checkpoints that were not used, each with the reason.
        values: Plain values of the state by name: they cannot be set in place.
    """

    step: int
    attempt: int
    manifest: Manifest
    seconds: dict[str, float]
    bytes_read: int
    skipped: list[str]
    values: dict[str, Any] = field(default_factory=dict)


def restore(
    state: Mapping[str, Any],
    store: Store,
    peers: Peers,
    *,
    events: EventLog | None,
    threads: int = 4,
    step: int | None = None,
    seconds_max: float = 600,
) -> Restored | None:
    """Load the newest good checkpoint into the objects of `state`. Collective; training thread.

    Args:
        state: As given to the `Checkpointer`; the same names on every rank.
        store: The run.
        peers: The ranks.
        events: Where to tell of it.
        threads: Requests to the store in flight from this rank.
        step: Only this step, and no other one if it is damaged.
        seconds_max: For reading one checkpoint, and again for its exchange.

    Returns:
        None on a new run: there is no checkpoint at all, and `state` is as it was.

    Raises:
        DamageError: There are checkpoints and none is good; names each with its reason.
        StateError: The checkpoint does not fit the state: names, shapes, or what an object's `load_state_dict` refused.
        StoreMissing: There is no such `step`.
        StoreError: The store failed or was too slow.
        PeerLost: A rank is gone.
    """
    begun = time.monotonic()
    catalog = _read_catalog(store, peers, step)
    seconds = {"catalog": time.monotonic() - begun}
    skipped: list[str] = []
    told = 0
    for manifest, fault in catalog:
        if manifest is not None:
            _tell(
                peers,
                events,
                skipped[told:],
                f"trying step {manifest.step} (attempt {manifest.attempt}) instead",
            )
            told = len(skipped)
            found = _Attempt(state, store, peers, manifest, threads, seconds_max, seconds)
            problem = found.read()
            if problem is None:
                return found.load(skipped, events)
            fault = f"step {manifest.step} (attempt {manifest.attempt}): {problem}"
        skipped.append(fault)
    if not skipped:
        return None
    reasons = "\n".join(f"  {reason}" for reason in skipped)
    raise DamageError(f"{store.url}: none of {len(skipped)} checkpoints can be used:\n{reasons}")


class _Attempt:
    """One candidate: read it, and when that went well on every rank, load it."""

    def __init__(
        self,
        state: Mapping[str, Any],
        store: Store,
        peers: Peers,
        manifest: Manifest,
        threads: int,
        seconds_max: float,
        seconds: dict[str, float],
    ) -> None:
        self._state, self._store, self._peers, self._manifest = state, store, peers, manifest
        self._threads, self._seconds_max = threads, seconds_max
        self._seconds = dict(seconds)
        self._structure: Structure | None = None
        self._bytes_read = 0
        self._adopted_bytes = 0

    def read(self) -> str | None:
        """Read all bytes; returns why this candidate is no good, or None. Collective."""
        begun = time.monotonic()
        error = self._prepare()
        self._seconds["structure"] = time.monotonic() - begun
        problem = _agree(self._peers, error)
        if problem is not None:
            return problem
        assert self._structure is not None
        targets = {index: Target.of(storage) for index, storage in self._structure.storages.items()}
        reading = read(
            self._store,
            self._manifest,
            targets,
            self._peers,
            threads=self._threads,
            seconds_max=self._seconds_max,
        )
        self._seconds.update(reading.seconds)
        self._bytes_read = reading.bytes_read
        problem = _agree(self._peers, reading.error)
        if problem is not None or self._peers.ranks == 1:
            return problem
        begun = time.monotonic()
        error = check_received(self._manifest, targets, self._peers, threads=self._threads)
        self._seconds["check"] = time.monotonic() - begun
        return _agree(self._peers, error)

    def load(self, skipped: list[str], events: EventLog | None) -> Restored:
        """Load what was read into the objects. Collective."""
        assert self._structure is not None
        begun = time.monotonic()
        values: dict[str, Any] = {}
        error: HoldfastError | None = None
        try:
            values = load(self._state, self._structure.tree, rank=self._peers.rank)
        except HoldfastError as refused:
            error = refused
        problem = _agree(self._peers, error)
        if problem is not None:
            raise DamageError(f"step {self._manifest.step}: {problem}")
        self._seconds["load"] = time.monotonic() - begun
        manifest = self._manifest
        if events is not None:
            events.emit(
                "restore",
                {
                    "attempt": manifest.attempt,
                    "file": manifest.file,
                    "image_bytes": manifest.image_bytes,
                    "bytes_read": self._bytes_read,
                    "in_place_bytes": self._adopted_bytes,
                    "saved_ranks": manifest.ranks,
                    "ranks": self._peers.ranks,
                    "seconds": self._seconds,
                    "skipped": skipped,
                },
                step=manifest.step,
            )
        return Restored(
            manifest.step, manifest.attempt, manifest, self._seconds, self._bytes_read, skipped, values
        )

    def _prepare(self) -> HoldfastError | None:
        """Make the tree, see that the state fits, and lay it over the live tensors."""
        data, error = b"", None
        if self._peers.rank == 0:
            try:
                data = read_structure_bytes(self._store, self._manifest)
            except HoldfastError as refused:
                error = refused
        data = self._peers.broadcast(data if self._peers.rank == 0 else None)
        if not data:
            return error
        try:
            structure = Structure(self._store, self._manifest, data)
            live = live_trees(self._state)
            check(self._state, live, structure.tree, self._manifest)
            self._adopted_bytes = structure.adopt(live)
        except HoldfastError as refused:
            return refused
        self._structure = structure
        return None


def _tell(peers: Peers, events: EventLog | None, reasons: list[str], instead: str) -> None:
    for reason in reasons:
        if peers.rank == 0:
            _log.warning("restore: %s; %s", reason, instead)
        if events is not None:
            events.emit("skipped", {"reason": reason, "instead": instead})


# -- the catalog, on rank 0 ------------------------------------------------------------------------------------------


def _read_catalog(store: Store, peers: Peers, step: int | None) -> Iterator[tuple[Manifest | None, str]]:
    """Yield, the same on every rank, each checkpoint from the newest on: its manifest, or why it has none that is good.

    Rank 0 alone asks the store: ranks that list at different times may see different runs.
    """
    items: list[CatalogItem] = []
    error: HoldfastError | None = None
    if peers.rank == 0:
        try:
            items = _items(store, step)
        except HoldfastError as refused:
            error = refused
    problem = _agree(peers, error)
    if problem is not None:
        raise StoreMissing(problem)
    return _broadcast_items(store, peers, items)


def _broadcast_items(
    store: Store, peers: Peers, items: list[CatalogItem]
) -> Iterator[tuple[Manifest | None, str]]:
    root = peers.rank == 0
    count = int(peers.broadcast(b"%d" % len(items) if root else None))
    for position in range(count):
        message = b""
        if root:
            item = items[position]
            good = item.manifest is not None and not item.fault
            message = (
                b"M" + item.manifest.to_bytes() if good and item.manifest else b"F" + item.fault.encode()
            )
        message = peers.broadcast(message if root else None)
        if message[:1] == b"M":
            yield Manifest.from_bytes(message[1:], source=f"{store.url} (from rank 0)"), ""
        else:
            yield None, message[1:].decode()


def _items(store: Store, step: int | None) -> list[CatalogItem]:
    items = list(Catalog(store).list())
    if step is None:
        return items
    wanted = [item for item in items if item.step == step]
    if not wanted:
        newest = f"the newest is {items[0].step}" if items else "there is no checkpoint at all"
        raise StoreMissing(f"{store.url}: no checkpoint of step {step}; {newest}")
    return wanted


# -- agreement -------------------------------------------------------------------------------------------------------


def _agree(peers: Peers, error: HoldfastError | None) -> str | None:
    """Tell each other how a stage went. Collective.

    Returns:
        None if it went well everywhere; what is damaged and which rank saw it, if another checkpoint may do.

    Raises:
        HoldfastError: What no other checkpoint mends: this rank's error, or the first one of another rank.
    """
    if peers.all_agree(error is None):
        return None
    found: list[tuple[int, HoldfastError]] = []
    for root in range(peers.ranks):
        mine = None
        if root == peers.rank:
            mine = b"" if error is None else json.dumps([error.code, str(error)]).encode()
        said = peers.broadcast(mine, root)
        if root == peers.rank and error is not None:
            found.append((root, error))
        elif said:
            found.append((root, peer_error(*json.loads(said))))
    final = [(rank, other) for rank, other in found if not isinstance(other, DamageError | StoreMissing)]
    if final:
        rank, error_of_rank = final[0]
        if error is not None and peers.rank in dict(final):
            raise error
        raise type(error_of_rank)(f"rank {rank}: {error_of_rank}")
    if peers.ranks == 1:
        return str(found[0][1])
    named = "; ".join(f"rank {rank}: {other}" for rank, other in found[:_NAMED])
    return f"{named}; and {len(found) - _NAMED} more ranks" if len(found) > _NAMED else named
