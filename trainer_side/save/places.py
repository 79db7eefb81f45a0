"""Room for one more checkpoint on this rank: a staging area, slots of the local tiers, and the wait for them.

    save(9) ─► wait, with on_full="wait": until the oldest is staged ─► take: an area, a slot in each tier ─► send
                 └── late: who waited for whom ──────────────────────────┴──► NoRoom: busy, late, copy stuck
    a new plan ─► clear: until nobody reads an area ─► furnish: areas and slots for it

Every wait has a deadline, and one that is missed says who waited for whom.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from dataclasses import dataclass

from holdfast.errors import StateError
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.link.stager_message import StagerMessage
from trainer_side.save.ahead import Make, MemoryAhead
from trainer_side.save.areas import Areas, AreaUse
from trainer_side.save.copier import Copier
from trainer_side.save.copy_engine import CopyEngine
from trainer_side.save.copy_plan import SlicePlan
from trainer_side.save.host_memory import in_slot, locked_buffer
from trainer_side.save.rank_context import RankContext
from trainer_side.save.staging import Staging
from trainer_side.state import accelerator
from trainer_side.state.skeleton import Skeleton
from trainer_side.tiers.medium import address_of
from trainer_side.tiers.tier import SliceWriter
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer, TransferState

_LOOK_SECONDS = 0.05  # while waiting: how soon it is seen that another rank has declined the step


class NoRoom(Exception):
    """There is no room for this step."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True)
class StepPlace:
    """The areas and slots that one step has on this rank.

    Attributes:
        area: Where its slice is copied to.
        keeping: The slots that it has in local tiers; None where none is free, or there are no tiers.
    """

    area: Staging
    keeping: TierWrite | None


def _nobody() -> None:
    """No lane waits for frames."""


