"""The staging areas of this rank and the slots of its local tiers: they limit how many checkpoints are in flight.

    save(9) ─► wait, with on_full="wait": until the oldest is staged ─► reserve: an area, a slot in each tier ─► send
                 └── late: who waited for whom ──────────────────────────┴──► PoolFull: busy, late
    a new plan ─► clear: until nobody reads an area ─► prepare: areas and slots for it

    save(7) ─► area 0 ══ being sent ═══════════════►│ released
    save(8)      ─► area 1 ══ being sent ═══════════════►│
    save(9)           declined, or waits: all areas are taken ─► area 0

An area is allocated when first needed, touched once, and kept until the layout changes. With strategy D an area is a
slot of a local tier: the tier says which one is free, and no other memory is allocated. Several checkpoints in flight
follow PCcheck (ASPLOS 2025). Every wait has a deadline; the message of a missed one says who waited for whom.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from holdfast.errors import ConfigError, StateError
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import area_bytes_by_rank
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.link.stager_message import StagerMessage
from trainer_side.save.host_memory import Make, MemoryPreallocator, locked_buffer, slot_tensor
from trainer_side.save.rank_context import RankContext
from trainer_side.tiers.medium import address_of
from trainer_side.tiers.tier import SliceWriter
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer, TransferState

if TYPE_CHECKING:
    from trainer_side.save.staging import Staging

    MakeArea = Callable[[SliceWriter | None, torch.Tensor | None], Staging]

_log = logging.getLogger("holdfast.trainer")


def areas_max(layout: Layout, *, in_flight_max: int, host_bytes_max: int | None) -> int:
    """Return the most areas of each rank: the same on every rank, so that all ranks skip the same steps.

    ConfigError: not even one fits into `host_bytes_max`, the most host memory for one rank.
    """
    if host_bytes_max is None:
        return in_flight_max
    areas = area_bytes_by_rank(layout)
    rank = areas.index(max(areas))
    if areas[rank] > host_bytes_max:
        raise ConfigError(
            f"trainer setting host_bytes_max: expected at least {areas[rank]} bytes, which one staging "
            f"area takes for the slice of rank {rank} of an image of {layout.image_bytes} bytes, got "
            f"{host_bytes_max}; raise it, or train on more than {layout.ranks} ranks, so that each slice is smaller"
        )
    return min(in_flight_max, host_bytes_max // areas[rank])


class _AllEvents:
    """Several events as one."""

    def __init__(self, events: Sequence[threading.Event]) -> None:
        self._events = events

    def is_set(self) -> bool:
        return all(event.is_set() for event in self._events)

    def wait(self, seconds_max: float) -> bool:
        deadline = time.monotonic() + seconds_max
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in self._events)


class AreaUse:
    """A checkpoint that reads an area: on its way to the stager, into local tiers, or both."""

    def __init__(self, transfer: Transfer, tier_write: TierWrite | None) -> None:
        self.transfer, self.tier_write = transfer, tier_write
        kept = [tier_write.released] if tier_write is not None else []
        self.released = _AllEvents([transfer.released, *kept])  # nothing reads the area any more
        # Its outcome is known, at the stager and in the tiers.
        self.settled = _AllEvents([transfer.settled, *kept])

    @property
    def step(self) -> int:
        return self.transfer.step


class Areas:
    """The staging areas and their uses. Training thread."""

    def __init__(self) -> None:
        self._make: Callable[[SliceWriter | None], Staging] | None = None
        self.count_max = 0
        self._areas: list[Staging] = []
        self._slots: dict[int, Staging] = {}  # by address
        self._last_use: dict[Staging, AreaUse] = {}  # last use of each area
        self._uses: list[AreaUse] = []  # uses that may be unfinished, oldest first

    @property
    def nbytes(self) -> int:
        return sum(area.area_bytes for area in self._areas)

    def reset(
        self, make: Callable[[SliceWriter | None], Staging], count_max: int, *, in_slots: bool = False
    ) -> None:
        """Drop all areas, which nothing reads any more, and make the first new one. `make` gets the slot whose memory
        becomes the area, if any. With `in_slots` all areas are slots of a tier, and the first one is not made now.
        """
        assert not self.being_read(), "an area is still being sent"
        self._make, self.count_max = make, count_max
        self._last_use.clear()
        self._areas.clear()  # frees their memory before the new area is allocated
        self._slots.clear()
        if not in_slots:
            self._areas.append(make(None))

    def acquire(self) -> Staging | None:
        """Return an area that nothing reads; None if all are taken and no more are allowed, or if more than `count_max`
        steps wait to be staged: a further step would only compete for the ring and the store.
        """
        if not self.has_room():
            return None
        for area in self._areas:
            if area not in self._last_use or self._last_use[area].released.is_set():
                return area
        if self._make is None or len(self._areas) >= self.count_max:
            return None
        try:
            area = self._make(None)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
            _log.warning(
                "no memory for one more staging area, %d are in use; lower in_flight_max, or free memory: %s",
                len(self._areas),
                error,
            )
            self.count_max = len(self._areas)
            return None
        self._areas.append(area)
        return area

    def has_room(self) -> bool:
        return len(self.in_flight()) <= self.count_max

    def slot_area(self, writer: SliceWriter) -> Staging:
        """Return the area in this slot of a tier. The tier guarantees that nothing reads the slot."""
        assert writer.memory is not None
        assert self._make is not None
        address = torch.frombuffer(writer.memory, dtype=torch.uint8).data_ptr()
        if address not in self._slots:
            self._slots[address] = self._make(writer)
        return self._slots[address]

    def send(self, area: Staging, transfer: Transfer, tier_write: TierWrite | None = None) -> None:
        """Note that `transfer` and `tier_write` read from `area` until they are released."""
        flight = AreaUse(transfer, tier_write)
        self._last_use[area] = flight
        self._uses = [*self.in_flight(), flight]

    def being_read(self) -> list[AreaUse]:
        """Uses of areas that are still being read, oldest first."""
        return [flight for flight in self._uses if not flight.released.is_set()]

    def in_flight(self) -> list[AreaUse]:
        """Uses of areas that are still being read, or whose step is neither staged nor given up, oldest first."""
        return [flight for flight in self._uses if not (flight.released.is_set() and flight.settled.is_set())]


_LOOK_SECONDS = 0.05  # between checks whether another rank has declined the step


class PoolFull(Exception):
    """There is no room for this step."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True)
