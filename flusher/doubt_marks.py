"""Marks checkpoints that may be torn, because a rank reported doubt about its copy of these steps.

doubts beside the ring ─► each published manifest of these steps gets `doubt`, with retries until the store has all
└─► so does each manifest published later
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from flusher.flusher_context import FlusherContext
from holdfast.checkpoints.manifest_order import step_of
from holdfast.errors import DamageError, FencedError, HoldfastError, StoreMissing
from holdfast.image.manifest import Manifest, is_manifest_name
from holdfast.ring.doubts import DoubtedSteps, doubt_about

_log = logging.getLogger("holdfast.flusher")
_RETRY_SECONDS = 1.0
_NOTE_CHARACTERS_MAX = 4096


class DoubtMarks:
    """Marks torn checkpoints in the store. `write_all` and `with_mark` run in the maintenance thread.

    Args:
        context: Its inbox gets a `FencedError` when another writer has taken the run over.
        replace: Overwrites a manifest in the store.

    Attributes:
        is_pending: Whether a published checkpoint may still lack its mark.
    """

    def __init__(self, context: FlusherContext, replace: Callable[[Manifest], None]) -> None:
        self._store, self._inbox, self._events = context.store, context.inbox, context.events
        self._replace = replace
        self._doubts: tuple[DoubtedSteps, ...] = ()
        self._refused_since: tuple[float, HoldfastError] | None = (
            None  # when marking began, and the last error
        )
        self._stopped = False
        self.is_pending = False

    @property
    def store_refusal(self) -> tuple[float, HoldfastError] | None:
        """Seconds for which the store has refused marks, and its last error; None while it accepts them."""
        refusal = self._refused_since
        return None if refusal is None else (time.monotonic() - refusal[0], refusal[1])

    def update(self, found: Sequence[DoubtedSteps]) -> bool:
        """Take the full list of doubts; return whether it has changed."""
        if not found or tuple(found) == self._doubts:
            return False
        self._doubts = tuple(found)
        return True

    def stop(self) -> None:
        """Stop retrying."""
        self._stopped = True

    def with_mark(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the doubt about its checkpoint, or the same object if there is nothing to add."""
        key = manifest.order
        if manifest.doubt or not (reason := doubt_about(self._doubts, key)):
            return manifest
        _log.error("%s is doubtful, and restore prefers others: %s", key, reason)
        fields = {"attempt": key.attempt, "note": reason[:_NOTE_CHARACTERS_MAX]}
        self._events.emit("doubted", fields, step=key.step)
        return manifest.with_doubt(reason)

    def write_all(self) -> None:
        """Mark all doubted manifests in the store; retry until that succeeds or `stop` is called."""
        doubts, since = self._doubts, time.monotonic()
        while not self._stopped:
            try:
                self._mark_published(doubts)
            except FencedError as error:
                self._inbox.put(error)
                return
            except HoldfastError as error:
                _log.warning("doubtful checkpoints are not marked yet; retrying: %s", error)
                self._refused_since = since, error
                self._inbox.put(None)  # wakes the loop, which may be idle: it looks at `store_refusal`
                time.sleep(_RETRY_SECONDS)
            else:
                self._refused_since = None
                self.is_pending = doubts is not self._doubts
                return

    def _mark_published(self, doubts: Sequence[DoubtedSteps]) -> None:
        for info in self._store.list():
            if not is_manifest_name(info.name):
                continue
            step = step_of(info.name)
            if not any(one.doubt.covers(step) for one in doubts):
                continue
            try:
                manifest = Manifest.from_bytes(self._store.read(info.name), source=info.name)
            except (DamageError, StoreMissing) as error:
                _log.warning("%s: not marked as doubtful: %s", info.name, error)
                continue
            marked = self.with_mark(manifest)
            if marked is not manifest:
                self._replace(marked)
