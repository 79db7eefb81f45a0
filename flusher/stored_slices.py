"""Slices that training ranks wrote to the store themselves, while no stager took them: made into files, cleared away.

    start      ─► the newest complete set, if it is newer than every good manifest ─► file, manifest ─► read back
    attach     ─► of jobs before this one: incomplete sets, uploads that nobody goes on with, layouts
    published  ─► sets of jobs before that of a checkpoint that is good          end ─► sets that became files here

Slices that a job may still restore from stay until that job has a checkpoint of its own: its ranks may be reading the
slices at this very moment. Everything here runs in the maintenance's thread, and gives way to what the training waits
for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from flusher.writer_lease import WriterLease
from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.slice_sets import (
    SliceSet,
    complete_sets,
    find_sets,
    load_set,
    remove_set,
    remove_stale,
    sweep_uploads,
)
from holdfast.errors import BusyError, DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest
from holdfast.store.base import Store
from holdfast.telemetry.events import EventLog

_log = logging.getLogger("holdfast.flusher")


class Slices:
    """The slices of one run. For one thread, the maintenance's.

    Args:
        patient: The same, for long reads: it waits while anything waits to be written.
        lease: The claim, checked before anything changes.
    """

    def __init__(self, store: Store, patient: Store, lease: WriterLease, events: EventLog | None) -> None:
        self._store, self._patient, self._lease, self._events = store, patient, lease, events
        self._made: list[SliceSet] = []  # files by now, their slices still there
        self._cleared_attempt = 0  # of the jobs before it nothing is left

    def assemble_newest(self, under_way: Callable[[], Collection[CheckpointId]]) -> Manifest | None:
        """Publish the newest complete set that is good and newer than every good manifest; None without one.
        `under_way`: checkpoints that come from the ring; the same step need not be made twice.

        Raises:
            FencedError: The run is another's.
            StoreError: The store failed; what was written is taken back, the slices are there.
        """
        passed_over: set[tuple[CheckpointId, int]] = set()
        while True:
            found = self._newest(passed_over)
            if found is None or found.order in under_way():
                return None
            try:
                manifest = assemble(
                    self._patient,
                    load_set(self._store, found),
                    attempt=self._lease.attempt,
                    check=self._lease.check,
                )
            except (DamageError, BusyError) as error:
                # Damaged, or gone while it was read: a living job removes a set when a newer one is complete.
                _log.error("%s: the slices in the store are not used: %s", found.order, error)
                self._emit("slices_bad", {"attempt": found.attempt, "message": str(error)}, step=found.step)
                passed_over.add((found.order, found.ranks))
                continue
            told = {"attempt": found.attempt, "file": manifest.file, "slices": found.ranks}
            self._emit("assembled", told, step=found.step)
            self._made.append(found)
            return manifest

    def attached(self, attempt: int) -> None:
        """A job of this attempt has begun, so those before it are over: remove what they left half done. Raises
        `FencedError` or `StoreError`: as `assemble_newest`.
        """
        self._lease.check()
        removed = sweep_uploads(self._store, attempt)
        removed += remove_stale(self._store, attempt)
        for what in removed:
            self._emit("swept", {"what": what})

    def published(self, manifest: Manifest) -> None:
        """This checkpoint is good: the slices of jobs before its own are not needed any more.

        Only the first one of a job looks at the store: where all checkpoints are kept, that is a long list.

        Raises:
            FencedError, StoreError: As `assemble_newest`.
        """
        if manifest.attempt <= self._cleared_attempt:
            return
        sets = find_sets(self._store.list())
        self._remove([found for found in sets if found.attempt < manifest.attempt])
        self._cleared_attempt = manifest.attempt

    def ended(self, good: Callable[[CheckpointId], bool]) -> None:
        """No stager is attached any more: remove the slices that this flusher has made into good files. Raises
        `FencedError` or `StoreError`: as `assemble_newest`.
        """
        self._remove([found for found in self._made if good(found.order)])

    def _newest(self, passed_over: Collection[tuple[CheckpointId, int]]) -> SliceSet | None:
        sets = complete_sets(find_sets(self._store.list()))
        sets = [found for found in sets if (found.order, found.ranks) not in passed_over]
        if not sets:
            return None  # without a look at the manifests, which are many
        good = Catalog(self._store).newest_good()
        return sets[0] if good is None or sets[0].order > good.order else None

    def _remove(self, sets: Collection[SliceSet]) -> None:
        if not sets:
            return
        self._lease.check()
        for found in sets:
            names = remove_set(self._store, found)
            self._emit("swept", {"what": f"{len(names)} objects of the slices of {found.order}"})
            self._made = [made for made in self._made if made.order != found.order]

    def _emit(self, event: str, fields: dict[str, object], *, step: int | None = None) -> None:
        if self._events is not None:
            self._events.emit(event, fields, step=step)
