"""What earlier jobs have staged in the ring and the flusher has not yet made durable: restore would not see it.

    HELLO ─► anything staged by an earlier attempt? ── yes ─► wait, deadline ─► WELCOME ─► restore
                            └──────────── no ────────────────────────────────────┘

The training would otherwise go on from an older checkpoint than the one that was promised to be safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.errors import ProtocolError
from holdfast.ring import Ring

__all__ = ["Inheritance"]

_log = logging.getLogger("holdfast.stager")


class Inheritance:
    """Args:
    seconds_max: How long the trainers are kept waiting for it, from the first look on.
    clock: Seconds that only go forward.
    """

    def __init__(self, seconds_max: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds_max, self._clock = seconds_max, clock
        self._first_look_at: float | None = None
        self._settled = False

    def settled(self, ring: Ring, attempt: int) -> bool:
        """Whether nothing is left of earlier attempts than `attempt`, or it has been waited for long enough."""
        if self._settled:
            return True
        now = self._clock()
        left = _staged_before(ring, attempt)
        if left and self._first_look_at is None:
            self._first_look_at = now
            _log.warning(
                "an earlier job has staged %s, which the flusher is still writing; the trainers wait for it, for "
                "%g s at most",
                _named(left),
                self._seconds_max,
            )
        late = self._first_look_at is not None and now - self._first_look_at >= self._seconds_max
        if left and not late:
            return False
        if left:
            _log.error(
                "%s, staged by an earlier job, is not durable after %g s: the trainers restore what is, and go on "
                "from an older step. The flusher's log says what it waits for",
                _named(left),
                self._seconds_max,
            )
        self._settled = True
        return True


def _staged_before(ring: Ring, attempt: int) -> list[int]:
    """Steps, oldest first. A record that cannot be read is the flusher's to report."""
    found = []
    for of_attempt, step in ring.checkpoint_names():
        if of_attempt < attempt:
            try:
                said = ring.checkpoint(of_attempt, step)
            except ProtocolError:
                continue
            if said is not None and said.state == "staged":
                found.append(step)
    return found


def _named(steps: list[int]) -> str:
    return f"step {', '.join(map(str, steps))}"