class Room:
    """The areas and the slots. Training thread.

    Args:
        areas: For as long as this object; empty.
        engine: Copies into them.
        copier: May still be busy with an area.
        context: How long to wait for what; has the local tiers, and the link, whose `answer` ends a wait.
    """

    def __init__(
        self,
        areas: Areas,
        engine: CopyEngine,
        copier: Copier,
        context: RankContext,
    ) -> None:
        self._areas, self._engine, self._copier = areas, engine, copier
        self._link, self._tiers = context.link, context.tiers
        self._ledger, self._config = context.ledger, context.config
        self._ahead = MemoryAhead({})

    # -- for a plan ----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Wait until nothing reads a staging area; steps that take too long are given up for the new plan.

        Raises:
            StateError: The transport does not release one that was given up.
            HoldfastError: The same, and the stager is lost.
        """
        deadline = time.monotonic() + self._config.full_seconds_max
        late = [
            flight
            for flight in self._areas.being_read()
            if not flight.released.wait(max(0.0, deadline - time.monotonic()))
        ]
        for before in late:
            reason = DeclineCause.LATE.because(
                f"its tensors have changed since, and {self._waited_for(before, self._config.full_seconds_max)}"
            )
            self._link.decline(before.step, reason)
            if before.keeping is not None:
                before.keeping.cancel(reason)
        deadline = time.monotonic() + self._config.stager_seconds_max
        for before in late:
            if not before.released.wait(max(0.0, deadline - time.monotonic())):
                if before.keeping is not None:
                    self._tiers.let_go(before.keeping)  # a device that hangs is no reason to end a training
                if before.released.is_set():
                    continue
                raise self._link.job.problem or StateError(
                    f"rank {self._link.job.rank}: the tensors changed while the checkpoint of step {before.step} is "
                    "still being sent; it was given up, and the transport still reads it after "
                    f"{self._config.stager_seconds_max:g} s"
                )

    def furnish(self, skeleton: Skeleton, slice_plan: SlicePlan, count_max: int) -> None:
        """Make room for slices of a new plan. The room is clear.

        Args:
            skeleton: The plan's.
            slice_plan: Of this rank.
            count_max: How many areas there may be: `areas.areas_max`.

        Raises:
            ConfigError: A local tier is too small for its first layout.
            StoreError: A tier's device refused.
        """
        pinned, numbers = accelerator.kind() is not None, itertools.count()

        def make(slot: SliceWriter | None) -> Staging:
            area = functools.partial(Staging, skeleton, slice_plan, self._engine, pinned=pinned)
            if slot is None or slot.memory is None:
                return area(memory=self._ahead.take(next(numbers)))
            memory = self._ahead.take(address_of(slot.memory))
            return area(slot=slot.memory, memory=memory, move=slot.copy or ctypes.memmove)

        self._ahead.stop()
        self._areas.renew(make, count_max, in_slots=self._tiers.is_direct)
        self._tiers.prepare(skeleton.layout)
        if pinned:
            self._ahead = MemoryAhead(self._to_make(max(1, slice_plan.area_bytes), count_max))

    def close(self) -> None:
        """No further step comes: what is made ahead of its use goes back."""
        self._ahead.close(self._config.full_seconds_max)

    def _to_make(self, area_bytes: int, count_max: int) -> dict[int, Make]:
        """The memory that later saves will want locked: slots by their address, or areas by their number."""
        if self._tiers.is_direct:
            slots = self._tiers.slot_memories()
            return {address_of(slot): functools.partial(in_slot, slot, pinned=True) for slot in slots}
        return dict.fromkeys(range(1, count_max), functools.partial(locked_buffer, area_bytes))

    # -- for a step ----------------------------------------------------------------------------------------------

    def wait(self, step: int, seconds_max: float | None = None) -> float:
        """With `on_full="wait"`, wait until one more step may be in flight; otherwise return at once.

        Args:
            step: Whose room it is.
            seconds_max: Wait whatever `on_full` says, for as long; None: as the settings say.

        If all areas are taken, that is until the oldest is staged, or has ended: every rank has sent it then, and the
        stager has room. Also ends when another rank has declined the step.

        Returns:
            How long training stood still; 0 with `seconds_max`, when training is over.

        Raises:
            NoRoom: Not within `full_seconds_max`, or `seconds_max`.
        """
        if seconds_max is None and self._config.on_full == "skip":
            return 0.0
        is_over = seconds_max is not None
        seconds_max = self._config.full_seconds_max if seconds_max is None else seconds_max
        begun, waited_seconds = time.monotonic(), 0.0
        if len(self._areas.in_flight()) >= self._areas.count_max:
            # A rank that asks for another layout meanwhile need not wait as long.
            self._link.tell(StagerMessage.fits(step))
        try:
            while len(in_flight := self._areas.in_flight()) >= self._areas.count_max:
                oldest = in_flight[0]
                gone = oldest.settled.wait(_LOOK_SECONDS) and oldest.released.wait(_LOOK_SECONDS)
                waited_seconds = time.monotonic() - begun
                if not gone and self._link.answer(step) is not None:
                    break  # another rank does not wait any longer
                if not gone and waited_seconds > seconds_max:
                    raise NoRoom(
                        DeclineCause.LATE.because(
                            f"{self._waited_for(oldest, seconds_max)}. Find out why the store is slow, enlarge the "
                            'ring, save less often, or set on_full = "skip"'
                        )
                    )
        finally:
            if is_over:
                waited_seconds = 0.0
            if waited_seconds:
                self._ledger.waited(waited_seconds)
        return waited_seconds

    def take(self, step: int, record: SaveRecord) -> StepPlace:
        """An area for this step, and slots of the tiers as far as there are any. Follow with `send` or `give_back`.

        Raises:
            NoRoom: All areas are taken, or the copy thread is stuck.
        """
        place = self._take(step, record)
        if place is None:
            raise NoRoom(self._busy())
        if stuck := self._copier.wait():
            self.give_back(place, stuck)
            raise NoRoom(stuck)
        return place

    def send(self, place: StepPlace, transfer: Transfer) -> None:
        """The step has begun: the area belongs to it until the stager and every tier have read it."""
        keeping = place.keeping
        self._areas.send(place.area, transfer, keeping)
        transfer.record.in_flight = len(self._areas.in_flight())
        place.area.tell(_nobody if keeping is None else keeping.nudge)
        if keeping is not None:
            keeping.link_released = transfer.released
            self._tiers.keep(keeping, place.area)

    def give_back(self, place: StepPlace, reason: Reason) -> None:
        """The step is not taken after all. Slots in which it has begun already are left to their lanes."""
        if place.keeping is not None and place.keeping.area is None:
            self._tiers.drop(place.keeping, reason)

    # -- details -------------------------------------------------------------------------------------------------

    def _take(self, step: int, record: SaveRecord) -> StepPlace | None:
        if self._tiers.is_direct:
            return self._take_slot(step, record)
        area = self._areas.take()
        if area is None:
            return None
        return StepPlace(area, self._take_slots(step, record))

    def _take_slot(self, step: int, record: SaveRecord) -> StepPlace | None:
        """A slot of the first tier, which is the area: without one there is nowhere to copy to."""
        keeping = self._take_slots(step, record) if self._areas.has_room() else None
        if keeping is None:
            return None
        if keeping.source_is_slot < 0:
            self._tiers.drop(keeping, DeclineCause.BUSY.because("no slot of the first tier is free"))
            return None
        return StepPlace(self._areas.take_slot(keeping.writers[keeping.source_is_slot]), keeping)

    def _take_slots(self, step: int, record: SaveRecord) -> TierWrite | None:
        """With `on_full="wait"`, wait for those that will become free: verdicts come a little later than seals."""
        lives = self._link.job.lives
        if self._config.on_full == "skip" or not self._tiers.takes_steps:
            return self._tiers.begin(step, record, stager_lives=lives)
        begun = time.monotonic()
        until = begun + self._config.full_seconds_max
        keeping = self._tiers.begin(step, record, stager_lives=lives, wait_until=until)
        self._ledger.waited(time.monotonic() - begun)
        return keeping

    def _busy(self) -> Reason:
        """Why there is no staging area for another step now."""
        reading = self._areas.being_read()
        if len(reading) < self._areas.count_max:
            in_flight = len(self._areas.in_flight())
            if self._tiers.takes_steps and in_flight <= self._areas.count_max:
                return DeclineCause.BUSY.because("no slot of the first local tier is free")
            return DeclineCause.BUSY.because(f"the {in_flight} checkpoints before are not staged yet")
        before = len(reading)
        which = "the checkpoint before is" if before == 1 else f"the {before} checkpoints before are"
        sent = any(not flight.transfer.released.is_set() for flight in reading)
        return DeclineCause.BUSY.because(
            f"{which} still being {'sent' if sent else 'written to local tiers'}"
        )

    def _waited_for(self, flight: AreaUse, seconds_max: float) -> str:
        before = flight.transfer
        who = f"rank {self._link.job.rank} waited {seconds_max:g} s for step {before.step}"
        if before.released.is_set() and before.settled.is_set():
            return f"{who} to be written to its local tiers"
        who = f"{who} to be staged, and"
        sent = before.frames - before.frames_left
        if before.state is TransferState.SENT:
            return f"{who} has sent all of it: the stager waits for other ranks"
        if before.settled.is_set():
            return f"{who} the transport still holds the memory of chunks sent to the stager"
        return f"{who} the stager had room for {sent} of its {before.frames} chunks: the ring is full"
