"""One step in flight to this rank's tiers: the area that they read, and the progress of each tier.

    area (being filled) ── is_ready(frame) ─► frame_crc, once for all tiers ─► each tier writes it ─► … ─► seal
                                                                              └── or gives it up

The tiers read the area until `released` is set: then each of them has sealed its slice, or given it up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.crc import crc32
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import SliceFrame
from holdfast.telemetry.causes import Reason
from trainer_side.tiers.tier import Order, SliceWriter
from trainer_side.transfer import SliceSource


@dataclass(eq=False)
class TierWrite:
    """One step in the tiers. Made by `LocalTiers.begin`."""

    order: Order
    frames: tuple[SliceFrame, ...]
    record: SaveRecord
    writers: dict[int, SliceWriter]  # by tier
    layout_digest: str = ""
    job: str = ""
    source_tier: int = -1  # the tier whose slot is the area; -1: no slot is
    # Holds the frames; None before `LocalTiers.keep`, and after the last tier has read it.
    area: SliceSource | None = None
    # Set when the link has finished reading the area, or if there is no link.
    link_released: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)  # every tier has finished reading it
    # Asks rank 0 to compare this rank's fingerprints with the other ranks'.
    compare: Callable[[str], None] = lambda _fingerprints: None
    # Wake the threads that write the step.
    wake_callbacks: list[Callable[[], None]] = field(default_factory=list)
    cancel_reason: Reason | None = None  # why its bytes will never be complete
    kept_in: set[int] = field(default_factory=set)  # tiers that have sealed the step
    lost_in: dict[int, Reason] = field(default_factory=dict)  # tiers that gave the step up
    crc_seconds: float = 0.0
    _crcs: dict[int, int] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _frame_guards: dict[int, threading.Lock] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.order[1]

    @property
    def is_wanted(self) -> bool:
        """Whether the step is worth copying: some tier may still seal it."""
        return self.cancel_reason is None and not self.released.is_set()

    def is_read_by_others(self, tier: int) -> bool:
        """Whether the link, or another tier than `tier`, may still read the area."""
        with self._guard:
            others_over = self.kept_in | self.lost_in.keys() | {tier} >= self.writers.keys()
        return not (others_over and self.link_released.is_set())

    def cancel(self, reason: Reason) -> None:
        """Make every tier give the step up: its bytes will never be complete. Any thread."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
            self.nudge()

    def nudge(self) -> None:
        """Wake the threads that write the step: a frame is ready. Any thread."""
        for look in self.wake_callbacks:
            look()

    def frame_crc(self, frame: int) -> int:
        """Return the CRC-32 of a frame that is ready. The first thread computes it; the others wait."""
        with self._guard:
            guard = self._frame_guards.setdefault(frame, threading.Lock())
        with guard:
            if frame not in self._crcs:
                assert self.area is not None
                begun, place = time.perf_counter(), self.frames[frame]
                self._crcs[frame] = crc32(self.area.view(place.offset, place.nbytes))
                with self._guard:
                    self.crc_seconds += time.perf_counter() - begun
            return self._crcs[frame]

    def finish_in(self, tier: int, reason: Reason | None = None) -> None:
        """Note that a tier has finished reading the area: its slice is sealed, or given up for this reason."""
        with self._guard:
            if reason is not None:
                self.lost_in[tier] = reason
            else:
                self.kept_in.add(tier)
            if self.kept_in | self.lost_in.keys() >= self.writers.keys():
                self._crcs.clear()
                self._frame_guards.clear()
                self.area = None  # free the staging area
                self.released.set()


class SlotWrite:
    """One tier's part in a `TierWrite`. Guarded by the lock of the tier's threads."""

    def __init__(self, write: TierWrite, writer: SliceWriter) -> None:
        self.write, self.writer = write, writer
        self.unwritten = list(range(len(write.frames)))  # frames that no thread has taken yet, in their order
        self.busy = 0  # threads that write frames
        self.given_up: Reason | None = None  # why the slice is not sealed; None while it may be
        self.sealing = False  # a thread seals the slice, or gives it up
        self.orphaned = False  # the threads are done with it, but a call of the tier may still run
        self.begun_at = 0.0  # when its first frame was ready
        self.written_bytes = 0
