"""The slices of one rank in the store, and the ones among them that may go: the slots of the store as a tier.

    take ─► being written; older slices go for it ─► make_room ─► sealed ─► complete, or void
                                                       └► let_go: the older slices stay

Names are never written twice, so a slot is only a count here. Any thread.
"""

from __future__ import annotations

import logging
import threading

from holdfast.checkpoints.slice_sets import SliceName, SliceSet, find_sets, read_seal
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.store.base import Store

_log = logging.getLogger("holdfast.trainer")


class SliceShelf:
    """The slices of one rank in one run.

    Args:
        store: The run.
        slots: How many slices there may be, with those that are being written.
    """

    def __init__(self, store: Store, slots: int) -> None:
        self._store, self._slots = store, slots
        self._lock = threading.Lock()
        self._sealed: dict[CheckpointId, set[SliceName]] = {}  # in the store
        self._digests: dict[CheckpointId, str] = {}  # of their layouts
        self._writing: dict[CheckpointId, list[CheckpointId]] = {}  # and the slices that go for it
        self._void: set[CheckpointId] = set()
        self._completes: set[CheckpointId] = set()  # steps that were found complete, and the newest one
        self._found: set[CheckpointId] | None = None  # steps that were there at first: of earlier jobs
        self._forgotten: set[CheckpointId] = (
            set()
        )  # of these: steps that a listing called complete and that are not whole

    def note_found(self, rank: int, ranks: int) -> None:
        """Look for slices of earlier jobs: those of rank `r` now belong to rank `r` modulo `ranks`.

        Raises:
            StoreError: The store failed.
        """
        orders: set[CheckpointId] = set()
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

    def take(self, key: CheckpointId) -> bool:
        """Take a slot for this step, without a request. False: all are taken, or a newer step is complete."""
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

    def is_late(self, key: CheckpointId) -> bool:
        """Whether this step is no longer of use: it is void, or a newer step is complete."""
        with self._lock:
            return key in self._void or (self._complete is not None and key < self._complete)

    def sealed(self, name: SliceName, digest: str) -> None:
        with self._lock:
            self._digests[name.order] = digest
            self._sealed.setdefault(name.order, set()).add(name)
            self._writing.pop(name.order, None)

    def let_go(self, key: CheckpointId) -> None:
        """This step will not be sealed: its slot is free."""
        with self._lock:
            self._writing.pop(key, None)
            self._void.discard(key)

    def complete(self, key: CheckpointId) -> None:
        """Every rank has sealed this step: remove this rank's slices of other layouts. A failure is logged."""
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

    def void(self, key: CheckpointId) -> None:
        """Not every rank will seal this step: this rank's slice goes, now or when it would be sealed.

        A step that was found complete is not whole after all. It is protected no longer and goes first, but not before
        its place is needed.
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

    def make_room(self, key: CheckpointId) -> None:
        """Remove the slices that go for this step, before its first byte is sent.

        Raises:
            StoreError: The store failed.
        """
        with self._lock:
            going = list(self._writing.get(key, ()))
        for old in going:
            self._remove(old)

    def try_remove(self, keys: list[CheckpointId]) -> None:
        """Remove these slices; a failure is only logged, and retried when a slot is needed."""
        for key in keys:
            try:
                self._remove(key)
            except StoreError as error:
                _log.warning("%s: this rank's old slice stays in the store for now: %s", key, error)

    @property
    def _complete(self) -> CheckpointId | None:
        """The newest step that every rank has sealed. The caller holds the lock."""
        return max(self._completes, default=None)

    def _remove(self, key: CheckpointId) -> None:
        # The seal first: a slice without a seal is nothing, a seal without its slice would be a lie.
        with self._lock:
            names = sorted(self._sealed.get(key, ()))
        for name in names:
            self._store.delete(name.seal)
            reach(Point.SEAL_DELETED)
            self._store.delete(name.slice)
        with self._lock:
            self._sealed.pop(key, None)
            self._digests.pop(key, None)

    def _going(self) -> set[CheckpointId]:
        """The steps whose slices are removed for those that are being written. The caller holds the lock."""
        return {old for going in self._writing.values() for old in going}

    def _spare(self, key: CheckpointId) -> list[CheckpointId]:
        """The steps that may be removed, the first to go first. The caller holds the lock."""
        newest = self._complete
        going = self._going()
        others = [old for old in sorted(self._sealed) if old not in (newest, key) and old not in going]
        forgotten = [old for old in others if old in self._forgotten]
        others = [old for old in others if old not in forgotten]
        older = [old for old in others if newest is not None and old < newest]
        # A step that an earlier job did not complete will never be complete. If no step is known to be complete, the
        # oldest is the likeliest to be: so it goes last.
        dead = [old for old in others if old not in older and old.attempt < key.attempt]
        return forgotten + older + (dead if newest is not None else dead[::-1])

    def _digest_of(self, found: SliceSet, names: set[SliceName]) -> str:
        """The layout digest of a slice set; empty if none of this rank's seals can be read."""
        for name in sorted(name for name in names if name.rank in found.seals):
            try:
                return read_seal(self._store, name).layout_digest
            except (StoreMissing, DamageError):
                continue
        return ""
