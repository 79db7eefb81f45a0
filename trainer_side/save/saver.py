"""One `save()`, from the call until training may go on.

    save(step), training thread                      copy thread            MPI thread (link)
    ───────────────────────────────────────          ─────────────          ─────────────────
    collect the state; its plan (planner.py) ─ first time, or new tensors: ► PROPOSE … RESERVED
    room for it (places.py), or declined
    copy what anything may change
    close the gate, offer ────────────────────────────────────────────────► OFFER … credits
    return                                           data.pkl, if it was left to it; then
                                                     copy the slice ──────► frames, as the bytes get ready
                                                                       └──► local tiers (tiers/tier_set.py)
    next optimizer.step(): waits for the gate ◄───── open the gate
    (where it is not shown that all updates wait for it, return waits for that: hook_proof.py)

No collective operation. A step that cannot be taken (all staging areas are still being sent) is declined by this rank,
the stager tells the others, and training goes on. Local tiers take steps beside the stager, without one, and when it is
lost: what one of the two declines may still go to the other.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import HoldfastError, PeerLost, StateError
from holdfast.faultpoint import Point, reach
from holdfast.telemetry.causes import OTHER, DeclineCause, Reason
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.fingerprint import Fingerprints
from trainer_side.save.places import NoRoom, Room, StepPlace
from trainer_side.save.planner import Planner, SavePlan
from trainer_side.save.rank_context import RankContext
from trainer_side.save.tearing import SavedInstant
from trainer_side.state.skeleton import Capture, Outgrown
from trainer_side.state.survey import StorageSource
from trainer_side.transfer import Transfer


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """The search for garbage in cycles pauses in the whole process. Any thread, one at a time.

    A capture makes thousands of objects and drops them at once; a plan makes dozens for each tensor and keeps them.
    Each few hundred set off a search, and now and then one through all objects that there are: with torch imported a
    quarter of a second, in `save()`, for nothing. What is dropped before the pause ends does not count towards the
    next search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_log = logging.getLogger("holdfast.trainer")


class Saver:
    """Takes the steps of one rank. Training thread.

    Args:
        state: As the script gave it.
        planner: Knows what of it is copied, and where to.
        room: Has areas and slots.
        copier: Copies behind the gate.
        context: Takes the steps to the stager and into local tiers, and counts them.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        planner: Planner,
        room: Room,
        copier: Copier,
        context: RankContext,
    ) -> None:
        self._state, self._planner, self._room, self._copier = state, planner, room, copier
        self._link, self._tiers = context.link, context.tiers
        self._ledger, self._events = context.ledger, context.events
        self._warned = ""

    def save(self, step: int) -> bool:
        """See `Checkpointer.save`."""
        begun, saved_at_unix = time.monotonic(), time.time()
        reach(Point.SAVE_BEGUN)
        if (problem := self._link.problem) is not None and not self._tiers.takes_steps:
            return self._decline(step, DeclineCause.STAGER_LOST.because(problem), tell=False)
        try:
            with no_collections():
                plan, taken = self._planner.take()
        except PeerLost as lost:
            if lost is not self._problem() or self._tiers.takes_steps:
                raise  # the stager is there, a rank is not: going on would leave the ranks at different steps
            return self._decline(step, DeclineCause.STAGER_LOST.because(lost), tell=False)
        except Outgrown as outgrown:
            # More room for a PerRank value takes a new agreement of all ranks, which this rank cannot call alone.
            needed = 0 if outgrown.name else outgrown.needed_bytes
            if needed and self._link.rank == 0:
                self._tiers.council.make_room(needed)
            return self._decline(step, DeclineCause.OUTGROWN.because(outgrown), needed_pickle_bytes=needed)
        except NoRoom as refusal:
            return self._decline(step, refusal.reason)
        record: dict[str, Any] = {"saved_at_unix": saved_at_unix}
        try:
            # The training thread is here, so what was taken stays as it is meanwhile.
            wait_seconds = self._room.wait(step)
            answer = self._link.answer(step)
            if answer is not None and not self._tiers.takes_steps:
                return self._decline(step, answer, tell=False)  # all were told the same
            place = self._room.take(step, record)
        except NoRoom as refusal:
            return self._decline(step, refusal.reason)
        record["wait_seconds"] = wait_seconds
        try:
            with no_collections():
                instant = plan.tear_check.take(taken, step)
                taken = taken._replace(tensors=())  # those that are looked at are with the instant
                has_begun = self._begin(step, plan, taken, instant, place, answer, record, begun)
        except BaseException:
            self._room.give_back(place, DeclineCause.COPY_FAILED.because("save() ended with an error"))
            raise
        if has_begun:
            self._copier.finish_what_would_tear(instant)
        return has_begun

    def _begin(
        self,
        step: int,
        plan: SavePlan,
        taken: Capture,
        instant: SavedInstant | None,
        place: StepPlace,
        answer: Reason | None,
        record: dict[str, Any],
        begun: float,
    ) -> bool:
        """Take what must be taken at once, and set the rest going. `answer`: what the stager has said already."""
        sources, area = taken.sources, place.area
        area.copy_now(sources, dict(taken.contents))
        fingerprints = None
        if plan.watched:
            fingerprints = Fingerprints(plan.watched, plan.skeleton.gated, step, plan.shared)
            fingerprints.take_now(sources)
        record |= {
            "slice_bytes": area.nbytes,
            "save_seconds": 0.0,
            "host": socket.gethostname(),
        }
        device = _device(sources)
        after = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._copier.shut()
        transfer = (
            self._link.offer(step, area, record) if answer is None else Transfer.none(step, record, answer)
        )
        if transfer.released.is_set() and place.keeping is None:  # refused at once: nothing is copied
            self._copier.reopen()
            nowhere = Reason(OTHER, "no local tier has a free slot, and there is no stager")
            return self._decline(step, transfer.reason or nowhere, tell=False)
        record["save_seconds"] = time.monotonic() - begun
        self._room.send(place, transfer)
        self._copier.copy(
            CopyJob(transfer, area, plan.router, taken, after, fingerprints, place.keeping, instant)
        )
        self._ledger.begun(transfer, place.keeping)
        return True

    def _problem(self) -> HoldfastError | None:
        return self._link.problem

    def _decline(self, step: int, reason: Reason, *, tell: bool = True, needed_pickle_bytes: int = 0) -> bool:
        self._ledger.declined(reason.cause)
        self._events.emit("declined", {"reason": reason.text, "cause": reason.cause}, step=step)
        # A lost stager is said by the link, once and loudly.
        if reason.text != self._warned and self._link.problem is None:
            _log.warning("rank %d: step %d is not checkpointed: %s", self._link.rank, step, reason)
            self._warned = reason.text
        self._tiers.skip(step, reason)
        if tell:
            self._link.decline(step, reason, needed_pickle_bytes=needed_pickle_bytes)
        return False


def _device(sources: Sequence[StorageSource | None]) -> torch.device | None:
    """The CUDA device that tensors of the state lie on; None: all are in host memory."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    devices = {source.device for source in sources if source is not None and source.device.type == "cuda"}
    if len(devices) > 1:
        raise StateError(
            f"tensors of the state lie on {' and '.join(sorted(map(str, devices)))}; expected the tensors of a rank on "
            "one device and in host memory: give each device a rank of its own"
        )
    return devices.pop() if devices else None
