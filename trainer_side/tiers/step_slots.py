"""A slot for one step in each tier of this rank that has one free.

A tier without a free slot skips the step and tells the council: the step is then void in that tier on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.tiers.keeping import Keeping
from trainer_side.tiers.outcomes import Outcomes
from trainer_side.tiers.tally import Order
from trainer_side.tiers.tier import Nearness, SliceWriter
from trainer_side.tiers.tier_report import TierReport
from trainer_side.tiers.tier_room import TierRoom

_LOOK_SECONDS = 2e-3


class TierJob(NamedTuple):
    """The job that writes. `name` is unlike that of any other job, so that two of the same attempt are never mixed."""

    attempt: int
    name: str


class StepSlots:
    """See the module. Training thread.

    Args:
        job: This job.
        room: Frames of the slices.
        outcomes: Told what has a slot and what has none.
        report: Told which tier refuses a slot.
        call_seconds_max: How long a tier may take to give one.
        is_direct: Whether a slot of the first tier is the staging area.

    Attributes:
        attempt: Of later slices.
    """

    def __init__(
        self,
        job: TierJob,
        room: TierRoom,
        outcomes: Outcomes,
        report: TierReport,
        *,
        call_seconds_max: float,
        is_direct: Callable[[], bool],
    ) -> None:
        self.attempt, self._job = job
        self._room, self._outcomes, self._report = room, outcomes, report
        self._call_seconds_max, self._is_direct = call_seconds_max, is_direct
        self._newest_step = -1

    def begin(
        self, step: int, record: SaveRecord, *, stager_lives: bool, wait_until: float
    ) -> Keeping | None:
        """Take a slot in each tier; None if none has one. See `Keeper.begin`."""
        layout = self._room.layout
        assert layout is not None, "prepare comes first"
        if step <= self._newest_step:
            return None
        self._newest_step = step
        order = (self.attempt, step)
        writers: dict[int, SliceWriter] = {}
        for number in range(len(self._outcomes.lanes)):
            taken = self._why_not(number, stager_lives=stager_lives) or self._take(number, order, wait_until)
            if isinstance(taken, Reason):
                self._outcomes.skipped(number, order, taken)
            else:
                writers[number] = taken
                self._outcomes.began(number, order, layout.image_bytes)
        if not writers:
            return None
        direct = self._is_direct() and 0 in writers and writers[0].memory is not None
        return Keeping(
            order,
            self._room.frames,
            record,
            writers,
            layout_digest=layout.digest,
            job=self._job,
            source_is_slot=0 if direct else -1,
            compare=partial(self._outcomes.council.compare, order, layout.digest),
        )

    def skip(self, step: int, reason: Reason) -> None:
        if step > self._newest_step:
            self._newest_step = step
            for number in range(len(self._outcomes.lanes)):
                self._outcomes.skipped(number, (self.attempt, step), reason, counted=False)

    def _why_not(self, number: int, *, stager_lives: bool) -> Reason | None:
        """Why this tier is not asked for a slot; None if it is."""
        if (problem := self._outcomes.council.problem) is not None:
            return DeclineCause.LOST.because(problem)
        if (reason := self._room.problem(number)) is not None:
            return reason
        if stager_lives and self._outcomes.lanes[number].tier.nearness is Nearness.STORE:
            return DeclineCause.RESTS.because("the stager brings it there")
        return None

    def _take(self, number: int, order: Order, wait_until: float) -> SliceWriter | Reason:
        """A slot, or why there is none."""
        try:
            while True:
                hopeless = self._outcomes.is_idle_in(number) or time.monotonic() >= wait_until
                writer = self._ask(number, order)
                if writer is not None:
                    return writer
                if hopeless:
                    return DeclineCause.BUSY.because("no slot is free")
                if (problem := self._outcomes.council.problem) is not None:
                    # No verdict frees a slot any more.
                    return DeclineCause.LOST.because(problem)
                time.sleep(_LOOK_SECONDS)
        except HoldfastError as error:
            self._report.no_slot(self._outcomes.lanes[number].tier, order[1], error)
            return DeclineCause.FAILED.because(error)

    def _ask(self, number: int, order: Order) -> SliceWriter | None:
        lane = self._outcomes.lanes[number]
        tier = lane.tier
        if tier.nearness is not Nearness.PM:
            return tier.begin(*order)

        def give_back(writer: SliceWriter | None) -> None:
            if writer is not None:
                writer.abandon()

        # Persistent memory may have to be flushed for it, and the training thread must not hang with the device.
        what, limit = f"a slot for step {order[1]}", self._call_seconds_max
        return lane.calls.ask(what, lambda: tier.begin(*order), seconds_max=limit, late=give_back)
