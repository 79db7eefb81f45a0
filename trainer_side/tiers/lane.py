"""One tier's threads: they take frames as they get ready, the oldest step's first, write them, and seal.

    parts     step 7: ███████░░   step 9: ██░░░░░░░        `tier.writers` threads, over all steps in flight
    verdicts  complete(7) ─► the tier; held back while somebody still reads a slot of step 7 or older

A tier that refuses a write loses that step, not the training: the lane logs each reason once, and the step is counted
and told to the council. Where a slot is the staging area itself (strategy D), nothing may give it back to the tier
before the link and the other lanes have let go of it: the next step would be copied over bytes that are being read.

A call of the tier that does not return in time means that its device hangs: the lane gives up every step on its way
there, releases their areas, and the tier takes nothing until that call has returned. The bytes that the call still
writes go into a slot that belongs to no step; that slot is given back when the call returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.background_thread import BackgroundThread, ThreadDied
from trainer_side.tiers.keeping import Keeping, TierPart
from trainer_side.tiers.tally import Order, StepVerdict
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_calls import TierCalls
from trainer_side.tiers.verdict_queue import VerdictQueue

_log = logging.getLogger("holdfast.trainer.tiers")

_LOOK_SECONDS = 2e-3  # while the link reads a slot
_UNTOLD_SECONDS = 20e-3  # while bytes are being copied: `Keeping.nudge` tells of a frame that is ready
_FRAMES_LOOKED_AT_MAX = 16  # to find one that is ready: frames get ready in about this order
_SEAL = -1


class PartOutcome(NamedTuple):
    """How a part ended. `reason`: why it is not sealed; None if it is."""

    tier: int
    keeping: Keeping
    reason: Reason | None
    written_bytes: int
    seconds: float


class Lane:
    """The threads of one tier, and the slices on their way into it. Any thread.

    Args:
        number: The number of the tier.
        tier: The tier.
        rank: This rank, for messages.
        on_over: Called with the end of each part, in a thread of the lane or in that of `look`, before the area is
            released.
        call_seconds_max: How long one call of the tier may take.

    Attributes:
        number: As given.
        tier: As given.
        calls: Every call of the tier goes through this.
    """

    def __init__(
        self,
        number: int,
        tier: Tier,
        rank: int,
        on_over: Callable[[PartOutcome], None],
        *,
        call_seconds_max: float,
    ) -> None:
        self.number, self.tier, self._rank, self._on_over = number, tier, rank, on_over
        self.calls = TierCalls(tier.name, rank, seconds_max=call_seconds_max)
        self._changed = threading.Condition()
        self._parts: list[TierPart] = []
        self._verdicts = VerdictQueue(number)
        self._logged = ""  # the last failure
        self._orphans: list[TierPart] = []  # given up while the tier hung; their slots go back
        self._closing = False
        self._threads: list[BackgroundThread] = []

    def staff(self, writers: int) -> None:
        """See that the tier has this many threads. Training thread."""
        while len(self._threads) < writers:
            name = f"holdfast-tier-{self.number}-{len(self._threads)}"
            task = f"writes slices into tier {self.tier.name}"
            self._threads.append(
                BackgroundThread(name, self._run, rank=self._rank, task=task, died=self._died)
            )
            self._threads[-1].start()

    @property
    def idle(self) -> bool:
        """No slice and no verdict is on its way to the tier; or the tier hangs, and nobody waits for it."""
        with self._changed:
            return self.calls.hangs is not None or not (self._parts or self._verdicts.is_pending)

    def fraction(self, order: Order) -> float:
        """The share of this step that has been written here, 0 to 1; 1 if none of it is on its way."""
        with self._changed:
            part = next((part for part in self._parts if part.keeping.order == order), None)
            if part is None:
                return 1.0
            return part.written_bytes / max(1, sum(frame.padded_bytes for frame in part.keeping.frames))

    def look(self) -> None:
        """See whether a call of the tier has been away for too long. Called repeatedly."""
        hangs = self.calls.look()
        if hangs is not None:
            self._give_up(None, hangs)

    def let_go(self, keeping: Keeping, reason: Reason) -> None:
        """Release the area of this step, though a call of the tier may still read it."""
        self._give_up(keeping, reason)

    def _give_up(self, keeping: Keeping | None, reason: Reason | None) -> None:
        """Give up one step, or all. A thread that has a part in hand gives back its slot when its call returns."""
        with self._changed:
            parts = [part for part in self._parts if keeping is None or part.keeping is keeping]
            self._parts = [part for part in self._parts if part not in parts]
            for part in parts:
                part.given_up = part.given_up or reason
                if not part.sealing and not part.busy:
                    self._orphans.append(part)
                part.orphaned = True
            self._changed.notify_all()
        for part in parts:
            self._say_over(part, part.given_up)

    def keep(self, keeping: Keeping) -> None:
        """Begin to write a step, whose area is being filled."""
        keeping.lookers.append(self._wake)
        with self._changed:
            self._parts.append(TierPart(keeping, keeping.writers[self.number]))
            if keeping.source_is_slot == self.number:
                self._verdicts.reads(keeping)
            self._changed.notify_all()

    def judge(self, verdict: StepVerdict) -> None:
        """Take a verdict to the tier, now or as soon as others let go of the slots that it is about."""
        with self._changed:
            if not verdict.complete:
                for part in self._parts:
                    if part.keeping.order == verdict.order and not part.sealing and not part.given_up:
                        part.given_up = DeclineCause.VOID.because(verdict.why)
            self._verdicts.add(verdict)
            self._changed.notify_all()

    def close(self, seconds_max: float) -> bool:
        """Wait until every step is sealed or given up, then end the threads. Returns whether they ended in time.

        Nobody waits for a tier that hangs.
        """
        deadline = time.monotonic() + (_UNTOLD_SECONDS if self.calls.hangs else seconds_max)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the threads ---------------------------------------------------------------------------------------------

    def _died(self, error: ThreadDied) -> None:
        """A thread ends by an exception: the tier takes nothing more, and nobody waits for it."""
        self.calls.break_off(error)
        with self._changed:
            keepings = [part.keeping for part in self._parts]
        for keeping in keepings:
            try:
                self._give_up(keeping, self.calls.hangs)
            except Exception:  # noqa: BLE001 - where telling of it is what fails, the next one is let go all the same
                _log.debug("a step was let go without a word", exc_info=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                orphan = self._orphans.pop() if self._orphans else None
                verdicts = self._verdicts.take() if orphan is None else []
                part, frame = self._next() if orphan is None and not verdicts else (None, 0)
                if part is None and not verdicts and orphan is None:
                    if self._closing and not self._parts and not self._verdicts.is_waiting:
                        return
                    self._changed.wait(self._look_seconds())
                    continue
            for verdict in verdicts:
                self._deliver(verdict)
            if orphan is not None:
                self._abandon(orphan)
            if part is None:
                continue
            if frame == _SEAL:
                self._finish(part)
            else:
                self._write(part, frame)

    def _look_seconds(self) -> float | None:
        """When to look again although nobody has told anything; under the lock."""
        if self._verdicts.is_waiting or any(part.given_up for part in self._parts):
            return _LOOK_SECONDS
        return _UNTOLD_SECONDS if self._parts else None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> tuple[TierPart | None, int]:
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
                    self._changed.notify()  # the next frame may be ready, too
                    return part, frame
        return None, 0

    def _write(self, part: TierPart, frame: int) -> None:
        keeping = part.keeping
        place = keeping.frames[frame]
        problem: Reason | None = None
        try:
            area = keeping.area
            assert area is not None
            crc = keeping.sum(frame)
            with self.calls.noted(f"the write of frame {frame} of step {keeping.step}"):
                part.writer.write(frame, area.view(place.offset, place.padded_bytes), crc)
        except HoldfastError as error:
            problem = DeclineCause.FAILED.because(error)
        except Exception as error:  # noqa: BLE001 - the thread must not die: every later step would wait for it
            _log.debug("a write failed", exc_info=True)
            problem = DeclineCause.FAILED.because(repr(error))
        with self._changed:
            part.busy -= 1
            part.written_bytes += place.padded_bytes
            part.given_up = part.given_up or problem
            if part.orphaned and not part.busy:
                self._orphans.append(part)
            self._changed.notify_all()

    def _finish(self, part: TierPart) -> None:
        keeping, reason = part.keeping, part.given_up
        seconds = time.monotonic() - part.begun_at if part.begun_at else 0.0
        try:
            if reason is not None:
                with self.calls.noted(f"giving up step {keeping.step}"):
                    part.writer.abandon()
            else:
                record = replace(keeping.record, tier_seconds=seconds, job=keeping.job).to_json()
                with self.calls.noted(f"the seal of step {keeping.step}"):
                    sealed = part.writer.seal(record)
                if not sealed:
                    reason = DeclineCause.SUPERSEDED.because(
                        "a newer step is complete in this tier, or it was called void meanwhile"
                    )
        except HoldfastError as error:
            reason = DeclineCause.FAILED.because(error)
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("a seal failed", exc_info=True)
            reason = DeclineCause.FAILED.because(repr(error))
        if reason is not None and reason.cause == DeclineCause.FAILED and reason.text != self._logged:
            self._logged = reason.text
            _log.error(
                "rank %d: step %d is not kept in tier %s: %s",
                self._rank,
                keeping.step,
                self.tier.name,
                reason,
            )
        with self._changed:
            if part.orphaned:  # the step is told as not kept already
                return
            part.orphaned = True
        self._say_over(part, reason)
        with self._changed:
            self._parts.remove(part)
            self._changed.notify_all()

    def _say_over(self, part: TierPart, reason: Reason | None) -> None:
        """Tell how the part ended, and release the area as far as this tier is concerned."""
        seconds = time.monotonic() - part.begun_at if part.begun_at else 0.0
        try:
            self._on_over(PartOutcome(self.number, part.keeping, reason, part.written_bytes, seconds))
        finally:
            part.keeping.over_in(self.number, reason)

    def _abandon(self, part: TierPart) -> None:
        try:
            with self.calls.noted(f"giving up step {part.keeping.step}"):
                part.writer.abandon()
        except Exception as error:  # noqa: BLE001 - as above
            _log.error("rank %d: tier %s: %s", self._rank, self.tier.name, error)

    def _deliver(self, verdict: StepVerdict) -> None:
        attempt, step = verdict.order
        try:
            with self.calls.noted(f"the verdict on step {step}"):
                if verdict.complete:
                    self.tier.complete(attempt, step)
                else:
                    self.tier.void(attempt, step)
        except Exception as error:  # noqa: BLE001 - as above
            _log.error("rank %d: tier %s: %s", self._rank, self.tier.name, error)
        finally:
            with self._changed:
                self._verdicts.delivered()
