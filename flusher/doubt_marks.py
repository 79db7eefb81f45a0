"""Marks in the manifests of checkpoints that may be torn: a rank has doubted its copy of these steps.

doubts beside the ring ─► each published manifest of these steps gets `doubt`, tried until the store takes all
└─► so does whatever is published later
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
_AGAIN_SECONDS = 1.0
_NOTE_CHARACTERS_MAX = 4096


class DoubtMarks:
    """See the module. `write_all` and `marked` are called in the thread of the maintenance.

    Args:
        context: The run. Its inbox gets a `FencedError` when the run was taken over.
        replace: Writes a manifest once more.

    Attributes:
        owed: A published checkpoint may lack its mark.
    """

    def __init__(self, context: FlusherContext, replace: Callable[[Manifest], None]) -> None:
        self._store, self._inbox, self._events = context.store, context.inbox, context.events
        self._replace = replace
        self._doubts: tuple[DoubtedSteps, ...] = ()
        self._refused: tuple[float, HoldfastError] | None = None  # since when, and the last reason
        self._stopped = False
        self.owed = False

    @property
    def refused(self) -> tuple[float, HoldfastError] | None:
        """For how many seconds the store has refused marks, and the last reason; None while it does not."""
        refused = self._refused
        return None if refused is None else (time.monotonic() - refused[0], refused[1])

    def learn(self, found: Sequence[DoubtedSteps]) -> bool:
        """Take all doubts that there are so far; whether they are news."""
        if not found or tuple(found) == self._doubts:
            return False
        self._doubts = tuple(found)
        return True

    def stop(self) -> None:
        """Try no further."""
        self._stopped = True

    def marked(self, manifest: Manifest) -> Manifest:
        """The manifest with the doubt about its checkpoint added; unchanged without a doubt, or if it states one
        already.
        """
        key = manifest.order
        if manifest.doubt or not (reason := doubt_about(self._doubts, key)):
            return manifest
        _log.error("%s is doubtful, and restore prefers others: %s", key, reason)
        told = {"attempt": key.attempt, "note": reason[:_NOTE_CHARACTERS_MAX]}
        self._events.emit("doubted", told, step=key.step)
        return manifest.doubted(reason)

    def write_all(self) -> None:
        """Mark all doubted manifests in the store; tried until it succeeds or `stop`."""
        doubts, since = self._doubts, time.monotonic()
        while not self._stopped:
            try:
                self._mark_published(doubts)
            except FencedError as error:
                self._inbox.put(error)
                return
            except HoldfastError as error:
                _log.warning("doubtful checkpoints are not marked yet, and it is tried again: %s", error)
                self._refused = since, error
                self._inbox.put(None)  # the loop may have nothing else to do, and no stager to do it for
                time.sleep(_AGAIN_SECONDS)
            else:
                self._refused = None
                self.owed = doubts is not self._doubts
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
            marked = self.marked(manifest)
            if marked is not manifest:
                self._replace(marked)
