"""Helpers for tools that write to a run: hold the run's lease, and read back the checkpoint that was written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.checkpoints.intents import clear_intents
from holdfast.checkpoints.lease import Lease, LeasedRun
from holdfast.checkpoints.publish import ASSEMBLY
from holdfast.checkpoints.verification import verify_file
from holdfast.command.output import progress_bar
from holdfast.errors import StoreError
from holdfast.image.manifest import Manifest, State, manifest_name
from holdfast.store.base import Store
from holdfast.store.guarded import guarded

_log = logging.getLogger("holdfast.cli")
_HEARTBEAT_SECONDS = 5.0


@contextmanager
def claimed(store: Store) -> Iterator[LeasedRun]:
    """Hold the lease of the run, after a sweep of unfinished uploads. Raises `FencedError`: another writer holds it."""
    lease = Lease.acquire(store, heartbeat_seconds=_HEARTBEAT_SECONDS)
    try:
        guarded_store = guarded(store, lambda: lease.check(without_retries=True))
        guarded_store.sweep(_is_not_tool_file)
        clear_intents(guarded_store, lease.attempt, _is_not_tool_file)
        yield LeasedRun(guarded_store, lease.attempt, _lease_check(lease))
    finally:
        lease.release()


def read_back(store: Store, manifest: Manifest, *, quiet: bool) -> Manifest:
    """Read a published checkpoint back; record in its manifest whether it is good. Only warn of non-finite values."""
    with progress_bar(manifest.file, manifest.image_bytes, hidden=quiet) as advance:
        report = verify_file(store, manifest, progress=advance)
    state = State.VERIFIED if report.ok else State.BAD
    note = "" if report.ok else report.summary()
    if report.nonfinite is not None and report.nonfinite.values:
        _log.warning("%s: %s", manifest.file, report.nonfinite.describe())
    done = manifest.model_copy(update={"state": state, "note": note[:4096], "nonfinite": report.nonfinite})
    store.write(manifest_name(manifest.file), done.to_bytes())
    return done


def _is_not_tool_file(own: str) -> bool:
    return not own.startswith(ASSEMBLY)


def _lease_check(lease: Lease) -> Callable[[], None]:
    """Return a check of the lease that also renews the lease when that is due."""
    last_beat = [time.monotonic()]

    def check() -> None:
        if time.monotonic() - last_beat[0] < _HEARTBEAT_SECONDS:
            lease.check()
            return
        last_beat[0] = time.monotonic()
        try:
            lease.beat()
        except StoreError as error:
            _log.warning("the claim on the run could not be renewed: %s", error)
            lease.check()

    return check
