"""One `save()`, from the call until training may go on.

    save(step), training thread                      copy thread            link thread
    ───────────────────────────────────────          ─────────────          ─────────────────
    collect the state; its plan (planner.py) ─ first time, or new tensors: ► PROPOSE … RESERVED
    room for it (staging_pool.py), or declined
    copy what anything may change
    close the gate, offer ────────────────────────────────────────────────► OFFER … credits
    return                                           data.pkl, if it was left to it; then
                                                     copy the slice ──────► frames, as the bytes get ready
                                                                       └──► local tiers (tiers/tier_set.py)
    next optimizer.step(): waits for the gate ◄───── open the gate
    (where it is not shown that all updates wait for it, and nothing else changes it, return waits for that:
    hook_coverage.py)

No collective operation. A step that cannot be taken (all staging areas are still being sent) is declined by this rank,
the stager tells the others, and training goes on. It is declined when training does go on: at the next `step()`,
`save()` or update. If the block ends before, it was the last one, and is waited for (`save_late`). Local tiers take
steps beside the stager, without one, and when it is lost: what one of the two declines may still go to the other.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
from collections.abc import Iterator, MutableMapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from holdfast.errors import PeerLost, StateError
from holdfast.faultpoint import Point, reach
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import OTHER, DeclineCause, Reason
from trainer_side.link.stager_message import StagerMessage
from trainer_side.opaque import only_shapes
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.copy_plan import Route
from trainer_side.save.device_stream import in_order_with, stream_of
from trainer_side.save.fingerprint import Fingerprints
from trainer_side.save.finished_step import FinishedStep
from trainer_side.save.planner import Planner, SavePlan
from trainer_side.save.rank_context import RankContext
from trainer_side.save.staging import Staging
from trainer_side.save.staging_pool import PoolFull, Reservation, StagingPool
from trainer_side.save.tearing import SavedInstant
from trainer_side.state import accelerator
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.skeleton import Capture, Outgrown
from trainer_side.state.survey import Sources
from trainer_side.transfer import Transfer


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """The search for garbage in cycles pauses in the whole process. Any thread, one at a time.

    A capture makes thousands of objects and drops them at once; a plan makes dozens for each tensor and keeps them.
    Every few hundred objects start a search, and now and then a full one: with torch imported that is a quarter of a
    second in `save()`, for nothing. Objects that are dropped before the pause ends do not count towards the next
    search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_log = logging.getLogger("holdfast.trainer")
_device_of = attrgetter("device")


