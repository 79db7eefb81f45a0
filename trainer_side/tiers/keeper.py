"""This rank's local tiers at work: slots for each step, lanes that fill them, the council's verdicts.

    save(7) ─► begin: a slot in each tier that has one ─► Keeping ─► keep: lanes write as frames get ready ─► sealed
                                                                             council: COMPLETE 7 ─► every lane's tier
    the first tier is memory: its slot is the staging area itself (strategy D), and there is no other

A tier without a free slot skips the step, and says so to the council: the step is then void in that tier on every rank.
The store as a tier rests while there is a stager, which brings the same bytes there.
The stager has no part in this: what happens to it, or to the link, stops nothing here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceFrame, frames_of
from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from trainer_side.notice.appointments import Appointments
from trainer_side.tiers.chair import Chair, farthest
from trainer_side.tiers.coordinator import CouncilLimits
from trainer_side.tiers.council import Council
from trainer_side.tiers.council_thread import CouncilPort
from trainer_side.tiers.keeping import Keeping
from trainer_side.tiers.kept_slices import Inventory
from trainer_side.tiers.lane import Lane, PartOutcome
from trainer_side.tiers.tally import Order, StepVerdict
from trainer_side.tiers.tier import KeptSteps, Nearness, SliceWriter, Tier
from trainer_side.transfer import SliceSource

_log = logging.getLogger("holdfast.trainer.tiers")

_LOOK_SECONDS = 2e-3
_IN_MEMORY = frozenset({Nearness.MEMORY, Nearness.PM})


class Keeper:
    """See the module. Its methods belong to the training thread unless they say otherwise.

    Args:
        tiers: Of this rank, as they are set, nearest first; opened.
        port: To the other ranks.
        rank: This rank, of `ranks`.
        attempt: Of this job. `job`: its name, so that two of the same attempt are never mixed.
        inventory: What was found in them.
        appointments: In a job without a stager: at which step this rank acts on a notice.

    Attributes:
        tiers: As given.
        attempt: As given.
        council: Agrees with the other ranks.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        port: CouncilPort,
        config: TrainerConfig,
        *,
        rank: int,
        ranks: int,
        attempt: int,
        job: str,
        inventory: Inventory,
        ledger: KeptSteps,
        events: EventLog,
        appointments: Appointments | None = None,
    ) -> None:
        assert tiers
        self.tiers, self.attempt = tuple(tiers), attempt
        self._job = job
        self._rank, self._inventory, self._ledger, self._events = rank, inventory, ledger, events
        self._restored: Order | None = None
        self._whole_in: frozenset[str] = frozenset()
        self._layout: Layout | None = None
        self._frames: tuple[SliceFrame, ...] = ()
        self._newest_step = -1
        self._complete_step = -1
        self._out: dict[int, Reason] = {}  # tiers that take nothing, and why
        self._closed = False
        self._warned: set[str] = set()
        self._guard = threading.Lock()
        self._writers = config.tier_writers
        self._call_seconds_max = config.tier_seconds_max
        self._prepare_seconds_max = max(config.start_seconds_max, config.tier_seconds_max)
        self._lanes = [
            Lane(number, tier, rank, self._over, call_seconds_max=config.tier_seconds_max)
            for number, tier in enumerate(tiers)
        ]
        self._chair = self._take_chair(ranks) if appointments is not None and rank == 0 else None
        self.council = Council(
            port,
            CouncilLimits(config.start_seconds_max, config.tier_seconds_max),
            on_verdict=self._judge,
            on_turn=self._look,
            appointments=appointments,
            chair=self._chair,
        )

    def _take_chair(self, ranks: int) -> Chair:
        number = farthest(self.tiers)
        name, is_store = self.tiers[number].name, self.tiers[number].nearness is Nearness.STORE
        return Chair(
            ranks,
            number,
            "kept in the store" if is_store else f"kept in {name} of every rank's machine",
            attempt=self.attempt,
            fraction=self._lanes[number].fraction,
            events=self._events,
        )

    @property
    def names(self) -> str:
        """The tiers, for people."""
        return ", ".join(tier.name for tier in self.tiers)

    @property
    def takes_steps(self) -> bool:
        """Always: a step that the stager does not take can be kept here."""
        return True

    @property
    def is_direct(self) -> bool:
        """Whether slots of the first tier are the staging areas."""
        return self.tiers[0].nearness in _IN_MEMORY

    @property
    def is_prepared(self) -> bool:
        """There is room for slices of some layout."""
        return self._layout is not None

    @property
    def complete_step(self) -> int:
        """Newest step of this job that every rank has sealed in some tier; -1 before the first. Any thread."""
        return self._complete_step

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way into a tier, and all that is sealed has its verdict. Any thread."""
        return all(self._is_idle_in(number) for number in range(len(self._lanes)))

    def restored(self, order: Order, whole_in: Collection[str] = ()) -> None:
        """The state is that of this checkpoint: newer ones that were found are of no more use.

        Args:
            order: Which one.
            whole_in: Where all of it lies: tiers by name, or the store. Another tier, in which a slice of it is damaged
                or gone, goes back to the newest older step that it has whole. Empty: it was put together from what
                several tiers have, so each keeps its part until there is a newer one.
        """
        self._restored, self._whole_in = order, frozenset(whole_in)

    def prepare(self, layout: Layout) -> None:
        """Make room for slices of this layout. No slice is on its way.

        A tier that refuses a later layout than the first one is left out from then on: that is said, and no reason to
        end a training.

        Raises:
            ConfigError: A tier is too small for the first layout, not ours, or in use.
            StoreError: A device refused.
        """
        for number, tier in enumerate(self.tiers):
            try:
                self._prepare(number, tier, layout)
            except HoldfastError as error:
                if self._layout is None:
                    raise
                self._out[number] = DeclineCause.FAILED.because(f"it has no room for the new layout: {error}")
                _log.error("rank %d: tier %s TAKES NOTHING MORE: %s", self._rank, tier.name, error)
                continue
            self._out.pop(number, None)
            self._lanes[number].staff(self._writers or tier.writers)
            _log.info("rank %d: tier %s: %s", self._rank, tier.name, tier.how)
        self._layout, self._frames = layout, frames_of(layout, self._rank)

    def _prepare(self, number: int, tier: Tier, layout: Layout) -> None:
        """Not in the training thread: a device that hangs must not hold it."""

        def prepare() -> None:
            tier.prepare(layout, self._rank)
            if self._layout is None:
                self._tell_what_was_found(number, tier)

        limit = self._prepare_seconds_max
        self._lanes[number].ask("making room for slices", prepare, seconds_max=limit, late=lambda _: None)

    def begin(
        self, step: int, record: Mapping[str, Any], *, stager_lives: bool = False, wait_until: float = 0.0
    ) -> Keeping | None:
        """Take a slot in each tier; None if none has one. Follow it by `keep` or `drop`.

        Args:
            step: The step.
            record: Its times and bytes.
            stager_lives: Then the store as a tier rests.
            wait_until: So long (`time.monotonic`) a slot is waited for where one can still become free.
        """
        assert self._layout is not None, "prepare comes first"
        if step <= self._newest_step:
            return None
        self._newest_step = step
        order = (self.attempt, step)
        writers: dict[int, SliceWriter] = {}
        for number, tier in enumerate(self.tiers):
            if self.council.problem is not None:
                reason = DeclineCause.LOST.because(self.council.problem)
            elif number in self._out:
                reason = self._out[number]
            elif hangs := self._lanes[number].hangs:
                reason = hangs
            elif stager_lives and tier.nearness is Nearness.STORE:
                reason = DeclineCause.RESTS.because("the stager brings it there")
            else:
                try:
                    writer = self._slot(number, order, wait_until)
                except HoldfastError as error:
                    writer, reason = None, DeclineCause.FAILED.because(error)
                    self._say_failed(tier, step, error)
                else:
                    reason = DeclineCause.BUSY.because("no slot is free")
                if writer is not None:
                    writers[number] = writer
                    if self._chair is not None:
                        self._chair.began(number, order, self._layout.image_bytes)
                    continue
            self._skipped(number, order, reason)
        if not writers:
            return None
        direct = 0 in writers and writers[0].memory is not None
        return Keeping(
            order, self._frames, record, writers, job=self._job, source_is_slot=0 if direct else -1
        )

    def _slot(self, number: int, order: Order, wait_until: float) -> SliceWriter | None:
        while True:
            hopeless = self._is_idle_in(number) or time.monotonic() >= wait_until
            writer = self._begin(number, order)
            if writer is not None or hopeless:
                return writer
            time.sleep(_LOOK_SECONDS)

    def _begin(self, number: int, order: Order) -> SliceWriter | None:
        """Where it may cost a flush it is not made in the training thread: that one must not hang with the device."""
        tier = self.tiers[number]
        if tier.nearness is not Nearness.PM:
            return tier.begin(*order)

        def give_back(writer: SliceWriter | None) -> None:
            if writer is not None:
                writer.abandon()

        what, limit = f"a slot for step {order[1]}", self._call_seconds_max
        return self._lanes[number].ask(what, lambda: tier.begin(*order), seconds_max=limit, late=give_back)

    def _is_idle_in(self, number: int) -> bool:
        """No slot of this tier will become free by itself.

        The lane is asked twice: what it had in hand before the council was asked may since have become the council's,
        and what the council had, the lane's.
        """
        lane = self._lanes[number]
        return lane.idle and not self.council.undecided and lane.idle

    def keep(self, keeping: Keeping, area: SliceSource | None) -> None:
        """Write it, as its frames get ready in `area`."""
        keeping.area = area
        for number in keeping.writers:
            self._lanes[number].keep(keeping)

    def drop(self, keeping: Keeping, reason: Reason) -> None:
        """Give back the slots of a step that is not copied after all."""
        keeping.cancel(reason)
        keeping.link_released.set()
        self.keep(keeping, None)

    def skip(self, step: int, reason: Reason) -> None:
        """This rank takes no checkpoint of `step`; the others need not wait for it."""
        if step > self._newest_step:
            self._newest_step = step
            for number in range(len(self.tiers)):
                self._skipped(number, (self.attempt, step), reason, counted=False)

    def let_go(self, keeping: Keeping) -> None:
        """Nothing may read its area any more, whatever a tier still does with it."""
        for number in keeping.writers:
            self._lanes[number].let_go(
                keeping, DeclineCause.HANGS.because("the tier has not let go of what it was given")
            )

    def _look(self) -> None:
        for lane in self._lanes:
            lane.look()

    def close(self, seconds_max: float) -> None:
        """Wait until what is on its way is sealed and judged, then let go of the tiers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + seconds_max
        while not all(lane.idle for lane in self._lanes) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        self.council.close(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes:
            if lane.close(max(0.1, deadline - time.monotonic())):
                lane.tier.close()
            else:
                _log.error(
                    "rank %d: tier %s %s at close; what is sealed in it stays",
                    self._rank,
                    lane.tier.name,
                    lane.hangs or f"was not done after waiting {seconds_max:g} s",
                )

    # -- what lanes and council tell -----------------------------------------------------------------------------

    def _over(self, outcome: PartOutcome) -> None:
        """A lane is done with a step."""
        keeping, tier = outcome.keeping, self.tiers[outcome.tier]
        if outcome.reason is not None:
            self._skipped(outcome.tier, keeping.order, outcome.reason)
            return
        assert self._layout is not None
        self._ledger.kept(tier.name)
        self._events.emit(
            "kept",
            {
                "tier": tier.name,
                "nearness": tier.nearness.value,
                "how": tier.how,
                "slice_bytes": sum(frame.nbytes for frame in keeping.frames),
                "written_bytes": outcome.written_bytes,
                "seconds": outcome.seconds,
                "crc_seconds": keeping.sum_seconds,
                "direct": keeping.source_is_slot == outcome.tier,
            },
            step=keeping.step,
        )
        self.council.sealed(outcome.tier, keeping.order, self._layout.digest)

    def _skipped(self, number: int, order: Order, reason: Reason, *, counted: bool = True) -> None:
        name, cause = self.tiers[number].name, reason.cause
        if cause != DeclineCause.RESTS:
            fields = {"tier": name, "reason": reason.text, "cause": cause}
            self._events.emit("skipped_tier", fields, step=order[1])
        if counted and cause != DeclineCause.RESTS:
            self._ledger.skipped(name, cause)
            with self._guard:
                news = (
                    f"{name}: {cause}" not in self._warned and cause != DeclineCause.FAILED
                )  # that is said already
                self._warned.add(f"{name}: {cause}")
            if news:
                _log.warning(
                    "rank %d: step %d is not kept in tier %s: %s", self._rank, order[1], name, reason
                )
        if cause != DeclineCause.VOID:
            self.council.skipped(number, order, reason.text)

    def _say_failed(self, tier: Tier, step: int, error: HoldfastError) -> None:
        with self._guard:
            news = str(error) not in self._warned
            self._warned.add(str(error))
        if news:
            _log.error("rank %d: tier %s gives no slot for step %d: %s", self._rank, tier.name, step, error)

    def _judge(self, verdict: StepVerdict) -> None:
        if verdict.tier >= len(self._lanes):
            return
        if verdict.complete:
            self._complete_step = max(self._complete_step, verdict.order[1])
        if f": {DeclineCause.RESTS}: " not in verdict.why:
            self._events.emit(
                "complete" if verdict.complete else "void",
                {"tier": self.tiers[verdict.tier].name, "why": verdict.why},
                step=verdict.order[1],
            )
        self._lanes[verdict.tier].judge(verdict)

    def _tell_what_was_found(self, number: int, tier: Tier) -> None:
        """So that the newest step that all ranks have whole is not overwritten before there is a newer one.

        That one is said first, and what is newer and of no use after it: who is killed in between finds all as it was.
        """
        complete, partial = self._inventory.complete[number], self._inventory.partial[number]
        limit = self._restored
        damaged = bool(self._whole_in) and tier.name not in self._whole_in  # here, and whole elsewhere
        usable = [
            order for order in complete if limit is None or order < limit or (order == limit and not damaged)
        ]
        if usable:
            tier.complete(*usable[0])
        if limit is None:
            return
        for order in (*complete, *partial):
            # A damaged one has its seals; one that a life before has given up lacks those that were overwritten.
            is_behind = order > usable[0] if usable else order == limit and order in complete
            if order > limit or (damaged and is_behind):
                tier.void(*order)


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
