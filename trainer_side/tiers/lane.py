"""One tier's threads: they take frames as they get ready, the oldest step's first, write them, and seal.

    parts     step 7: ███████░░   step 9: ██░░░░░░░        `tier.writers` threads, over all steps in flight
    verdicts  complete(7) ─► the tier; held back while somebody still reads a slot of step 7 or older

A tier that refuses a write loses that step, not the training: it is said once for each reason, counted, and told to the
council. With a slot that is the staging area itself (strategy D) nothing may give the slot back to the tier before the
link and the other lanes have let go of it: the next step would be copied over bytes that are being read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import HoldfastError
from trainer_side.tiers.base import Tier
from trainer_side.tiers.keeping import Keeping, Part
from trainer_side.tiers.tally import Verdict

__all__ = ["Lane", "Outcome"]

_log = logging.getLogger("holdfast.trainer.tiers")

_LOOK_SECONDS = 2e-3  # while bytes are being copied, or the link reads a slot
_FRAMES_LOOKED_AT_MAX = 16  # for one that is ready; they get ready in about this order
_SEAL = -1


class Outcome(NamedTuple):
    """How a part ended. `reason`: why it is not sealed; empty if it is."""

    tier: int
    keeping: Keeping
    reason: str
    written_bytes: int
    seconds: float


class Lane:
    """The threads of one tier, and its slices on their way. Any thread.

    Args:
        number: Of the tier.
        tier: The tier.
        rank: This rank, for messages.
        on_over: Told how each part ended, in one of the lane's threads, before the area is released.
    """

    def __init__(self, number: int, tier: Tier, rank: int, on_over: Callable[[Outcome], None]) -> None:
        self.number, self.tier, self._rank, self._on_over = number, tier, rank, on_over
        self._changed = threading.Condition()
        self._parts: list[Part] = []
        self._slots_read: list[Keeping] = []  # whose slots here others may still read
        self._verdicts: list[Verdict] = []  # held back for them
        self._delivering = 0
        self._said = ""
        self._closing = False
        self._threads: list[threading.Thread] = []

    def staff(self, writers: int) -> None:
        """See that there are so many threads. Training thread."""
        while len(self._threads) < writers:
            name = f"holdfast-tier-{self.number}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    @property
    def idle(self) -> bool:
        """No slice is on its way, and no verdict to the tier."""
        with self._changed:
            return not (self._parts or self._verdicts or self._delivering)

    def keep(self, keeping: Keeping) -> None:
        """Begin to write; its area is being filled."""
        with self._changed:
            self._parts.append(Part(keeping, keeping.writers[self.number]))
            if keeping.source_is_slot == self.number:
                self._slots_read.append(keeping)
            self._changed.notify_all()

    def judge(self, verdict: Verdict) -> None:
        """Take the council's verdict to the tier, now or as soon as others let go of the slots it is about."""
        with self._changed:
            if not verdict.complete:
                for part in self._parts:
                    if part.keeping.order == verdict.order and not part.sealing and not part.given_up:
                        part.given_up = f"void: {verdict.why}"
            self._verdicts.append(verdict)
            self._changed.notify_all()

    def close(self, seconds_max: float) -> bool:
        """Wait until all is sealed or given up, then end the threads. Whether it all ended in time."""
        deadline = time.monotonic() + seconds_max
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the threads ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                verdicts = self._deliverable()
                part, frame = self._next() if not verdicts else (None, 0)
                if part is None and not verdicts:
                    if self._closing and not self._parts and not self._verdicts:
                        return
                    waits = self._parts or self._verdicts
                    self._changed.wait(_LOOK_SECONDS if waits else None)
                    continue
            for verdict in verdicts:
                self._deliver(verdict)
            if part is None:
                continue
            if frame == _SEAL:
                self._finish(part)
            else:
                self._write(part, frame)

    def _next(self) -> tuple[Part | None, int]:
        """The next piece of work; under the lock."""
        for part in self._parts:
            if part.sealing:
                continue
            keeping = part.keeping
            if keeping.cancelled.is_set() and not part.given_up:
                part.given_up = keeping.cancel_reason
            if part.given_up:
                mine = keeping.source_is_slot == self.number
                if not part.busy and not (mine and keeping.is_read_beside(self.number)):
                    part.sealing = True
                    return part, _SEAL
                continue
            if not part.unwritten and not part.busy:
                part.sealing = True
                return part, _SEAL
            area = keeping.area
            for place, frame in enumerate(part.unwritten[:_FRAMES_LOOKED_AT_MAX]):
                if area is not None and area.is_ready(keeping.frames[frame].offset):
                    del part.unwritten[place]
                    part.busy += 1
                    part.begun_at = part.begun_at or time.monotonic()
                    return part, frame
        return None, 0

    def _write(self, part: Part, frame: int) -> None:
        keeping = part.keeping
        place = keeping.frames[frame]
        problem = ""
        try:
            assert keeping.area is not None
            part.writer.write(frame, keeping.area.view(place.offset, place.padded_bytes), keeping.sum(frame))
        except HoldfastError as error:
            problem = f"failed: {error}"
        except Exception as error:  # noqa: BLE001 - the thread must not die: every later step would wait for it
            _log.debug("a write failed", exc_info=True)
            problem = f"failed: {error!r}"
        with self._changed:
            part.busy -= 1
            part.written_bytes += place.padded_bytes
            part.given_up = part.given_up or problem
            self._changed.notify_all()

    def _finish(self, part: Part) -> None:
        keeping, reason = part.keeping, part.given_up
        seconds = time.monotonic() - part.begun_at if part.begun_at else 0.0
        try:
            if reason:
                part.writer.abandon()
            else:
                record = {
                    **{k: v for k, v in dict(keeping.record).items() if isinstance(v, (str, int, float))},
                    "tier_seconds": seconds,
                    "job": keeping.job,
                }
                if not part.writer.seal(record):
                    reason = (
                        "superseded: a newer step is complete in this tier, or it was called void meanwhile"
                    )
        except HoldfastError as error:
            reason = f"failed: {error}"
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("a seal failed", exc_info=True)
            reason = f"failed: {error!r}"
        if reason.startswith("failed") and reason != self._said:
            self._said = reason
            _log.error(
                "rank %d: step %d is not kept in tier %s: %s",
                self._rank,
                keeping.step,
                self.tier.name,
                reason,
            )
        seconds = time.monotonic() - part.begun_at if part.begun_at else 0.0
        try:
            self._on_over(Outcome(self.number, keeping, reason, part.written_bytes, seconds))
        finally:
            keeping.over_in(self.number, reason)
            with self._changed:
                self._parts.remove(part)
                self._changed.notify_all()

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _deliverable(self) -> list[Verdict]:
        """Those that nobody holds back any more; under the lock."""
        self._slots_read = [
            keeping
            for keeping in self._slots_read
            if keeping.is_read_beside(self.number) or not keeping.released.is_set()
        ]
        if not self._verdicts:
            return []
        ready = [verdict for verdict in self._verdicts if not self._is_held_back(verdict)]
        self._verdicts = [verdict for verdict in self._verdicts if verdict not in ready]
        self._delivering += len(ready)
        return ready

    def _is_held_back(self, verdict: Verdict) -> bool:
        if verdict.complete:
            return any(keeping.order <= verdict.order for keeping in self._slots_read)
        return any(keeping.order == verdict.order for keeping in self._slots_read)

    def _deliver(self, verdict: Verdict) -> None:
        attempt, step = verdict.order
        try:
            if verdict.complete:
                self.tier.complete(attempt, step)
            else:
                self.tier.void(attempt, step)
        except Exception as error:  # noqa: BLE001 - as above
            _log.error("rank %d: tier %s: %s", self._rank, self.tier.name, error)
        finally:
            with self._changed:
                self._delivering -= 1
