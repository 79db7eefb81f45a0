"""Maintenance of durable checkpoints: reads them back, records the result in their manifests, and removes old ones.

One thread handles one checkpoint after the other. Read-back gives way to writes (read_pace.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flusher.doubt_marks import DoubtMarks
from flusher.flusher_context import FlusherContext
from flusher.proof_writing import ProofWriter
from flusher.read_pace import ReadPace
from flusher.retention import RetentionPolicy, StoredStep, to_remove
from flusher.workers import Workers
from holdfast.checkpoints.branches import Branches
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.intents import Intent, discard_intent
from holdfast.checkpoints.verification import verify_file
from holdfast.errors import DamageError, FencedError, HoldfastError, StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import READ_BACK, Manifest, State, is_manifest_name, manifest_name
from holdfast.image.proof_record import ProofRecord
from holdfast.ring.doubts import DoubtedSteps
from holdfast.store.wrapper import ThrottledStore

_log = logging.getLogger("holdfast.flusher")
_UNREAD_CHECKED_MAX = 3  # an older one is restored only when these are bad, and restore checks what it reads


class ReadBack(NamedTuple):
    """Result of reading a checkpoint back. `state` is `durable` if the store failed, or if the checkpoint is intact
    with a caveat.

    Attributes:
        caveat: `drifted` or `doubtful`, of an intact checkpoint; else empty.
        nonfinite: How many of its numbers are not finite; None: not counted. `nonfinite_text`: the same in words, if
            some are.
    """

    key: CheckpointId
    state: State
    note: str
    seconds: float
    caveat: str = ""
    nonfinite: int | None = None
    nonfinite_text: str = ""

    @property
    def event(self) -> str:
        if self.caveat:
            return self.caveat
        return {State.VERIFIED: "verified", State.BAD: "bad", State.DURABLE: "verify_failed"}[self.state]


class Pruned(NamedTuple):
    """Files that retention removed."""

    files: tuple[str, ...]


@dataclass(frozen=True)
class MaintenanceRules:
    """Settings for published checkpoints.

    Attributes:
        reuse: Whether the next checkpoint may overwrite the blocks of a removed one.
        refuse_nonfinite: Whether a checkpoint with numbers that are not finite is marked bad.
    """

    verify: bool
    keep: RetentionPolicy
    reuse: bool = True
    refuse_nonfinite: bool = False


class Maintenance:
    """Verification and retention.

    Args:
        context: Its inbox gets `ReadBack` and `Pruned`, and a `FencedError` if another writer took the run over.
        set_aside: Returns the checkpoints that the run's supervisor has set aside so far.

    Attributes:
        marks: Marks of checkpoints that may be torn.
    """

    def __init__(
        self,
        context: FlusherContext,
        rules: MaintenanceRules,
        *,
        set_aside: Callable[[], Sequence[CheckpointId]] = tuple,
        pace: ReadPace | None = None,
    ) -> None:
        self._store = store = context.store
        self._lease, self._inbox, self._events = context.lease, context.inbox, context.events
        self._rules, self._set_aside = rules, set_aside
        self._remove = store.retire if rules.reuse else store.delete
        self._pace = pace or ReadPace()
        self._stopped = False
        self._pending = 0
        self._lock = threading.Lock()
        self._known: dict[str, StoredStep] = {}  # by manifest: nobody else writes them, so each is read once
        # Only that of the newest published checkpoint: a manifest names every tensor.
        self._newest: Manifest | None = None
        self._protected: set[CheckpointId] = set()  # manifests of these may exist, and be written again
        self._write_ids: dict[str, str] = {}  # by manifest: the last write known
        self._waiting: set[str] = set()  # write-ids queued or in progress; each is handled once
        self._removed: set[str] = set()  # write-ids that retention removed before their read-back
        self.marks = DoubtMarks(context, self._replace)
        self._proofs = ProofWriter(context)
        self._workers = Workers("maintenance", 1)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._lock:
            return self._pending == 0

    def set_busy(self, busy: bool) -> None:
        self._pace.set_busy(busy)

    def add_written(self, nbytes: int) -> None:
        self._pace.add_written(nbytes)

    def protect(self, key: CheckpointId) -> None:
        """Protect a checkpoint from retention while it is being written and published."""
        with self._lock:
            self._protected.add(key)

    def unprotect(self, key: CheckpointId) -> None:
        """End the protection of a checkpoint that will not be published."""
        with self._lock:
            self._protected.discard(key)

    def enqueue(self, key: CheckpointId, manifest: Manifest) -> None:
        """Queue a new durable checkpoint for read-back and retention."""
        if self._stopped:
            return
        with self._lock:
            self._protected.discard(key)
            self._write_ids[manifest_name(manifest.file)] = manifest.write_id
            if manifest.write_id in self._waiting:  # a flusher that takes over may report it twice
                return
            self._waiting.add(manifest.write_id)
            self._pending += 1
            self._newest = manifest
        known = StoredStep.of(manifest)
        self._workers.submit((0,), lambda: self._maintain(key, known))

    def update_doubts(self, found: Sequence[DoubtedSteps]) -> None:
        """Mark the published checkpoints of these steps, and those published later. `found` has all earlier doubts."""
        if self.marks.update(found):
            self._retry_marks()

    def update_proofs(self, found: Sequence[ProofRecord]) -> None:
        """Write these proofs beside the published checkpoints that they belong to."""
        if self._proofs.update(found):
            self._submit(self._write_proofs)

    def _write_proofs(self) -> None:
        with self._lock:
            protected = frozenset(self._protected)
        self._guarded(lambda: self._proofs.write_all(protected), "a proof of a resume is not written")

    def _retry_marks(self) -> None:
        """Retry until every mark is in the store."""
        self.marks.is_pending = True
        self._submit(self.marks.write_all)

    def catch_up(self) -> None:
        """Read back the newest files, if an earlier flusher did not."""
        self._submit(self._enqueue_unread)

    def _submit(self, call: Callable[[], object]) -> None:
        """Queue a call for the thread, behind the checkpoints that wait there."""
        if self._stopped:
            return

        def do() -> None:
            try:
                call()
            finally:
                with self._lock:
                    self._pending -= 1
                self._inbox.put(None)

        with self._lock:
            self._pending += 1
        self._workers.submit((1,), do)

    def _enqueue_unread(self) -> None:
        """Runs in the worker thread."""
        try:
            found: list[Manifest] = []
            listing = Catalog(self._store).read_listing()
            if listing.old_slices:
                _log.warning("%s", listing.old_slices)
            for item in listing.items(listing.current):
                if item.manifest is None:
                    _log.warning("a checkpoint is not read back from the store: %s", item.fault)
                elif len(found) < _UNREAD_CHECKED_MAX or item.manifest.state is not State.BAD:
                    found.append(item.manifest)
                if len(found) >= _UNREAD_CHECKED_MAX and any(one.state is not State.BAD for one in found):
                    break
            self._report_newest(found)
            for manifest in found[:_UNREAD_CHECKED_MAX]:
                is_unread = manifest.state is State.DURABLE and manifest.note != READ_BACK
                if self._rules.verify and is_unread:
                    self.enqueue(manifest.order, manifest)
        except (StoreError, DamageError) as error:
            _log.warning("checkpoints that an earlier flusher did not read back stay unverified: %s", error)

    def _report_newest(self, found: Sequence[Manifest]) -> None:
        """Report how far the run is as this flusher starts."""
        good = next((manifest for manifest in found if manifest.state is not State.BAD), None)
        if good is not None:
            self._events.emit(
                "found",
                {"attempt": good.attempt, "state": good.state.value, "created": good.created},
                step=good.step,
            )

    def stop(self) -> None:
        """Drop queued and running work: unread checkpoints stay durable."""
        self._stopped = True
        self.marks.stop()
        self._pace.end()
        self._workers.stop()
        with self._lock:
            self._pending = 0

    def _maintain(self, key: CheckpointId, known: StoredStep) -> None:
        name = manifest_name(known.file)
        try:
            discard_intent(self._store, known.write_id)
            if self._is_removed(known):
                return
            self._known[name] = known
            self._guarded(
                lambda: self._proofs.write_for(key, known.file), f"the proof of {key} is not written"
            )
            if self._is_behind():
                self._guarded(self._prune, "old checkpoints not removed")
                if self._is_removed(known):
                    return
            manifest = self._manifest(known)
            if manifest is not None and (marked := self.marks.with_mark(manifest)) is not manifest:
                manifest = marked  # before the long read-back
                if not self._guarded(lambda: self._replace(marked), f"{key} not marked as doubtful"):
                    self._retry_marks()
            if manifest is not None and self._rules.verify:
                manifest = self._read_back(key, manifest)
                self._known[name] = StoredStep.of(manifest)
            self._guarded(self._prune, "old checkpoints not removed")
        finally:
            self._removed.discard(known.write_id)
            with self._lock:
                self._waiting.discard(known.write_id)
                self._pending -= 1
            self._inbox.put(None)  # wakes the loop, which checks whether all is done

    def _is_removed(self, known: StoredStep) -> bool:
        return known.write_id in self._removed

    def _is_behind(self) -> bool:
        """Whether newer checkpoints wait and one is verified: then removable ones go without being read."""
        with self._lock:
            waits = self._pending > 1
        return (
            waits and self._rules.verify and any(one.state is State.VERIFIED for one in self._known.values())
        )

    def _manifest(self, known: StoredStep) -> Manifest | None:
        """Return its manifest, read from the store if it is not the newest; None: unreadable, or of another write."""
        newest = self._newest
        if newest is not None and newest.write_id == known.write_id:
            return newest
        found: list[Manifest] = []

        def read() -> None:
            name = manifest_name(known.file)
            found.append(Manifest.from_bytes(self._store.read(name), source=name))

        self._guarded(read, f"{known.file} not read back")
        return found[0] if found and found[0].write_id == known.write_id else None

    def _read_back(self, key: CheckpointId, manifest: Manifest) -> Manifest:
        """Verify one file; return the manifest as it now stands in the store."""
        begun = time.monotonic()
        try:
            report = verify_file(_ReadBackStore(self._store, self._wait), manifest)
        except StoreError as error:
            self._inbox.put(ReadBack(key, State.DURABLE, str(error), time.monotonic() - begun))
            return manifest
        counted = report.nonfinite
        nonfinite_text = counted.describe() if counted is not None and counted.values else ""
        refused = bool(nonfinite_text) and self._rules.refuse_nonfinite
        manifest = self.marks.with_mark(manifest)  # new doubts may have arrived during the read
        has_caveat = report.ok and not refused and bool(manifest.caveat)
        good_state = State.DURABLE if has_caveat else State.VERIFIED
        state = good_state if report.ok and not refused else State.BAD
        if nonfinite_text:
            _log.warning("%s: %s%s", key, nonfinite_text, "; restore does not use it" if refused else "")
        note = (
            report.summary()
            if not report.ok
            else nonfinite_text
            if refused
            else READ_BACK
            if has_caveat
            else ""
        )
        done = manifest.model_copy(update={"state": state, "note": note[:4096], "nonfinite": counted})
        if self._guarded(lambda: self._replace(done), f"{key} not marked {state}"):
            values = None if counted is None else counted.values
            summary = manifest.caveat if has_caveat else note or nonfinite_text
            seconds = time.monotonic() - begun
            caveat = manifest.display_state if has_caveat else ""
            self._inbox.put(ReadBack(key, state, summary, seconds, caveat, values, nonfinite_text))
            return done
        if manifest.doubt:
            self._retry_marks()
        return manifest

    def _replace(self, manifest: Manifest) -> None:
        name = manifest_name(manifest.file)
        self._store.write(name, manifest.to_bytes())
        self._lease.remove_if_dangling(manifest)
        if name in self._known:
            self._known[name] = StoredStep.of(manifest)
        if self._newest is not None and self._newest.write_id == manifest.write_id:
            self._newest = manifest
        if manifest.doubt:
            reach(Point.DOUBT_MARKED)

    def _is_of_another_write(self, name: str) -> bool:
        """Whether the manifest known here by this name was replaced by another write."""
        return self._write_ids.get(name, self._known[name].write_id) != self._known[name].write_id

    def make_room(self) -> None:
        """The store is full: remove checkpoints that only the ladder keeps. Checkpoints kept by other settings stay."""
        keep = self._rules.keep
        if keep != keep.without_rungs():
            self._submit(lambda: self._guarded(lambda: self._prune(keep.without_rungs()), "no room was made"))

    def _prune(self, keep: RetentionPolicy | None = None) -> None:
        keep = keep or self._rules.keep
        if keep.last == 0:
            return
        objects = self._store.list()
        names = [info.name for info in objects if is_manifest_name(info.name)]
        for name in names:
            if name not in self._known or self._is_of_another_write(name):
                try:
                    self._known[name] = StoredStep.of(
                        Manifest.from_bytes(self._store.read(name), source=name)
                    )
                except (DamageError, StoreMissing) as error:
                    _log.warning("a checkpoint is left out when old ones are removed: %s", error)
        self._known = {name: self._known[name] for name in names if name in self._known}
        branches = Branches.read(self._store, objects)
        old = to_remove(
            list(self._known.values()), keep, self._set_aside(), branches if branches.rewinds else None
        )
        if not old:
            return
        removed: list[str] = []
        for one in old:
            name = manifest_name(one.file)
            with self._lock:
                if any(key.step == one.step for key in self._protected) or self._is_of_another_write(name):
                    continue
                if one.write_id in self._waiting:
                    self._removed.add(one.write_id)
                self._write_ids.pop(name, None)
            self._known.pop(name)
            if self._remove_one(name, one):
                removed.append(one.file)
        if removed:
            self._inbox.put(Pruned(tuple(removed)))

    def _remove_one(self, name: str, one: StoredStep) -> bool:
        """Remove a checkpoint, unless another write has replaced it."""
        try:
            manifest = Manifest.head_from_bytes(self._store.read(name), source=name)
        except (DamageError, StoreMissing) as error:
            _log.warning("not removed: %s", error)
            return False
        if manifest.write_id != one.write_id:
            _log.warning("%s: not removed, because another write has replaced it", name)
            return False
        self._proofs.delete(one.order, one.file)
        Intent.to_remove(manifest).write(self._store)
        # The manifest first: a file without one is no checkpoint, a manifest without its file would be a lie.
        try:
            self._store.delete(name)
        except FencedError:
            discard_intent(self._store, one.write_id)
            raise
        reach(Point.MANIFEST_DELETED)
        self._remove(one.file)
        discard_intent(self._store, one.write_id)
        return True

    def _guarded(self, call: Callable[[], None], what: str) -> bool:
        try:
            call()
        except HoldfastError as error:
            _log.warning("%s: %s", what, error)
            if error.code == "fenced":
                self._inbox.put(error)
            return False
        return True

    def _wait(self, nbytes: int) -> None:
        if not self._pace.wait(nbytes):
            raise StoreError(
                "the flusher ends, so the rest of the checkpoint was not read back from the store"
            )


class NoMaintenance(Maintenance):
    """Maintenance of a flusher that does not lead: only the lead maintains published checkpoints."""

    def protect(self, key: CheckpointId) -> None: ...

    def enqueue(self, key: CheckpointId, manifest: Manifest) -> None: ...

    def update_doubts(self, found: Sequence[DoubtedSteps]) -> None: ...

    def update_proofs(self, found: Sequence[ProofRecord]) -> None: ...

    def catch_up(self) -> None: ...

    def make_room(self) -> None: ...


class _ReadBackStore(ThrottledStore):
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        super().read_into(name, offset, buffer)
        reach(Point.VERIFYING)
