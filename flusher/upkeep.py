"""After a checkpoint is durable: read it back, say so in its manifest, and remove what is no longer to be kept.

One thread, one checkpoint after the other. Reading back gives way: it waits between two reads while anything waits to
be written, because the ring's chunks are wanted by the training and the verification by nobody in a hurry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from flusher.retention import to_remove
from flusher.steps import Key
from flusher.tenure import Tenure
from flusher.workers import Inbox, Workers
from holdfast.errors import DamageError, HoldfastError, StoreError, StoreMissing
from holdfast.manifest import Manifest, State, is_manifest_name, manifest_name
from holdfast.storage.base import Store
from holdfast.verify import verify_file

__all__ = ["Pruned", "ReadBack", "Upkeep"]

_log = logging.getLogger("holdfast.flusher")


class ReadBack(NamedTuple):
    """A checkpoint was read back. `state` is `durable` when the store failed and nothing is known."""

    key: Key
    state: State
    note: str
    seconds: float


class Pruned(NamedTuple):
    """Files that retention removed."""

    files: tuple[str, ...]


class Upkeep:
    """Verification and retention.

    Args:
        store: The run.
        tenure: The claim; nothing is changed in a run that is another's.
        inbox: Gets `ReadBack` and `Pruned`, and a `FencedError` when the run was taken over.
        verify: Whether to read back at all.
        keep_last: As the setting. `keep_every`: too.
    """

    def __init__(
        self, store: Store, tenure: Tenure, inbox: Inbox, *, verify: bool, keep_last: int, keep_every: int
    ) -> None:
        self._store, self._tenure, self._inbox = store, tenure, inbox
        self._verify, self._keep_last, self._keep_every = verify, keep_last, keep_every
        self._way_is_free = threading.Event()
        self._way_is_free.set()
        self._stopped = False
        self._pending = 0
        self._lock = threading.Lock()
        self._manifests: dict[str, Manifest] = {}  # known ones: nobody else writes them, so each is read once
        self._workers = Workers("upkeep", 1)

    @property
    def idle(self) -> bool:
        """Nothing is left to be done."""
        with self._lock:
            return self._pending == 0

    def give_way(self, busy: bool) -> None:
        """Tell whether something waits to be written."""
        if busy:
            self._way_is_free.clear()
        else:
            self._way_is_free.set()

    def published(self, key: Key, manifest: Manifest) -> None:
        """A new checkpoint is durable."""
        if self._stopped:
            return
        with self._lock:
            self._pending += 1
        self._workers.submit((0,), lambda: self._look_after(key, manifest))

    def stop(self) -> None:
        """Give up what waits and what runs: unread checkpoints stay durable."""
        self._stopped = True
        self._way_is_free.set()
        self._workers.stop()
        with self._lock:
            self._pending = 0

    def _look_after(self, key: Key, manifest: Manifest) -> None:
        try:
            if self._verify:
                manifest = self._read_back(key, manifest)
            self._manifests[manifest_name(manifest.file)] = manifest
            self._guarded(self._prune, "old checkpoints not removed")
        finally:
            with self._lock:
                self._pending -= 1
            self._inbox.put(None)  # the loop looks whether all is done

    def _read_back(self, key: Key, manifest: Manifest) -> Manifest:
        """Verify one file; the manifest as it now stands in the store."""
        begun = time.monotonic()
        try:
            report = verify_file(cast(Store, _PatientStore(self._store, self._wait)), manifest)
            state = State.VERIFIED if report.ok else State.BAD
            note = "" if report.ok else report.summary()
        except StoreError as error:
            self._inbox.put(ReadBack(key, State.DURABLE, str(error), time.monotonic() - begun))
            return manifest
        done = manifest.model_copy(update={"state": state, "note": note[:4096]})
        if self._guarded(lambda: self._replace(done), f"{key} not marked {state}"):
            self._inbox.put(ReadBack(key, state, note, time.monotonic() - begun))
            return done
        return manifest

    def _replace(self, manifest: Manifest) -> None:
        self._tenure.check()
        self._store.write(manifest_name(manifest.file), manifest.to_bytes())

    def _prune(self) -> None:
        if self._keep_last == 0:
            return
        names = [info.name for info in self._store.list() if is_manifest_name(info.name)]
        for name in names:
            if name not in self._manifests:
                try:
                    self._manifests[name] = Manifest.from_bytes(self._store.read(name), source=name)
                except (DamageError, StoreMissing) as error:
                    _log.warning("not looked at for retention: %s", error)
        self._manifests = {name: self._manifests[name] for name in names if name in self._manifests}
        manifests = list(self._manifests.values())
        old = to_remove(manifests, keep_last=self._keep_last, keep_every=self._keep_every)
        if not old:
            return
        self._tenure.check()
        for manifest in old:
            # The manifest first: a file without one is no checkpoint, a manifest without its file would be a lie.
            self._store.delete(manifest_name(manifest.file))
            self._store.delete(manifest.file)
        self._inbox.put(Pruned(tuple(manifest.file for manifest in old)))

    def _guarded(self, call: Callable[[], None], what: str) -> bool:
        try:
            call()
        except HoldfastError as error:
            _log.warning("%s: %s", what, error)
            if error.code == "fenced":
                self._inbox.put(error)
            return False
        return True

    def _wait(self) -> None:
        self._way_is_free.wait()
        if self._stopped:
            raise StoreError("the flusher ends; the rest was not read back")


class _PatientStore:
    """The store, for reading back: `read_into` waits until nothing more important wants it."""

    def __init__(self, store: Store, wait: Callable[[], None]) -> None:
        self._store, self._wait = store, wait

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._wait()
        self._store.read_into(name, offset, buffer)
