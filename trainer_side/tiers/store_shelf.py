"""Which slices of one rank lie in the store, and which of them may go: the slots of the store's tier.

    take ─► being written, and what goes for it ─► make_room ─► sealed ─► complete, or void
                                                     └► let_go: what was to go stays

Names are never written twice, so a slot is only a count here. Any thread.
"""

from __future__ import annotations

import logging
import threading

from holdfast.checkpoints.slice_sets import SliceName, SliceSet, find_sets, read_seal
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.manifest import Key
from holdfast.store.base import Store

_log = logging.getLogger("holdfast.trainer")


class SliceShelf:
    """The slices of one rank in one run.

    Args:
        store: The run.
        slots: How many there may be, what is being written included.
    """

    def __init__(self, store: Store, slots: int) -> None:
        self._store, self._slots = store, slots
        self._lock = threading.Lock()
        self._sealed: dict[Key, set[SliceName]] = {}  # in the store
        self._digests: dict[Key, str] = {}  # of their layouts
        self._writing: dict[Key, list[Key]] = {}  # and what goes for it
        self._void: set[Key] = set()
        self._completes: set[Key] = set()  # those that were found, and the newest
        self._found: set[Key] | None = None  # what was there at first: of earlier jobs
        self._forgotten: set[Key] = set()  # of these: complete in a listing, and not whole

    def note_found(self, rank: int, ranks: int) -> None:
        """See what earlier jobs left: of rank `r` it belongs to rank `r` modulo `ranks`. Raises `StoreError`."""
        orders: set[Key] = set()
        for found in find_sets(self._store.list()):
            mine = {name for name in found.names() if name.rank % ranks == rank}
            digest = self._digests.get(found.order) or self._digest_of(found, mine)
            with self._lock:
                orders.add(found.order)
                if found.complete and found.order not in self._forgotten:
                    self._completes.add(found.order)
                if mine and found.order not in self._writing:
                    self._sealed.setdefault(found.order, set()).update(mine)
                    self._digests[found.order] = digest
        self._found = orders if self._found is None else self._found

    def take(self, key: Key) -> bool:
        """A slot for this step; False while all are taken, or if a newer step is complete. Asks the store nothing."""
        with self._lock:
            if key in self._writing or (self._complete and key <= self._complete):
                return False
            going = [key] if key in self._sealed else []  # sealed, and saved once more
            taken = (self._sealed.keys() - self._going()) | self._writing.keys()
            going += self._spare(key)[: max(0, len(taken - {key}) + 1 - self._slots)]
            if len(taken - {key} - set(going)) + 1 > self._slots:
                return False
            self._writing[key] = going
            self._void.discard(key)
            return True

    def is_late(self, key: Key) -> bool:
        """Whether this step is not wanted any more."""
        with self._lock:
            return key in self._void or (self._complete is not None and key < self._complete)

    def sealed(self, name: SliceName, digest: str) -> None:
        """Its seal is in the store."""
        with self._lock:
            self._digests[name.order] = digest
            self._sealed.setdefault(name.order, set()).add(name)
            self._writing.pop(name.order, None)

    def let_go(self, key: Key) -> None:
        """It will not be sealed: its slot is free."""
        with self._lock:
            self._writing.pop(key, None)
            self._void.discard(key)

    def complete(self, key: Key) -> None:
        """Every rank has sealed it: this rank's slices of other layouts go. A failure is logged, and tried again."""
        with self._lock:
            newest = max(key, self._complete or key)
            self._completes = {order for order in self._completes if order in (self._found or ())} | {
                newest,
                key,
            }
            present = self._digests.get(newest)
            old = [
                order
                for order in sorted(self._sealed)
                if order < newest and present and self._digests.get(order) != present
            ]
        self.try_remove(old)

    def void(self, key: Key) -> None:
        """Not every rank will seal it: this rank's slice goes, now or when it would be sealed.

        Of a step that was found complete: it is not whole after all. It is protected no longer, and goes first, but not
        before its place is needed.
        """
        with self._lock:
            if key in self._completes:
                if key in (self._found or ()):
                    self._completes.discard(key)
                    self._forgotten.add(key)
                return
            if key in self._writing:
                self._void.add(key)
            gone = [key] if key in self._sealed else []
        self.try_remove(gone)

    def make_room(self, key: Key) -> None:
        """Remove what goes for this step, before the first byte of it is sent. Raises `StoreError`."""
        with self._lock:
            going = list(self._writing.get(key, ()))
        for old in going:
            self._remove(old)

    def try_remove(self, keys: list[Key]) -> None:
        """Remove these slices; a failure is only logged, and tried again when a slot is needed."""
        for key in keys:
            try:
                self._remove(key)
            except StoreError as error:
                _log.warning("%s: this rank's old slice stays in the store for now: %s", key, error)

    @property
    def _complete(self) -> Key | None:
        """The newest step that every rank has sealed. With the lock."""
        return max(self._completes, default=None)

    def _remove(self, key: Key) -> None:
        """The seal first: a slice without one is nothing, a seal without its slice would be a lie."""
        with self._lock:
            names = sorted(self._sealed.get(key, ()))
        for name in names:
            self._store.delete(name.seal)
            reach(Point.SEAL_DELETED)
            self._store.delete(name.slice)
        with self._lock:
            self._sealed.pop(key, None)
            self._digests.pop(key, None)

    def _going(self) -> set[Key]:
        """What is to go for what is being written. With the lock."""
        return {old for going in self._writing.values() for old in going}

    def _spare(self, key: Key) -> list[Key]:
        """What may go, in the order in which it goes. With the lock."""
        newest = self._complete
        going = self._going()
        others = [old for old in sorted(self._sealed) if old not in (newest, key) and old not in going]
        forgotten = [old for old in others if old in self._forgotten]
        others = [old for old in others if old not in forgotten]
        older = [old for old in others if newest is not None and old < newest]
        # What a job before this one did not complete it never will. If nothing is seen to be complete, the oldest is
        # the likeliest to have been: so it goes last.
        dead = [old for old in others if old not in older and old.attempt < key.attempt]
        return forgotten + older + (dead if newest is not None else dead[::-1])

    def _digest_of(self, found: SliceSet, names: set[SliceName]) -> str:
        """Of which layout a set is; empty if none of its seals that are this rank's says so."""
        for name in sorted(names):
            try:
                return read_seal(self._store, name, found.seals[name.rank]).layout_digest
            except (KeyError, StoreMissing, DamageError):
                continue
        return ""
