"""This rank's local tiers at work.

    save(7) ─► StepSlots: a slot in each tier ─► Keeping ─► lanes write as frames get ready ─► sealed ─► Outcomes
                                                             council: COMPLETE 7 ─► Outcomes ─► the tier of each lane
    where the first tier is memory, its slot is the staging area (strategy D), and there is no other area

The store as a tier rests while there is a stager, which brings the same bytes there.
The stager has no part in this: a lost stager, or a lost link to it, stops nothing here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.image.layout import Layout
from holdfast.ring.doubts import DoubtedSteps
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.wire.doubt import Doubt
from trainer_side.background_thread import ThreadDied
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.ranks.ports import CouncilPort
from trainer_side.state import accelerator
from trainer_side.tiers.coordinator import CouncilLimits
from trainer_side.tiers.council import Council
from trainer_side.tiers.found_steps import FoundSteps
from trainer_side.tiers.keeping import Keeping
from trainer_side.tiers.kept_slices import Inventory
from trainer_side.tiers.outcomes import Outcomes
from trainer_side.tiers.step_slots import StepSlots, TierJob
from trainer_side.tiers.tally import Order
from trainer_side.tiers.tier import Nearness, Tier
from trainer_side.tiers.tier_report import TierReport
from trainer_side.tiers.tier_room import TierRoom
from trainer_side.transfer import SliceSource

_log = logging.getLogger("holdfast.trainer.tiers")

_IN_MEMORY = frozenset({Nearness.MEMORY, Nearness.PM})


class Keeper:
    """The tiers of a rank that has some: a `trainer_side.tiers.tier_set.TierSet`.

    Args:
        tiers: The tiers of this rank as they are set, nearest first; opened.
        port: To the other ranks.
        config: Settings.
        job: This job.
        inventory: The steps that were found in the tiers.
        report: Told what becomes of each step.
        appointments: At which step this rank acts on a notice; only in a job without a stager.

    Attributes:
        tiers: As given.
        attempt: Of later slices.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        port: CouncilPort,
        config: TrainerConfig,
        *,
        job: TierJob,
        inventory: Inventory,
        report: TierReport,
        appointments: AgreedSteps | None = None,
    ) -> None:
        assert tiers
        self.tiers, self.attempt, self._rank = tuple(tiers), job.attempt, port.rank
        limits = CouncilLimits(config.start_seconds_max, config.tier_seconds_max)
        self._outcomes = Outcomes(
            tiers,
            port,
            limits,
            report,
            attempt=job.attempt,
            refuses=config.on_divergence == "refuse",
            appointments=appointments,
        )
        self._found = FoundSteps(inventory)
        self._room = TierRoom(
            port.rank, self._outcomes.lanes, self._found, writers=config.tier_writers, seconds_max=max(limits)
        )
        self._slots = StepSlots(
            job,
            self._room,
            self._outcomes,
            report,
            call_seconds_max=config.tier_seconds_max,
            is_direct=lambda: self.is_direct,
        )
        self._earlier_attempts: tuple[int, ...] = ()
        self._closed = False
        self._marking: list[threading.Thread] = []

    @property
    def names(self) -> str:
        return ", ".join(tier.name for tier in self.tiers)

    @property
    def council(self) -> Council:
        return self._outcomes.council

    @property
    def takes_steps(self) -> bool:
        return self._outcomes.takes_steps

    @property
    def died(self) -> ThreadDied | None:
        return self._outcomes.died

    @property
    def is_direct(self) -> bool:
        # A device cannot copy straight into a file on persistent memory (DAX): CUDA refuses to lock it.
        first = self.tiers[0].nearness
        return first is Nearness.MEMORY or (first is Nearness.PM and accelerator.kind() is None)

    @property
    def is_prepared(self) -> bool:
        return self._room.layout is not None

    @property
    def complete_step(self) -> int:
        return self._outcomes.complete_step

    @property
    def is_idle(self) -> bool:
        return self._outcomes.is_idle

    def restored(self, order: Order, whole_in: Collection[str] = ()) -> None:
        """The state is that of this checkpoint; newer steps that were found are dropped.

        Args:
            order: The checkpoint.
            whole_in: The places where all of it lies: tiers by name, or the store. Another tier, in which a slice of it
                is damaged or gone, goes back to the newest older step that it has whole. Empty: the state was put
                together from several tiers, so each keeps its part until there is a newer step.
        """
        self._found.restored(order, whole_in)

    def follow(self, attempt: int) -> None:
        if attempt > self.attempt:
            self._earlier_attempts = (*self._earlier_attempts, self.attempt)
            self.attempt = self._slots.attempt = attempt

    def prepare(self, layout: Layout) -> None:
        """See `TierRoom.prepare`."""
        self._room.prepare(layout)
        self._outcomes.laid_out(layout)

    def slot_memories(self) -> Sequence[memoryview]:
        return self.tiers[0].memories() if self.is_direct else ()

    def begin(
        self, step: int, record: Mapping[str, Any], *, stager_lives: bool = False, wait_until: float = 0.0
    ) -> Keeping | None:
        """Take a slot in each tier; None if none has one. Follow it by `keep` or `drop`.

        Args:
            step: The step.
            record: Its times and bytes.
            stager_lives: Whether the store as a tier rests.
            wait_until: How long (`time.monotonic`) to wait for a slot that may still become free.
        """
        return self._slots.begin(step, record, stager_lives=stager_lives, wait_until=wait_until)

    def keep(self, keeping: Keeping, area: SliceSource | None) -> None:
        keeping.area = area
        for number in keeping.writers:
            self._outcomes.lanes[number].keep(keeping)

    def drop(self, keeping: Keeping, reason: Reason) -> None:
        keeping.cancel(reason)
        keeping.link_released.set()
        self.keep(keeping, None)

    def hurry(self, seconds_max: float) -> None:
        self._outcomes.council.hurry(seconds_max)

    def skip(self, step: int, reason: Reason) -> None:
        self._slots.skip(step, reason)

    def doubt(self, doubt: Doubt) -> None:
        """Mark it in each tier of this rank, in a thread of its own: a device may take its time."""
        if doubt.steps is not None:
            thread = threading.Thread(target=self._mark, args=(doubt,), daemon=True)
            thread.start()
            self._marking.append(thread)  # only now: `close` joins what it finds there

    def _mark(self, doubt: Doubt) -> None:
        """In the store only the rank whose doubt it is does so: one mark is enough there."""
        for tier in self.tiers:
            if tier.nearness is Nearness.STORE and doubt.rank != self._rank:
                continue
            try:
                for attempt in (*self._earlier_attempts, self.attempt):
                    tier.doubt(DoubtedSteps(attempt, doubt))
            except (HoldfastError, OSError) as error:
                _log.error(
                    "rank %d: the tier %s does not take the mark that steps are doubtful, and restore may use them: %s",
                    self._rank,
                    tier.name,
                    error,
                )

    def let_go(self, keeping: Keeping) -> None:
        for number in keeping.writers:
            self._outcomes.lanes[number].let_go(
                keeping, DeclineCause.HANGS.because("the tier has not let go of what it was given")
            )

    def close(self, seconds_max: float) -> None:
        if not self._closed:
            self._closed = True
            for thread in tuple(self._marking):
                thread.join(seconds_max)
            self._outcomes.close(seconds_max)


def open_tiers(config: TrainerConfig, run_url: str) -> list[Tier]:
    """The tiers that are set, nearest first as they are given.

    Raises:
        ConfigError: One of them is not a tier.
    """
    from trainer_side.tiers.open_tiers import open_tier  # the kinds of tiers, with all that they import

    found: list[Tier] = []
    for spec in config.tiers:
        # In memory a slot costs memory: one, and one for each step in flight. Elsewhere the device is measured.
        in_memory = spec.partition(":")[0] in _IN_MEMORY
        slots = config.tier_slots or (config.in_flight_max + 1 if in_memory else None)
        try:
            found.append(open_tier(spec, run_url, slots=slots, writers=config.tier_writers))
        except ConfigError as error:
            raise ConfigError(f"trainer setting tiers: {error}") from error
    return found