class Reservation:
    """The areas and slots that one step has on this rank."""

    area: Staging
    tier_write: TierWrite | None  # None where no slot of a local tier is free, or there are no tiers


class StagingPool:
    """The areas and slots of this rank. Training thread. `areas`: Empty, and used by this object alone."""

    def __init__(self, areas: Areas, context: RankContext) -> None:
        self._areas = areas
        self._link, self._tiers = context.link, context.tiers
        self._ledger, self._config = context.ledger, context.config
        self._preallocator: MemoryPreallocator | None = None

    def clear(self) -> None:
        """Wait until nothing reads a staging area; give up steps that take too long.

        StateError, or another HoldfastError if the stager is lost: the transport still holds the memory of such a step.
        """
        deadline = time.monotonic() + self._config.full_seconds_max
        late = [
            flight
            for flight in self._areas.being_read()
            if not flight.released.wait(max(0.0, deadline - time.monotonic()))
        ]
        for before in late:
            reason = DeclineCause.LATE.because(
                f"its tensors have changed since, and {self._describe_wait(before, self._config.full_seconds_max)}"
            )
            self._link.decline(before.step, reason)
            if before.tier_write is not None:
                before.tier_write.cancel(reason)
        deadline = time.monotonic() + self._config.stager_seconds_max
        for before in late:
            if not before.released.wait(max(0.0, deadline - time.monotonic())):
                if before.tier_write is not None:
                    self._tiers.release_area(before.tier_write)  # a hanging device must not end the training
                if before.released.is_set():
                    continue
                raise self._link.job.problem or StateError(
                    f"rank {self._link.job.rank}: the tensors changed while the checkpoint of step {before.step} is "
                    "still being sent; it was given up, and the transport still held its memory after "
                    f"{self._config.stager_seconds_max:g} s"
                )

    def prepare(
        self, make: MakeArea, layout: Layout, area_bytes: int, count_max: int, *, pinned: bool
    ) -> None:
        """Prepare areas and slots for a new plan, after `clear`. `make` makes an area, in the given memory if any.
        `count_max`: Result of `areas_max`. `pinned`: A device copies into the areas.

        ConfigError: a local tier is too small for its first layout. StoreError: a tier's device failed.
        """
        numbers = itertools.count()

        def prepared(slot: SliceWriter | None) -> Staging:
            key = next(numbers) if slot is None or slot.memory is None else address_of(slot.memory)
            return make(slot, None if self._preallocator is None else self._preallocator.claim(key))

        if self._preallocator is not None:
            self._preallocator.stop()
        self._areas.reset(prepared, count_max, in_slots=self._tiers.is_direct)
        self._tiers.prepare(layout)
        if pinned:
            self._preallocator = MemoryPreallocator(self._memory_makers(max(1, area_bytes), count_max))

    def close(self) -> None:
        """Free memory that was made ahead of its use. No save follows."""
        self._tiers.stop_making_slots()
        if self._preallocator is not None:
            self._preallocator.close(self._config.full_seconds_max)

    def _memory_makers(self, area_bytes: int, count_max: int) -> dict[int, Make]:
        """Return how to make the locked memory of later saves: slots by address, or areas by number."""
        if self._tiers.is_direct:
            slots = self._tiers.slot_memories()
            return {
                address_of(slot): functools.partial(self._locked_slot, number, slot)
                for number, slot in enumerate(slots)
            }
        return dict.fromkeys(range(1, count_max), functools.partial(locked_buffer, area_bytes))

    def _locked_slot(self, number: int, slot: memoryview) -> torch.Tensor | None:
        # Locking would fault in missing pages in a single thread.
        return slot_tensor(slot, pinned=True) if self._tiers.await_slot(number) else None

    def wait(self, step: int, seconds_max: float | None = None) -> float:
        """With `on_full="wait"`, wait until one more step may be in flight; otherwise return at once. With
        `seconds_max`, wait up to this long regardless of the settings. Return how long training waited; 0 with
        `seconds_max`, when training is over.

        The wait ends when the oldest step is staged or given up (every rank has sent it then, and the stager has room),
        or when another rank has declined `step`. PoolFull: neither came within `full_seconds_max`, or `seconds_max`.
        """
        if seconds_max is None and self._config.on_full == "skip":
            return 0.0
        is_over = seconds_max is not None
        seconds_max = self._config.full_seconds_max if seconds_max is None else seconds_max
        begun, waited_seconds = time.monotonic(), 0.0
        if len(self._areas.in_flight()) >= self._areas.count_max:
            # A rank that asks for another layout meanwhile need not wait as long.
            self._link.send_message(StagerMessage.fits(step))
        try:
            while len(in_flight := self._areas.in_flight()) >= self._areas.count_max:
                oldest = in_flight[0]
                gone = oldest.settled.wait(_LOOK_SECONDS) and oldest.released.wait(_LOOK_SECONDS)
                waited_seconds = time.monotonic() - begun
                if not gone and self._link.decline_reason(step) is not None:
                    break  # another rank has declined the step
                if not gone and waited_seconds > seconds_max:
                    raise PoolFull(
                        DeclineCause.LATE.because(
                            f"{self._describe_wait(oldest, seconds_max)}. Find out why the store is slow, enlarge the "
                            'ring, save less often, or set on_full = "skip"'
                        )
                    )
        finally:
            if is_over:
                waited_seconds = 0.0
            if waited_seconds:
                self._ledger.add_wait(waited_seconds)
        return waited_seconds

    def reserve(self, step: int, record: SaveRecord) -> Reservation:
        """Reserve an area for this step, and the free slots of the tiers. PoolFull: all areas are taken."""
        if self._tiers.is_direct:
            place = self._reserve_slot_area(step, record)
        else:
            area = self._areas.acquire()
            place = None if area is None else Reservation(area, self._reserve_slots(step, record))
        if place is None:
            raise PoolFull(self._busy_reason())
        return place

    def send(self, place: Reservation, transfer: Transfer) -> None:
        """Start the step, which keeps its area until the stager and every tier have read it."""
        tier_write = place.tier_write
        self._areas.send(place.area, transfer, tier_write)
        transfer.record.in_flight = len(self._areas.in_flight())
        if tier_write is not None:
            tier_write.link_released = transfer.released
            self._tiers.keep(tier_write, place.area)

    def release(self, place: Reservation, reason: Reason) -> None:
        """Release the reservation of a step that is not saved. Slots already in use are left to their lanes."""
        if place.tier_write is not None and place.tier_write.area is None:
            self._tiers.drop(place.tier_write, reason)

    def _reserve_slot_area(self, step: int, record: SaveRecord) -> Reservation | None:
        """Reserve a slot of the first tier as the area; None if none of its slots is free."""
        tier_write = self._reserve_slots(step, record) if self._areas.has_room() else None
        if tier_write is None:
            return None
        if tier_write.source_tier < 0:
            self._tiers.drop(tier_write, DeclineCause.BUSY.because("no slot of the first tier is free"))
            return None
        return Reservation(self._areas.slot_area(tier_write.writers[tier_write.source_tier]), tier_write)

    def _reserve_slots(self, step: int, record: SaveRecord) -> TierWrite | None:
        """Reserve free slots. With `on_full="wait"`, wait for slots that a verdict will free soon after the seal."""
        if not self._tiers.tiers:
            return None
        if self._config.on_full == "skip" or not self._tiers.accepts_steps:
            return self._tiers.begin(step, record)
        begun = time.monotonic()
        until = begun + self._config.full_seconds_max
        tier_write = self._tiers.begin(step, record, wait_until=until)
        self._ledger.add_wait(time.monotonic() - begun)
        return tier_write

    def _busy_reason(self) -> Reason:
        """Why there is no staging area for another step now."""
        reading = self._areas.being_read()
        if len(reading) < self._areas.count_max:
            in_flight = len(self._areas.in_flight())
            if self._tiers.accepts_steps and in_flight <= self._areas.count_max:
                return DeclineCause.BUSY.because("no slot of the first local tier is free")
            return DeclineCause.BUSY.because(f"the {in_flight} checkpoints before are not staged yet")
        before = len(reading)
        which = "the checkpoint before is" if before == 1 else f"the {before} checkpoints before are"
        sent = any(not flight.transfer.released.is_set() for flight in reading)
        return DeclineCause.BUSY.because(
            f"{which} still being {'sent' if sent else 'written to local tiers'}"
        )

    def _describe_wait(self, flight: AreaUse, seconds_max: float) -> str:
        before = flight.transfer
        who = f"rank {self._link.job.rank} waited {seconds_max:g} s for step {before.step}"
        if before.released.is_set() and before.settled.is_set():
            return f"{who} to be written to its local tiers"
        who = f"{who} to be staged, and"
        sent = before.frames - before.frames_left
        if before.state is TransferState.SENT:
            return f"{who} has sent all of it: the stager waits for other ranks"
        if before.settled.is_set():
            return f"{who} the transport still holds the memory of what was sent to the stager"
        return f"{who} the stager had room for {sent} of its {before.frames} chunks: the ring is full"
