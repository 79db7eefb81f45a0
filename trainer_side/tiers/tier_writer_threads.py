"""The threads of one tier: they take frames as these get ready, the oldest step's first, write them, and seal.

    parts     step 7: ███████░░   step 9: ██░░░░░░░        `tier.writers` threads, over all steps in flight
    verdicts  complete(7) ─► the tier; held back while a slot of step 7 or older is still being read

A tier that refuses a write loses that step, and training continues: each reason is logged once, and the step is counted
and voted against. If a slot is the staging area itself (strategy D), the slot must not be freed before the link and the
other tiers have finished reading it: the next step would be copied over bytes that are being read.

If a call of the tier does not return in time, its device hangs: the threads give up every step in flight there and
release their areas, and the tier takes nothing until that call has returned. The bytes that the call still writes go
into a slot that belongs to no step; that slot is freed when the call returns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from holdfast.errors import HoldfastError, StoreError
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.background_thread import BackgroundThread, ThreadDied
from trainer_side.ranks.deadlines import within
from trainer_side.tiers.slot_proof import StepProof
from trainer_side.tiers.tier import Order, StepVerdict, Tier
from trainer_side.tiers.tier_write import SlotWrite, TierWrite

_log = logging.getLogger("holdfast.trainer.tiers")

_LOOK_SECONDS = 2e-3  # while the link reads a slot
_UNTOLD_SECONDS = 20e-3  # while bytes are being copied: `TierWrite.nudge` announces ready frames
_FRAMES_CHECKED_MAX = 16  # to find a ready one: frames get ready in about this order
_SEAL = -1

_T = TypeVar("_T")


class _PendingCall(NamedTuple):
    """A call that has not returned. `limit`: its deadline."""

    what: str
    begun: float
    limit: float


class TierCalls:
    """The pending calls of one tier: a device that hangs returns no error. Any thread.

    If a call does not return in time, the tier hangs and gets no further calls until that one has returned.
    """

    def __init__(self, name: str, rank: int, *, seconds_max: float) -> None:
        self._name, self._rank, self._seconds_max = name, rank, seconds_max
        self.hang_reason: Reason | None = None  # why the tier takes nothing now; None while it answers
        self.died: ThreadDied | None = None  # the error of a dead thread: the tier takes nothing more
        self._guard = threading.Lock()
        self._calls: dict[int, _PendingCall] = {}  # by thread

    @contextlib.contextmanager
    def track(self, what: str, seconds_max: float | None = None) -> Iterator[None]:
        """Context in which the thread calls the tier, for at most `seconds_max`."""
        begun, me = time.monotonic(), threading.get_ident()
        limit = self._seconds_max if seconds_max is None else seconds_max
        with self._guard:
            self._calls[me] = _PendingCall(what, begun, begun + limit)
        try:
            yield
        finally:
            with self._guard:
                del self._calls[me]

    def call_with_deadline(
        self, what: str, call: Callable[[], _T], seconds_max: float, late: Callable[[_T], object]
    ) -> _T:
        """Make a call in another thread, and wait `seconds_max` for it, then raise StoreError.

        `what` is its purpose, for messages. `late` is called with the result if the call returns after the deadline.
        """
        tracked = self.track(what, seconds_max)(call)
        try:
            return within(tracked, seconds_max, name="holdfast-tier-ask", on_late=late)
        except TimeoutError:
            problem = f"tier {self._name} hangs: {what} has not returned for {seconds_max:g} s"
            raise StoreError(problem) from None

    def disable(self, error: ThreadDied) -> None:
        """Give the tier nothing more in this job, because a thread that serves it has died."""
        with self._guard:
            self.died = self.died or error
            self.hang_reason = DeclineCause.FAILED.because(self.died)

    def check_overdue(self) -> Reason | None:
        """Check whether a call is overdue. Returns why the tier hangs, if that is news."""
        if self.died is not None:
            return None
        now = time.monotonic()
        with self._guard:
            late = next((call for call in self._calls.values() if now > call.limit), None)
            before, hangs = self.hang_reason, None
            if late is not None:
                hangs = before or DeclineCause.HANGS.because(
                    f"{late.what} has not returned for {now - late.begun:.3g} s, at most "
                    f"{late.limit - late.begun:g} s are allowed"
                )
            self.hang_reason = hangs
        if before is None and hangs is not None:
            message = "rank %d: tier %s takes nothing until its device answers: it %s"
            _log.error(message, self._rank, self._name, hangs)
            return hangs
        if before is not None and hangs is None:
            _log.warning("rank %d: tier %s answers again, and is used again", self._rank, self._name)
        return None


def _failure_reason(error: Exception) -> Reason:
    if isinstance(error, HoldfastError):
        return DeclineCause.FAILED.because(error)
    _log.debug("a call of a tier failed", exc_info=True)
    return DeclineCause.FAILED.because(repr(error))


class WriteOutcome(NamedTuple):
    """How a slice ended in a tier. `reason`: why the slice is not sealed; None if it is."""

    tier: int
    write: TierWrite
    reason: Reason | None
    written_bytes: int
    seconds: float


class TierWriterThreads:
    """The threads of one tier, and the slices and verdicts in flight to it. Any thread.

    `on_end` is called at the end of each slice, in a thread of the tier or in that of `poll`, before the area is
    released. One call of the tier may take `call_seconds_max`; all calls go through `calls`.
    """

    def __init__(
        self,
        number: int,
        tier: Tier,
        rank: int,
        on_end: Callable[[WriteOutcome], None],
        *,
        call_seconds_max: float,
    ) -> None:
        self.number, self.tier, self._rank, self._on_end = number, tier, rank, on_end
        self.calls = TierCalls(tier.name, rank, seconds_max=call_seconds_max)
        self._changed = threading.Condition()
        self._parts: list[SlotWrite] = []
        self._verdicts: list[StepVerdict | StepProof] = []  # not delivered to the tier yet
        self._delivering = 0
        self._shared_slots: list[TierWrite] = []  # their slots are areas that others may still read
        self._logged = ""  # the last failure
        self._orphans: list[SlotWrite] = []  # given up while the tier hung; their slots must be freed
        self._closing = False
        self._threads: list[BackgroundThread] = []

    def ensure_threads(self, writers: int) -> None:
        """Make sure that the tier has this many threads. Training thread."""
        while len(self._threads) < writers:
            name = f"holdfast-tier-{self.number}-{len(self._threads)}"
            task = f"writes slices into tier {self.tier.name}"
            self._threads.append(
                BackgroundThread(name, self._run, rank=self._rank, task=task, on_death=self._on_thread_death)
            )
            self._threads[-1].start()

    @property
    def is_idle(self) -> bool:
        """Whether no slice and no verdict is in flight to the tier, or the tier hangs."""
        with self._changed:
            pending = self._parts or self._verdicts or self._delivering
            return self.calls.hang_reason is not None or not pending

    def written_fraction(self, order: Order) -> float:
        """Return the share of this step that has been written here, 0 to 1; 1 if the step is not in flight."""
        with self._changed:
            part = next((part for part in self._parts if part.write.order == order), None)
            if part is None:
                return 1.0
            return part.written_bytes / max(1, sum(frame.padded_bytes for frame in part.write.frames))

    def keep(self, write: TierWrite) -> None:
        """Begin to write a step, whose area is being filled."""
        write.wake_callbacks.append(self._wake)
        with self._changed:
            self._parts.append(SlotWrite(write, write.writers[self.number]))
            if write.source_tier == self.number:
                self._shared_slots.append(write)
            self._changed.notify_all()

    def queue_verdict(self, verdict: StepVerdict) -> None:
        """Deliver a verdict to the tier, as soon as nothing else reads the slots that it may free."""
        with self._changed:
            if not verdict.complete:
                for part in self._parts:
                    if part.write.order == verdict.order and not part.sealing and not part.given_up:
                        part.given_up = DeclineCause.VOID.because(verdict.why)
            self._verdicts.append(verdict)
            self._changed.notify_all()

    def queue_proof(self, proof: StepProof) -> None:
        """Keep a proof once its slice is sealed. Training thread."""
        with self._changed:
            self._verdicts.append(proof)
            self._changed.notify_all()

    def poll(self) -> None:
        """Check for overdue calls of the tier. Called repeatedly."""
        hangs = self.calls.check_overdue()
        if hangs is not None:
            self.give_up(None, hangs)

    def give_up(self, write: TierWrite | None, reason: Reason | None) -> None:
        """Give up one step, or all (None), and release the area, even if a call of the tier may still read it.

        A thread that is working on the step frees its slot when its call returns.
        """
        with self._changed:
            parts = [part for part in self._parts if write is None or part.write is write]
            self._parts = [part for part in self._parts if part not in parts]
            for part in parts:
                part.given_up = part.given_up or reason
                if not part.sealing and not part.busy:
                    self._orphans.append(part)
                part.orphaned = True
            self._changed.notify_all()
        for part in parts:
            self._report_end(part, part.given_up)

    def close(self, seconds_max: float) -> bool:
        """Wait until every step is sealed or given up, then end the threads. Returns whether they ended in time.

        Does not wait for a tier that hangs.
        """
        deadline = time.monotonic() + (_UNTOLD_SECONDS if self.calls.hang_reason else seconds_max)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the threads ---------------------------------------------------------------------------------------------

    def _on_thread_death(self, error: ThreadDied) -> None:
        """Handle an exception that ends a thread: the tier takes nothing more, and gives up every step."""
        self.calls.disable(error)
        with self._changed:
            writes = [part.write for part in self._parts]
        for write in writes:
            try:
                self.give_up(write, self.calls.hang_reason)
            except Exception:  # noqa: BLE001 - even if a report fails, the next step must be released
                _log.debug("a step was given up without a report", exc_info=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                orphan = self._orphans.pop() if self._orphans else None
                verdicts = self._pop_deliverable() if orphan is None else []
                part, frame = self._next() if orphan is None and not verdicts else (None, 0)
                if part is None and not verdicts and orphan is None:
                    if self._closing and not self._parts and not self._verdicts:
                        return
                    self._changed.wait(self._poll_seconds())
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

    def _poll_seconds(self) -> float | None:
        """Return when to look again without being woken; under the lock."""
        if self._verdicts or any(part.given_up for part in self._parts):
            return _LOOK_SECONDS
        return _UNTOLD_SECONDS if self._parts else None

    def _wake(self) -> None:
        # Wake one thread; a thread that takes a frame wakes the next. All at once would take the GIL from training.
        with self._changed:
            self._changed.notify()

    def _pop_deliverable(self) -> list[StepVerdict | StepProof]:
        """Remove and return the verdicts that may be delivered. Each goes to `_deliver`; under the lock."""
        self._shared_slots = [
            write
            for write in self._shared_slots
            if write.is_read_by_others(self.number) or not write.released.is_set()
        ]
        ready = [verdict for verdict in self._verdicts if not self._is_held_back(verdict)]
        self._verdicts = [verdict for verdict in self._verdicts if verdict not in ready]
        self._delivering += len(ready)
        return ready

    def _is_held_back(self, verdict: StepVerdict | StepProof) -> bool:
        if isinstance(verdict, StepProof):
            return any(part.write.order == verdict.order for part in self._parts)
        if verdict.complete:  # the tier may then reuse the slot of any older step
            return any(write.order <= verdict.order for write in self._shared_slots)
        return any(write.order == verdict.order for write in self._shared_slots)

    def _next(self) -> tuple[SlotWrite | None, int]:
        """Return the next piece of work; under the lock."""
        for part in self._parts:
            if part.sealing:
                continue
            write = part.write
            part.given_up = part.given_up or write.cancel_reason
            if part.given_up:
                mine = write.source_tier == self.number
                if not part.busy and not (mine and write.is_read_by_others(self.number)):
                    part.sealing = True
                    return part, _SEAL
                continue
            if not part.unwritten and not part.busy:
                part.sealing = True
                return part, _SEAL
            area = write.area
            for place, frame in enumerate(part.unwritten[:_FRAMES_CHECKED_MAX]):
                if area is not None and area.is_ready(write.frames[frame].offset):
                    del part.unwritten[place]
                    part.busy += 1
                    part.begun_at = part.begun_at or time.monotonic()
                    self._changed.notify()  # the next frame may be ready, too
                    return part, frame
        return None, 0

    def _write(self, part: SlotWrite, frame: int) -> None:
        write = part.write
        place = write.frames[frame]
        problem: Reason | None = None
        try:
            area = write.area
            assert area is not None
            crc = write.frame_crc(frame)
            with self.calls.track(f"the write of frame {frame} of step {write.step}"):
                part.writer.write(frame, area.view(place.offset, place.padded_bytes), crc)
        except Exception as error:  # noqa: BLE001 - if the thread died, every later step would wait for it
            problem = _failure_reason(error)
        with self._changed:
            part.busy -= 1
            part.written_bytes += place.padded_bytes
            part.given_up = part.given_up or problem
            if part.orphaned and not part.busy:
                self._orphans.append(part)

    def _finish(self, part: SlotWrite) -> None:
        write, reason = part.write, part.given_up
        seconds = time.monotonic() - part.begun_at if part.begun_at else 0.0
        try:
            if reason is not None:
                with self.calls.track(f"giving up step {write.step}"):
                    part.writer.abandon()
            else:
                record = replace(write.record, tier_seconds=seconds, job=write.job).to_json()
                with self.calls.track(f"the seal of step {write.step}"):
                    sealed = part.writer.seal(record)
                if not sealed:
                    reason = DeclineCause.SUPERSEDED.because(
                        "a newer step is complete in this tier, or it was called void meanwhile"
                    )
        except Exception as error:  # noqa: BLE001 - as above
            reason = _failure_reason(error)
        if reason is not None and reason.cause == DeclineCause.FAILED and reason.text != self._logged:
            self._logged = reason.text
            _log.error(
                "rank %d: step %d is not kept in tier %s: %s", self._rank, write.step, self.tier.name, reason
            )
        with self._changed:
            if part.orphaned:  # already reported as not kept
                return
            part.orphaned = True
        self._report_end(part, reason)
        with self._changed:
            self._parts.remove(part)
            self._changed.notify_all()

    def _report_end(self, part: SlotWrite, reason: Reason | None) -> None:
        """Report how the slice ended, and mark the area as no longer read by this tier."""
        seconds = time.monotonic() - part.begun_at if part.begun_at else 0.0
        try:
            self._on_end(WriteOutcome(self.number, part.write, reason, part.written_bytes, seconds))
        finally:
            part.write.finish_in(self.number, reason)

    def _abandon(self, part: SlotWrite) -> None:
        try:
            with self.calls.track(f"giving up step {part.write.step}"):
                part.writer.abandon()
        except Exception as error:  # noqa: BLE001 - as above
            _log.error("rank %d: tier %s: %s", self._rank, self.tier.name, error)

    def _deliver(self, verdict: StepVerdict | StepProof) -> None:
        attempt, step = verdict.order
        try:
            with self.calls.track(f"the verdict on step {step}, or its proof"):
                if isinstance(verdict, StepProof):
                    self.tier.keep_proof(attempt, step, verdict.digest)
                elif verdict.complete:
                    self.tier.complete(attempt, step)
                else:
                    self.tier.void(attempt, step)
        except Exception as error:  # noqa: BLE001 - as above
            _log.error("rank %d: tier %s: %s", self._rank, self.tier.name, error)
        finally:
            with self._changed:
                self._delivering -= 1
