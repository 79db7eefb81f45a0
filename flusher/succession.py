"""Whether an older whole checkpoint gives its place in the ring to the newest one, because the store takes nothing."""

from __future__ import annotations

import time
from typing import NamedTuple

from flusher.pipeline import Pipeline
from holdfast.image.checkpoint_id import CheckpointId

# Time for which the store has taken nothing before a whole checkpoint gives its place to a newer one. One of which the
# store has parts waits longer: a store that answers now and then would otherwise never get to the end of any.
_STANDS_SECONDS, _STANDS_SECONDS_BEGUN = 5.0, 30.0


class Successor(NamedTuple):
    """`newest` takes the place of `older`, after `stood_seconds` in which the store took nothing."""

    older: CheckpointId
    newest: CheckpointId
    stood_seconds: float


class Succession:
    """See the module. For the loop's thread."""

    def __init__(self) -> None:
        # When the store took something last, or the first came to wait for it
        self._stands_since = time.monotonic()
        self._look_at: float | None = None  # when an older checkpoint may have to make room

    def store_took(self) -> None:
        """The store has taken something, or nothing has waited for it until now."""
        self._stands_since = time.monotonic()

    @property
    def wait_seconds(self) -> float | None:
        """How long until `due` may answer otherwise by time alone."""
        return None if self._look_at is None else max(0.0, self._look_at - time.monotonic()) + 0.001

    def due(self, pipeline: Pipeline) -> Successor | None:
        """The checkpoint that is to go now; None: there is room for what comes in, or it is too early."""
        self._look_at = None
        for begun, seconds in ((False, _STANDS_SECONDS), (True, _STANDS_SECONDS_BEGUN)):
            found = pipeline.superseded(begun=begun)
            if found is None:
                continue
            if time.monotonic() < self._stands_since + seconds:
                self._look_at = self._stands_since + seconds
                return None
            return Successor(*found, time.monotonic() - self._stands_since)
        return None