class Saver:
    """Takes this rank's checkpoints. Training thread."""

    def __init__(
        self,
        state: MutableMapping[str, Any],
        planner: Planner,
        pool: StagingPool,
        copier: Copier,
        context: RankContext,
    ) -> None:
        self._planner, self._pool, self._copier = planner, pool, copier
        self._link, self._tiers = context.link, context.tiers
        self._ledger, self._events = context.ledger, context.events
        self.trackers: dict[str, str] = {}  # experiment tracker → its run; written into each checkpoint
        self._warned = ""
        self._late = FinishedStep(state, lambda: copier.updates)
        self._late_step = -1  # the step that was noted there last
        self._late_reason: Reason | None = None  # why it is not taken yet
        self._late_metrics: dict[str, float] | None = None
        copier.on_update = self.decline_late

    def decline_late(self) -> None:
        """Training goes on past a step that found no room, so it is declined."""
        reason, self._late_reason = self._late_reason, None
        if reason is not None:
            self._decline(self._late_step, reason)

    def save_late(self, seconds_max: float) -> int:
        """The block ends: save the last step if it found no room, and wait for that. Raises as `Checkpointer.save`.

        Returns the step, if a save of it was begun; else -1.
        """
        step = self._late_step
        if self._late_reason is None:
            return -1
        if why := self._late.why_not():
            self._late_reason = DeclineCause.LATE.because(
                f"it found no room when it was due, and later {why}"
            )
            self.decline_late()
            return -1
        if self._link.job.rank == 0:
            _log.warning(
                "step %d, the last one, found no room (%s); it is waited for, at most %g s",
                step,
                self._late_reason,
                seconds_max,
            )
        self._late.put_back()
        return step if self.save(step, seconds_max, self._late_metrics) else -1

    def save(
        self, step: int, wait_seconds_max: float | None = None, metrics: dict[str, float] | None = None
    ) -> bool:
        """See `Checkpointer.save`. `wait_seconds_max`: wait so long for room, whatever the settings say."""
        begun, saved_at_unix = time.monotonic(), time.time()
        self._come_to(step)
        reach(Point.SAVE_BEGUN)
        self._copier.look_whether_quiet()
        self._tiers.follow(self._link.job.attempt)
        if (refusal := self._refusal()) is not None:
            return self._decline(step, refusal)
        try:
            with no_collections():
                plan, taken = self._planner.take(step)
        except PeerLost as lost:
            if not self._link.job.has_lost(lost) or self._tiers.takes_steps:
                raise  # the stager is there, a rank is not: going on would leave the ranks at different steps
            return self._decline(step, DeclineCause.STAGER_LOST.because(lost))
        except Outgrown as outgrown:
            # More room for a PerRank value takes a new agreement of all ranks, which this rank cannot call alone.
            needed = 0 if outgrown.name else outgrown.needed_bytes
            if needed and self._link.job.rank == 0:
                self._tiers.council.make_room(needed)
            return self._decline(step, DeclineCause.OUTGROWN.because(outgrown), needed_pickle_bytes=needed)
        except PoolFull as no_room:
            return self._decline(step, no_room.reason)
        record = SaveRecord(
            saved_at_unix=saved_at_unix, metrics=metrics, trackers=dict(self.trackers) or None
        )
        try:
            # The training thread is here, so what was taken stays as it is meanwhile.
            wait_seconds = self._pool.wait(step, wait_seconds_max)
            answer = self._link.answer(step)
            if answer is not None and not self._tiers.takes_steps:
                self._link.tell(StagerMessage.fits(step))
                return self._decline(step, answer, tell=False)  # all were told the same
            place = self._reserve(step, record)
        except PoolFull as no_room:
            self._late_metrics = metrics
            return self._no_room(step, no_room.reason, is_late=wait_seconds_max is not None)
        record.wait_seconds = wait_seconds
        try:
            with no_collections():
                job = self._begin(step, plan, taken, place, answer, record, begun)
        except torch.OutOfMemoryError as error:
            # The device is full: training may go on in what it has, and a checkpoint is no reason to end it.
            full = DeclineCause.NO_MEMORY.because(f"the device has none left: {error}")
            self._give_back(place, full)
            return self._decline(step, full)
        except BaseException as error:  # Ctrl-C, too
            self._undo(step, place, error)
            raise
        if job is not None:
            self._copier.finish_what_would_tear(job)
        return job is not None

    def _reserve(self, step: int, record: SaveRecord) -> Reservation:
        """As `StagingPool.take`. PoolFull also: the copy thread is stuck."""
        place = self._pool.take(step, record)
        if stuck := self._copier.wait():
            self._pool.give_back(place, stuck)
            raise PoolFull(stuck)
        return place

    def _come_to(self, step: int) -> None:
        if step != self._late_step:
            self.decline_late()
        self._late_reason = None

    def _no_room(self, step: int, reason: Reason, *, is_late: bool) -> bool:
        """Decline the step; one that was only busy when training goes on. `is_late`: it was waited for."""
        if is_late or reason.cause != DeclineCause.BUSY:
            return self._decline(step, reason)
        self._link.tell(StagerMessage.fits(step))
        self._late.note(step)
        self._late_step, self._late_reason = step, reason
        return False

    def _begin(
        self,
        step: int,
        plan: SavePlan,
        taken: Capture,
        place: Reservation,
        answer: Reason | None,
        record: SaveRecord,
        begun: float,
    ) -> CopyJob | None:
        """Take what must be taken at once, and set the rest going. `answer`: what the stager has said already."""
        area, device = place.area, _device(taken.sources)
        streams = self._copier.update_streams
        with contextlib.nullcontext() if device is None else in_order_with(device, streams):
            begins = self._take(step, plan, taken, area, device)
        record.slice_bytes, record.save_seconds, record.host = area.nbytes, 0.0, socket.gethostname()
        on_device = begins.route is not None and bool(area.live(begins.route).device)
        inside, compares = self._copier.way_of(step, begins.instant, area.nbytes, on_device=on_device)
        record.copied_inside = inside or begins.instant is None
        self._copier.shut(gate=begins.is_live)
        transfer = (
            self._link.offer(step, area, record, plan.skeleton.layout)
            if answer is None
            else Transfer.none(step, record, answer)
        )
        if transfer.released.is_set() and place.keeping is None:  # refused at once: nothing is copied
            self._copier.reopen()
            nowhere = Reason(OTHER, "no local tier has a free slot, and there is no stager")
            area.drop()
            self._decline(step, transfer.reason or nowhere, tell=False)
            return None
        record.save_seconds = time.monotonic() - begun
        area.tell((lambda: None) if place.keeping is None else place.keeping.nudge)
        self._pool.send(place, transfer)
        job = CopyJob(
            transfer,
            area,
            plan.router,
            taken,
            begins.after,
            begins.fingerprints,
            place.keeping,
            begins.instant,
            inside=inside,
            compares=compares,
            device=device,
            route=begins.route,
        )
        # Freed before the copy thread is busy: torch gives up the GIL for each tensor that it frees, and a busy thread
        # makes it wait ten microseconds to have the GIL back. `instant` has those that are looked at.
        taken.tensors.clear()
        self._copier.copy(job)
        self._ledger.begun(transfer, place.keeping)
        return job

    def _take(
        self, step: int, plan: SavePlan, taken: Capture, area: Staging, device: torch.device | None
    ) -> _Taken:
        """Take what must be taken at once: with room on the device for a mirror, all that is there."""
        sources, gate = taken.sources, self._copier.gate
        route = versions = None
        if device is not None:
            versions = area.counted(taken.tensors, taken.tensor_entries)
            route = plan.router.route(sources, gate.update_order, order_changed=gate.order_changed)
        is_mirrored = area.copy_now(sources, dict(taken.contents), route, versions)
        is_live = route is None or not is_mirrored or bool(area.live(route).host)
        instant = None
        if is_live:
            tear_check = plan.tear_check.on_host(sources) if is_mirrored else plan.tear_check
            instant = tear_check.take(taken, step)
        fingerprints = None
        if plan.watched:
            fingerprints = Fingerprints(plan.watched, plan.skeleton.gated, step, plan.shared, plan.samples)
            fingerprints.take_now(sources, also_gated=not is_live)
        after = None if device is None else stream_of(device).record()
        return _Taken(is_live, instant, fingerprints, after, route)

    def _undo(self, step: int, place: Reservation, error: BaseException) -> None:
        """An exception has ended the save: a copy that has begun goes on, anything else is given up."""
        if self._copier.reopen_if_idle():
            failed = DeclineCause.COPY_FAILED.because(f"save() was ended by {type(error).__name__}")
            self._give_back(place, failed)
            self._link.decline(step, failed)

    def _give_back(self, place: Reservation, reason: Reason) -> None:
        place.area.drop()
        self._pool.give_back(place, reason)

    def _refusal(self) -> Reason | None:
        if (problem := self._link.job.problem) is not None and not self._tiers.takes_steps:
            return DeclineCause.STAGER_LOST.because(problem)
        if (died := self._copier.problem) is not None:
            return DeclineCause.COPY_FAILED.because(died)
        if (died := self._tiers.died) is not None and not (self._link.job.lives or self._tiers.takes_steps):
            return DeclineCause.FAILED.because(died)
        if accelerator.is_capturing():
            return DeclineCause.COPY_FAILED.because(
                "save() was called while a graph is being recorded; call it between replays"
            )
        if only_shapes():
            return DeclineCause.COPY_FAILED.because(
                "save() was called where torch only traces (fake tensors are active); call it outside of that"
            )
        return None

    def _decline(self, step: int, reason: Reason, *, tell: bool = True, needed_pickle_bytes: int = 0) -> bool:
        self._ledger.declined(reason.cause)
        self._events.emit("declined", {"reason": reason.text, "cause": reason.cause}, step=step)
        # A lost stager is said by the link, once and loudly.
        if reason.text != self._warned and self._link.job.problem is None:
            _log.warning("rank %d: step %d is not checkpointed: %s", self._link.job.rank, step, reason)
            self._warned = reason.text
        self._tiers.skip(step, reason)
        if tell:
            self._link.decline(step, reason, needed_pickle_bytes=needed_pickle_bytes)
        return False


class _Taken(NamedTuple):
    """A save, after what must be taken at once."""

    is_live: bool  # the rest is copied from live tensors, so that updates must wait for it
    instant: SavedInstant | None
    fingerprints: Fingerprints | None  # begun
    after: StreamEvent | None  # where the current stream is then
    # The way through what is gated, where some of it is on a device: memory was taken for exactly this one.
    route: Route | None


def _device(sources: Sources) -> torch.device | None:
    """The device that tensors of the state lie on; None: all are in host memory."""
    if accelerator.kind() is None:
        return None
    everywhere = {*map(_device_of, filter(None, sources))}  # no Python code for each
    devices = {device for device in everywhere if device.type != "cpu"}
    if len(devices) > 1:
        raise StateError(
            f"tensors of the state lie on {' and '.join(sorted(map(str, devices)))}; expected the tensors of a rank on "
            "one device and in host memory: give each device a rank of its own"
        )
    return devices.pop() if devices else None
