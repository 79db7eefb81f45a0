"""Decides when an older whole checkpoint gives its place in the ring to the newest one, because the store fails."""

from __future__ import annotations

import time
from typing import NamedTuple

from flusher.pipeline import Pipeline
from holdfast.image.checkpoint_id import CheckpointId

# How long the store must have accepted nothing before a whole checkpoint is dropped for a newer one. A checkpoint with
# parts in the store has longer: a store that answers now and then would otherwise never finish any.
_STALL_SECONDS, _STALL_SECONDS_WRITTEN = 5.0, 30.0


class Successor(NamedTuple):
    """`newest` takes the place of `older`, after `stalled_seconds` in which the store took nothing."""

    older: CheckpointId
    newest: CheckpointId
    stalled_seconds: float


class Succession:
    """Keeps the time for which the store has accepted nothing. For the loop's thread."""

    def __init__(self) -> None:
        # When the store last accepted something, or the first checkpoint began to wait for it
        self._stalled_since = time.monotonic()
        self._recheck_at: float | None = None  # when an older checkpoint may have to make room

    def on_store_progress(self) -> None:
        """Note that the store has accepted something, or that nothing waited for it until now."""
        self._stalled_since = time.monotonic()

    @property
    def wait_seconds(self) -> float | None:
        """Seconds until the answer of `due` may change by time alone; None: never."""
        return None if self._recheck_at is None else max(0.0, self._recheck_at - time.monotonic()) + 0.001

    def due(self, pipeline: Pipeline) -> Successor | None:
        """Return the checkpoint to drop now; None: incoming chunks have room, or it is too early."""
        self._recheck_at = None
        for even_if_written, seconds in ((False, _STALL_SECONDS), (True, _STALL_SECONDS_WRITTEN)):
            found = pipeline.superseded(even_if_written=even_if_written)
            if found is None:
                continue
            if time.monotonic() < self._stalled_since + seconds:
                self._recheck_at = self._stalled_since + seconds
                return None
            return Successor(*found, time.monotonic() - self._stalled_since)
        return None
