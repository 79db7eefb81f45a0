"""One `save()`, from the call until training continues.

    save(step), training thread                      copy thread            link thread
    ───────────────────────────────────────          ─────────────          ─────────────────
    collect the state; its plan (planner.py) ─ first time, or new tensors: ► PROPOSE … RESERVED
    room for it (staging_pool.py), or declined
    copy what anything may change
    close the gate, offer ────────────────────────────────────────────────► OFFER … credits
    return                                           data.pkl, if deferred; then
                                                     copy the slice ──────► frames, as the bytes get ready
                                                                       └──► local tiers (tiers/tier_set.py)
    next optimizer.step(): waits for the gate ◄───── open the gate
    (`save()` returns only then, unless everything that changes the tensors is proven to wait: hook_coverage.py)

A save needs no collective operation. If all staging areas are still being sent, this rank declines the step, the stager
tells the other ranks, and training continues. The rank declines at the next `step()`, `save()` or update: if the block
ends before that, the step was the last one, and `save_late` waits for room. Local tiers take steps beside the stager,
without one, and after it is lost; a step that one of the two declines may still go to the other.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import operator
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
from trainer_side.opaque import is_fake_mode
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.copy_plan import Route
from trainer_side.save.device_stream import ordered_with_streams, stream_of
from trainer_side.save.fingerprint import Fingerprints
from trainer_side.save.finished_step import FinishedStep
from trainer_side.save.planner import Planner, SavePlan
from trainer_side.save.rank_context import RankContext
from trainer_side.save.staging import Staging
from trainer_side.save.staging_pool import PoolFull, Reservation, StagingPool
from trainer_side.save.tearing import SavedInstant, versions_of
from trainer_side.state import accelerator
from trainer_side.state.accelerator import StreamEvent
from trainer_side.state.skeleton import Capture, Outgrown
from trainer_side.state.survey import Sources
from trainer_side.transfer import Transfer


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector for the whole process. Any thread, one at a time.

    A capture makes thousands of short-lived objects, and a plan keeps dozens for each tensor. Every few hundred new
    objects start a collection, sometimes a full one: with torch imported, that adds a quarter of a second to `save()`
    and frees nothing. Objects dropped before the pause ends do not count towards the next collection.
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
        self._finished_step = FinishedStep(state, lambda: copier.updates)
        self._late_step = -1  # the step that `_finished_step` has noted last
        self._late_reason: Reason | None = None  # why that step is not saved yet
        self._late_metrics: dict[str, float] | None = None
        copier.on_update = self.decline_late

    def decline_late(self) -> None:
        """Decline the step that found no room, since training continues past it."""
        reason, self._late_reason = self._late_reason, None
        if reason is not None:
            self._decline(self._late_step, reason)

    def save_late(self, seconds_max: float) -> int:
        """Save the last step if it found no room, waiting for room. Raises as `Checkpointer.save`.

        Called at the end of the block. Returns the step if its save has begun; else -1.
        """
        step = self._late_step
        if self._late_reason is None:
            return -1
        if why := self._finished_step.stale_reason():
            what = f"it found no room when it was due, and later {why}"
            self._late_reason = DeclineCause.LATE.because(what)
            self.decline_late()
            return -1
        if self._link.job.rank == 0:
            _log.warning(
                "step %d, the last one, found no room (%s); waiting for room, at most %g s",
                step,
                self._late_reason,
                seconds_max,
            )
        self._finished_step.restore_values()
        return step if self.save(step, seconds_max, self._late_metrics) else -1

    def save(
        self, step: int, wait_seconds_max: float | None = None, metrics: dict[str, float] | None = None
    ) -> bool:
        """Begin a save, as `Checkpointer.save`. `wait_seconds_max`: For room, regardless of the settings."""
        begun, saved_at_unix = time.monotonic(), time.time()
        self._clear_late(step)
        reach(Point.SAVE_BEGUN)
        self._copier.compare_if_due()
        self._tiers.set_attempt(self._link.job.attempt)
        if (refusal := self._refusal()) is not None:
            return self._decline(step, refusal)
        try:
            with gc_paused():
                plan, taken = self._planner.capture(step)
        except PeerLost as lost:
            if not self._link.job.is_last_loss(lost) or self._tiers.accepts_steps:
                raise  # a rank is lost, not the stager: continuing would leave the ranks at different steps
            return self._decline(step, DeclineCause.STAGER_LOST.because(lost))
        except Outgrown as outgrown:
            # More room for a PerRank value needs a new agreement of all ranks, which this rank cannot call alone.
            needed = 0 if outgrown.name else outgrown.needed_bytes
            if needed and self._link.job.rank == 0:
                self._tiers.council.announce_room(needed)
            return self._decline(step, DeclineCause.OUTGROWN.because(outgrown), needed_pickle_bytes=needed)
        except PoolFull as no_room:
            return self._decline(step, no_room.reason)
        trackers = dict(self.trackers) or None
        record = SaveRecord(saved_at_unix=saved_at_unix, metrics=metrics, trackers=trackers)
        try:
            # The training thread waits here, so the captured state does not change meanwhile.
            wait_seconds = self._pool.wait(step, wait_seconds_max)
            answer = self._link.decline_reason(step)
            if answer is not None and not self._tiers.accepts_steps:
                self._link.send_message(StagerMessage.fits(step))
                return self._decline(step, answer, tell=False)  # all were told the same
            place = self._reserve(step, record)
        except PoolFull as no_room:
            self._late_metrics = metrics
            return self._no_room(step, no_room.reason, is_late=wait_seconds_max is not None)
        record.wait_seconds = wait_seconds
        try:
            with gc_paused():
                job = self._begin(step, plan, taken, place, answer, record, begun)
        except torch.OutOfMemoryError as error:
            # The training itself may still fit into the full device, so only the save fails.
            full = DeclineCause.NO_MEMORY.because(f"the device has none left: {error}")
            self._release(place, full)
            return self._decline(step, full)
        except BaseException as error:  # Ctrl-C, too
            self._undo(step, place, error)
            raise
        if job is not None:
            self._copier.finish_inside_save(job)
        return job is not None

    def _reserve(self, step: int, record: SaveRecord) -> Reservation:
        """As `StagingPool.reserve`. Raises PoolFull also if the copy thread is stuck."""
        place = self._pool.reserve(step, record)
        if stuck := self._copier.wait():
            self._pool.release(place, stuck)
            raise PoolFull(stuck)
        return place

    def _clear_late(self, step: int) -> None:
        if step != self._late_step:
            self.decline_late()
        self._late_reason = None

    def _no_room(self, step: int, reason: Reason, *, is_late: bool) -> bool:
        """Decline the step; a busy one only once training continues. `is_late`: the save has waited for room."""
        if is_late or reason.cause != DeclineCause.BUSY:
            return self._decline(step, reason)
        self._link.send_message(StagerMessage.fits(step))
        self._finished_step.note(step)
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
        """Capture what must be captured now, and start copying the rest. `answer`: the stager's refusal, if any."""
        area, device = place.area, _device(taken.sources)
        streams = self._copier.update_streams
        with contextlib.nullcontext() if device is None else ordered_with_streams(device, streams):
            begins = self._capture(step, plan, taken, area, device)
        record.slice_bytes, record.save_seconds, record.host = area.nbytes, 0.0, socket.gethostname()
        on_device = begins.route is not None and bool(area.live_route(begins.route).device)
        inside, compare_later = self._copier.choose_copy_mode(
            step, begins.instant, area.nbytes, on_device=on_device
        )
        record.copied_inside = inside or begins.instant is None
        self._copier.close_gate(gate=begins.is_live)
        if answer is None:
            transfer = self._link.offer(step, area, record, plan.skeleton.layout)
        else:
            transfer = Transfer.not_sent(step, record, answer)
        if transfer.released.is_set() and place.tier_write is None:  # refused at once: nothing is copied
            self._copier.reopen_gate()
            nowhere = Reason(OTHER, "no local tier has a free slot, and there is no stager")
            area.discard()
            self._decline(step, transfer.reason or nowhere, tell=False)
            return None
        record.save_seconds = time.monotonic() - begun
        area.on_frames_ready((lambda: None) if place.tier_write is None else place.tier_write.nudge)
        self._pool.send(place, transfer)
        job = CopyJob(
            transfer,
            area,
            plan.router,
            taken,
            begins.after,
            begins.fingerprints,
            place.tier_write,
            begins.instant,
            inside=inside,
            compare_later=compare_later,
            device=device,
            route=begins.route,
        )
        # Free these before the copy thread is busy: torch releases the GIL for each tensor that it frees, and a busy
        # thread delays getting it back by ten microseconds. `instant` keeps the tensors that are checked.
        taken.tensors.clear()
        if begins.changed:
            self._copier.withdraw(job, begins.changed)
        self._copier.copy(job)
        self._ledger.record_begun(transfer, place.tier_write)
        return job

    def _capture(
        self, step: int, plan: SavePlan, taken: Capture, area: Staging, device: torch.device | None
    ) -> _SyncCapture:
        """Capture what must be captured now: with room for a mirror, all tensors on the device."""
        sources, gate = taken.sources, self._copier.gate
        route = versions = None
        if device is not None:
            versions = area.change_counters(taken.tensors, taken.tensor_entries)
            route = plan.router.route(sources, gate.update_order, order_changed=gate.order_changed)
        counted = versions_of(taken.tensors)
        is_mirrored = area.copy_now(sources, dict(taken.contents), route, versions)
        is_live = route is None or not is_mirrored or bool(area.live_route(route).host)
        instant = None
        if is_live:
            tear_check = plan.tear_check.host_only(sources) if is_mirrored else plan.tear_check
            instant = tear_check.capture_instant(taken, step)
        fingerprints = None
        if watched := plan.watched_entries:
            fingerprints = Fingerprints(watched, plan.skeleton.gated, step, plan.shared, plan.samples)
            fingerprints.sample_now(sources, also_gated=not is_live)
        after = None if device is None else stream_of(device).record_event()
        # Only another thread can have changed one meanwhile.
        changed = [*map(operator.ne, versions_of(taken.tensors), counted)]
        path = plan.tear_check.paths[taken.tensor_entries[changed.index(True)]] if any(changed) else ""
        return _SyncCapture(is_live, instant, fingerprints, after, route, path)

    def _undo(self, step: int, place: Reservation, error: BaseException) -> None:
        """Give up a save that has raised an exception, unless its copy has begun."""
        if self._copier.reopen_gate_if_idle():
            failed = DeclineCause.COPY_FAILED.because(f"save() was ended by {type(error).__name__}")
            self._release(place, failed)
            self._link.decline(step, failed)

    def _release(self, place: Reservation, reason: Reason) -> None:
        place.area.discard()
        self._pool.release(place, reason)

    def _refusal(self) -> Reason | None:
        if (problem := self._link.job.problem) is not None and not self._tiers.accepts_steps:
            return DeclineCause.STAGER_LOST.because(problem)
        if (died := self._copier.problem) is not None:
            return DeclineCause.COPY_FAILED.because(died)
        if (died := self._tiers.died) is not None and not (
            self._link.job.is_alive or self._tiers.accepts_steps
        ):
            return DeclineCause.FAILED.because(died)
        if accelerator.is_capturing():
            return DeclineCause.COPY_FAILED.because(
                "save() was called while a graph is being recorded; call it between replays"
            )
        if is_fake_mode():
            return DeclineCause.COPY_FAILED.because(
                "save() was called where torch only traces (fake tensors are active); call it outside of that"
            )
        return None

    def _decline(self, step: int, reason: Reason, *, tell: bool = True, needed_pickle_bytes: int = 0) -> bool:
        self._ledger.record_declined(reason.cause)
        self._events.emit("declined", {"reason": reason.text, "cause": reason.cause}, step=step)
        # The link itself reports a lost stager, once.
        if reason.text != self._warned and self._link.job.problem is None:
            _log.warning("rank %d: step %d is not checkpointed: %s", self._link.job.rank, step, reason)
            self._warned = reason.text
        self._tiers.skip(step, reason)
        if tell:
            self._link.decline(step, reason, needed_pickle_bytes=needed_pickle_bytes)
        return False


class _SyncCapture(NamedTuple):
    """A save after its synchronous captures."""

    is_live: bool  # the rest is copied from live tensors, so updates must wait for it
    instant: SavedInstant | None
    fingerprints: Fingerprints | None  # begun
    after: StreamEvent | None  # recorded on the current stream afterwards
    # The route through the gated tensors, if some are on a device; memory is reserved for exactly this route.
    route: Route | None
    changed: str  # the path of a tensor that has changed meanwhile; empty without one


def _device(sources: Sources) -> torch.device | None:
    """Return the device that holds tensors of the state; None if all are in host memory."""
    if accelerator.kind() is None:
        return None
    everywhere = {*map(_device_of, filter(None, sources))}  # in C: no Python call per tensor
    devices = {device for device in everywhere if device.type != "cpu"}
    if len(devices) > 1:
        raise StateError(
            f"tensors of the state lie on {' and '.join(sorted(map(str, devices)))}; expected the tensors of a rank on "
            "one device and in host memory: give each device a rank of its own"
        )
    return devices.pop() if devices else None
