"""Chooses the slot of the next slice, and the slices to keep: a pure core, without bytes and without a clock.

    MISSING ─ mark_made ─► FREE ─ begin ─► WRITING ─ mark_sealed ─► SEALED ─ begin of a later step ─► WRITING …
                            ▲                │                        │
                            └─── release ────┘                  kept while it is pending, or the newest that is complete

The order of steps is that of PCcheck (ASPLOS 2025, listing 1): a counter, here `(attempt, step)`. PCcheck frees the
older slot as soon as this process has written the newer checkpoint. Here every rank must first have the newer step,
because one rank's slice alone restores nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from trainer_side.tiers.tier import Order

SLOTS_MIN = 2  # one complete step, and one in flight


class SlotEntry(NamedTuple):
    """The slice in a sealed slot. `complete`: every rank is known to have sealed that step."""

    order: Order
    complete: bool = False


class _State(Enum):
    MISSING = auto()  # has no memory yet
    FREE = auto()
    WRITING = auto()
    SEALED = auto()


@dataclass
class _Slot:
    state: _State = _State.FREE
    order: Order = (0, 0)
    complete: bool = False
    found: bool = False  # sealed by an earlier process; whether all ranks did so may never be known
    void: bool = False


class FileSlots:
    """The slots of one slot file. Not thread-safe.

    `found`: slices that an earlier process has sealed, by slot. `missing`: slots that wait for `mark_made`; none of
    `found`.
    """

    def __init__(
        self, count: int, found: Mapping[int, SlotEntry] | None = None, missing: Collection[int] = ()
    ) -> None:
        assert count >= SLOTS_MIN, "the newest complete step needs one, the next one another"
        self._slots = [_Slot(_State.MISSING if slot in missing else _State.FREE) for slot in range(count)]
        self._complete: Order = (0, 0)  # the newest complete step; its slice may have left this file
        for slot, entry in (found or {}).items():
            self._slots[slot] = _Slot(_State.SEALED, entry.order, entry.complete, found=True)
            if entry.complete:
                self._complete = max(self._complete, entry.order)

    def mark_made(self, number: int) -> None:
        assert self._slots[number].state is _State.MISSING, f"slot {number} was there"
        self._slots[number] = _Slot()

    def begin(self, order: Order) -> int | None:
        """Take a slot for this step; None if all slots must stay, or a newer step is complete.

        A free slot comes first, then that of a void slice, then that of the oldest slice that need not stay.
        """
        if order <= self._complete or any(
            slot.order == order and slot.state is not _State.FREE and not slot.void for slot in self._slots
        ):
            return None
        protected = self._protected()
        choices = [
            (slot.state is _State.SEALED, not slot.void, slot.order, number)
            for number, slot in enumerate(self._slots)
            if slot.state is _State.FREE or (slot.state is _State.SEALED and number not in protected)
        ]
        if not choices:
            return None
        number = min(choices)[-1]
        self._slots[number] = _Slot(_State.WRITING, order)
        return number

    def is_wanted(self, number: int) -> bool:
        """Whether the slice being written to this slot is useful: not void, and no newer step is complete."""
        slot = self._slots[number]
        return slot.state is _State.WRITING and not slot.void and slot.order > self._complete

    def mark_sealed(self, number: int) -> None:
        """Note that the slice being written to this slot is now whole."""
        slot = self._slots[number]
        assert slot.state is _State.WRITING, f"slot {number} is not being written"
        slot.state = _State.SEALED

    def release(self, number: int) -> None:
        """Give up the slice being written to this slot."""
        assert self._slots[number].state is _State.WRITING, f"slot {number} is not being written"
        self._slots[number] = _Slot()

    def complete(self, order: Order) -> bool:
        """Note that every rank has sealed this step; return whether that is news about a slice sealed here."""
        self._complete = max(self._complete, order)
        here = False
        for slot in self._slots:
            if slot.state is _State.SEALED and slot.order == order and not slot.complete:
                slot.complete, slot.void, here = True, False, True
        return here

    def void(self, order: Order) -> None:
        """Note that some rank will never seal this step, or has lost it since an earlier process called it complete."""
        for slot in self._slots:
            if slot.state is not _State.FREE and slot.order == order and (slot.found or not slot.complete):
                slot.void = True

    def table(self) -> list[SlotEntry | None]:
        """Return the slices in all slots, for the commit record; void slices are left out."""
        return [
            SlotEntry(slot.order, slot.complete) if slot.state is _State.SEALED and not slot.void else None
            for slot in self._slots
        ]

    def _protected(self) -> set[int]:
        """Return the sealed slices that must stay.

        These are the newest complete slice, and each slice of this process that may yet become complete. If no slice is
        known to be complete, the newest found one stays instead: after a kill it may be the complete one. Found slices
        never occupy all slots for good.
        """
        sealed = [
            (slot.order, number)
            for number, slot in enumerate(self._slots)
            if slot.state is _State.SEALED and not slot.void
        ]
        complete = [(order, number) for order, number in sealed if self._slots[number].complete]
        found = [(order, number) for order, number in sealed if self._slots[number].found]
        newest = max(complete or found, default=None)
        pending = {
            number
            for order, number in sealed
            if not self._slots[number].found and not self._slots[number].complete and order > self._complete
        }
        return pending | ({newest[1]} if newest is not None else set())
