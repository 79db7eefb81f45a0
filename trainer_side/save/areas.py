"""This rank's staging areas: how many checkpoints it may have in flight (PCcheck, ASPLOS 2025).

    save(7) ─► area 0 ══ being sent ═══════════════►│ released
    save(8)      ─► area 1 ══ being sent ═══════════════►│
    save(9)           declined, or waits: all areas are taken ─► area 0

An area is taken when it is first needed, touched once, and kept until the layout changes. With strategy D an area is a
slot of a local tier: the tier says which one is free, and no other memory is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from holdfast.errors import ConfigError
from holdfast.image.layout import Layout
from holdfast.image.slices import areas_of
from trainer_side.save.staging import Staging
from trainer_side.tiers.tier import SliceWriter
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer

_log = logging.getLogger("holdfast.trainer")


def areas_max(layout: Layout, *, in_flight_max: int, host_bytes_max: int | None) -> int:
    """How many areas each rank may have: the same number on every rank, so that they decline alike.

    Args:
        layout: What they are for.
        in_flight_max: How many checkpoints may be in flight.
        host_bytes_max: Most host memory for one rank; None: no limit.

    Raises:
        ConfigError: Not even one fits.
    """
    if host_bytes_max is None:
        return in_flight_max
    areas = areas_of(layout)
    rank = areas.index(max(areas))
    if areas[rank] > host_bytes_max:
        raise ConfigError(
            f"trainer setting host_bytes_max: expected at least {areas[rank]} bytes, which one staging "
            f"area takes for the slice of rank {rank} of an image of {layout.image_bytes} bytes, got "
            f"{host_bytes_max}; raise it, or train on more than {layout.ranks} ranks, so that each slice is smaller"
        )
    return min(in_flight_max, host_bytes_max // areas[rank])


class _All:
    """Several events as one."""

    def __init__(self, events: Sequence[threading.Event]) -> None:
        self._events = events

    def is_set(self) -> bool:
        return all(event.is_set() for event in self._events)

    def wait(self, seconds_max: float) -> bool:
        """Wait until all are set, or no longer."""
        deadline = time.monotonic() + seconds_max
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in self._events)


class AreaUse:
    """A checkpoint that reads an area: on its way to the stager, into local tiers, or both.

    Attributes:
        transfer: To the stager. `keeping`: into the tiers; None without any.
        released: Nobody reads the area any more.
        settled: It is staged, or not; and sealed in the tiers, or not.
    """

    def __init__(self, transfer: Transfer, keeping: TierWrite | None) -> None:
        self.transfer, self.keeping = transfer, keeping
        kept = [keeping.released] if keeping is not None else []
        self.released, self.settled = _All([transfer.released, *kept]), _All([transfer.settled, *kept])

    @property
    def step(self) -> int:
        return self.transfer.step


class Areas:
    """The areas, and what is made of them. Training thread."""

    def __init__(self) -> None:
        self._make: Callable[[SliceWriter | None], Staging] | None = None
        self._count_max = 0
        self._areas: list[Staging] = []
        self._slots: dict[int, Staging] = {}  # by address
        self._sent_from: dict[Staging, AreaUse] = {}  # the last one of each area
        self._flights: list[AreaUse] = []  # not at an end for this rank, oldest first

    @property
    def count_max(self) -> int:
        return self._count_max

    @property
    def nbytes(self) -> int:
        return sum(area.area_bytes for area in self._areas)

    def renew(
        self, make: Callable[[SliceWriter | None], Staging], count_max: int, *, in_slots: bool = False
    ) -> None:
        """Forget all areas; `make` makes new ones, the first of them now. Nothing may be read from the old ones.

        Args:
            make: Makes an area, in the memory of a slot where it is given one.
            count_max: How many there may be.
            in_slots: None is made now: they are slots of a tier.
        """
        assert not self.being_read(), "an area is still being sent"
        self._make, self._count_max = make, count_max
        self._sent_from.clear()
        self._areas.clear()  # the memory goes back before the new one is taken
        self._slots.clear()
        if not in_slots:
            self._areas.append(make(None))

    def take(self) -> Staging | None:
        """An area that nothing reads; None if all are taken and there may be no more.

        Also None if more steps than there may be areas wait to be staged: sent is sent, but the ring and the store are
        behind, and further steps would only share them.
        """
        if not self.has_room():
            return None
        for area in self._areas:
            if area not in self._sent_from or self._sent_from[area].released.is_set():
                return area
        if self._make is None or len(self._areas) >= self._count_max:
            return None
        try:
            area = self._make(None)
        except (MemoryError, RuntimeError) as error:
            # torch's own for memory; training goes on with what there is
            _log.warning(
                "no memory for one more staging area, %d are in use; lower in_flight_max, or free memory: %s",
                len(self._areas),
                error,
            )
            self._count_max = len(self._areas)
            return None
        self._areas.append(area)
        return area

    def has_room(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self.in_flight()) <= self._count_max

    def take_slot(self, writer: SliceWriter) -> Staging:
        """The area that is this slot of a tier. The tier answers for nobody reading it."""
        assert writer.memory is not None
        assert self._make is not None
        address = torch.frombuffer(writer.memory, dtype=torch.uint8).data_ptr()
        if address not in self._slots:
            self._slots[address] = self._make(writer)
        return self._slots[address]

    def send(self, area: Staging, transfer: Transfer, keeping: TierWrite | None = None) -> None:
        """`transfer` and `keeping` read from `area` until they are released."""
        flight = AreaUse(transfer, keeping)
        self._sent_from[area] = flight
        self._flights = [*self.in_flight(), flight]

    def being_read(self) -> list[AreaUse]:
        """What still reads from an area, oldest first."""
        return [flight for flight in self._flights if not flight.released.is_set()]

    def in_flight(self) -> list[AreaUse]:
        """What reads from an area, or is not staged (and not given up), oldest first."""
        return [
            flight for flight in self._flights if not (flight.released.is_set() and flight.settled.is_set())
        ]
