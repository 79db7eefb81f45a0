"""Checkpoints in the ring from before this stager. Waits for those of earlier jobs that restore would miss.

    HELLO ─► anything staged by an earlier attempt? ── yes ─► all its chunks in the ring? ─ no ─► wait, deadline ─┐
                            │ no                                       │ yes: fetched from there                  │
                            └──────────────────────────────────────────┴──────────────► WELCOME ─► restore ◄──────┘

Otherwise training would resume from an older checkpoint than the one that was reported as staged. A slow or failing
store does not delay a restart if the ring has every chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.ring.remains import held_checkpoints
from holdfast.ring.ring import Ring

_log = logging.getLogger("holdfast.stager")


class PreviousJobs:
    """Decides whether the ranks may restore yet. `seconds_max`: the longest wait, from the first check that found a
    missing checkpoint. `share`: the chunks of an image that belong to this stager, if it is one of several; None: all.
    """

    def __init__(
        self,
        seconds_max: float,
        *,
        share: Callable[[Layout], range] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds_max, self._share, self._clock = seconds_max, share, clock
        self._waiting_since: float | None = None
        self._may_restore = False

    def may_restore(self, ring: Ring, attempt: int) -> bool:
        """Whether restore can read every step that earlier attempts staged, or the wait has timed out."""
        if self._may_restore:
            return True
        now = self._clock()
        staged = _staged_before(ring, attempt)
        complete = self._complete_in(ring) if staged else set()
        missing = [key.step for key in staged if key not in complete]
        if missing and self._waiting_since is None:
            self._waiting_since = now
            _log.warning(
                "an earlier job has staged %s, which the flusher is still writing; the trainers wait at most %g s "
                "until it is durable",
                self._format_steps(missing),
                self._seconds_max,
            )
        late = self._waiting_since is not None and now - self._waiting_since >= self._seconds_max
        if missing and not late:
            return False
        if missing:
            _log.error(
                "%s, staged by an earlier job, is not durable after %g s: the trainers go on from an older step, which "
                "is durable. Look at the flusher's log for the cause",
                self._format_steps(missing),
                self._seconds_max,
            )
        elif staged:
            where = (
                "the ring" if self._share is None else "the rings, if the other stagers have staged theirs"
            )
            _log.warning(
                "an earlier job has staged %s, which is not in the store yet; the trainers restore it from %s",
                self._format_steps([key.step for key in staged]),
                where,
            )
        self._may_restore = True
        return True

    def _format_steps(self, steps: list[int]) -> str:
        """Name the steps; one of several stagers knows of its own share alone."""
        named = f"step {', '.join(map(str, steps))}"
        return named if self._share is None else f"this stager's share of {named}"

    def _complete_in(self, ring: Ring) -> set[CheckpointId]:
        """Staged checkpoints with every chunk in the ring."""
        found = set()
        for held in held_checkpoints(ring):
            try:
                layout = ring.layout(held.staged_digest) if held.staged_digest else None
            except ProtocolError:
                continue  # the flusher reports it
            if layout is not None:
                own = range(layout.chunks) if self._share is None else self._share(layout)
                if held.chunks_fitting(layout).issuperset(own):
                    found.add(CheckpointId(held.attempt, held.step))
        return found


def _staged_before(ring: Ring, attempt: int) -> list[CheckpointId]:
    """Return staged checkpoints of earlier attempts, oldest first. The flusher reports unreadable records."""
    return [key for key, state in _states(ring) if key.attempt < attempt and state == "staged"]


def inherited_steps(ring: Ring, attempt: int) -> dict[int, bool]:
    """Return the steps of this attempt that the previous stager left: whether its share of each was staged."""
    return {key.step: state == "staged" for key, state in _states(ring) if key.attempt == attempt}


def newest_in(ring: Ring, attempt: int) -> int:
    """Return the newest step of this attempt of which the ring has, or had, a chunk; -1 without one."""
    return max((record.step for record in ring.remains() if record.attempt == attempt), default=-1)


def _states(ring: Ring) -> list[tuple[CheckpointId, str]]:
    found: list[tuple[CheckpointId, str]] = []
    for key in ring.checkpoint_ids():
        try:
            checkpoint = ring.checkpoint(*key)
        except ProtocolError:
            continue
        if checkpoint is not None:
            found.append((key, checkpoint.state))
    return found
