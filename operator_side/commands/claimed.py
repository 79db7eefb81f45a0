"""What a tool does that writes to a run: it is the run's writer for as long, and reads back what it has written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.checkpoints.assembly import WRITE_ID_PREFIX
from holdfast.checkpoints.claim import Claim
from holdfast.checkpoints.verification import verify_file
from holdfast.command.output import progress_bar
from holdfast.errors import StoreError
from holdfast.image.manifest import Manifest, State, manifest_name
from holdfast.store.base import Store

_log = logging.getLogger("holdfast.cli")
_HEARTBEAT_SECONDS = 5.0


@contextmanager
def claimed(store: Store) -> Iterator[tuple[int, Callable[[], None]]]:
    """Be the run's writer inside. Gives the attempt, and a check that the run is still ours, to be called often.

    What a tool that died has left half sent is removed first.

    Raises:
        FencedError: Another writer is alive, or was faster.
        StoreError: The store failed.
    """
    claim = Claim.take(store, heartbeat_seconds=_HEARTBEAT_SECONDS)
    try:
        store.sweep(lambda own: not own.startswith(f"{WRITE_ID_PREFIX}-"))
        yield claim.attempt, _watch(claim)
    finally:
        claim.release()


def read_back(store: Store, manifest: Manifest, check: Callable[[], None], *, quiet: bool) -> Manifest:
    """Read what was published, and write the verdict into its manifest.

    Args:
        store: The run.
        manifest: What was published.
        check: Sees that the run is still ours.
        quiet: Show no progress.
    """
    with progress_bar(manifest.file, manifest.image_bytes, hidden=quiet) as advance:
        report = verify_file(store, manifest, progress=advance)
    state = State.VERIFIED if report.ok else State.BAD
    note = "" if report.ok else report.summary()
    done = manifest.model_copy(update={"state": state, "note": note[:4096]})
    check()
    store.write(manifest_name(manifest.file), done.to_bytes())
    return done


def _watch(claim: Claim) -> Callable[[], None]:
    """A check of the claim that beats as well, when it is time."""
    beaten = [time.monotonic()]

    def check() -> None:
        if time.monotonic() - beaten[0] < _HEARTBEAT_SECONDS:
            claim.check()
            return
        beaten[0] = time.monotonic()
        try:
            claim.beat()
        except StoreError as error:
            _log.warning("no heartbeat: %s", error)
            claim.check()

    return check
