"""This rank's local tiers, from `save` to the verdicts of rank 0.

    save(7) ─► begin: a slot in each tier ─► keep: writer threads write as frames get ready ─► sealed ─► CommitVotes
               COMPLETE 7, VOID 7 ◄─ CommitVotes: rank 0 has counted the votes of all ranks ─► the tier, the event log

If the first tier is memory, its slot is the staging area (strategy D), and there is no other area.
The stager is not involved: the tiers continue without it or its link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from holdfast.config import TrainerConfig
from holdfast.errors import HoldfastError
from holdfast.image.layout import Layout
from holdfast.image.proof_record import Digest
from holdfast.image.save_record import SaveRecord
from holdfast.image.slices import SliceFrame, frames_of
from holdfast.ring.doubts import DoubtedSteps
from holdfast.telemetry.causes import STATES_DIFFER, DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from trainer_side.background_thread import ThreadDied
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.ranks.ports import CouncilPort
from trainer_side.state import accelerator
from trainer_side.tiers.commit_votes import CommitVotes
from trainer_side.tiers.rank0_preemption import Rank0PreemptionCoordinator, farthest
from trainer_side.tiers.rank0_votes import ROOT, Rank0Votes, ReplicaComparison, VoteLimits
from trainer_side.tiers.slot_proof import StepProof
from trainer_side.tiers.tier import Nearness, Order, SliceWriter, StepVerdict, Tier, TierCounter
from trainer_side.tiers.tier_inventory import TierInventory
from trainer_side.tiers.tier_set import TierSet
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.tiers.tier_writer_threads import TierWriterThreads, WriteOutcome
from trainer_side.transfer import SliceSource

_log = logging.getLogger("holdfast.trainer.tiers")

_LOOK_SECONDS = 2e-3


class TierJob(NamedTuple):
    """The job that writes. `name` is unique, so that two jobs of the same attempt are never mixed."""

    attempt: int
    name: str


class TierReport:
    """Counts and logs the end of each step in each tier, with a warning for each new cause. Any thread."""

    def __init__(self, rank: int, ledger: TierCounter, events: EventLog) -> None:
        self.events = events
        self._rank, self._ledger = rank, ledger
        self._guard = threading.Lock()
        self._warned: set[str] = set()

    def report_kept(self, tier: Tier, outcome: WriteOutcome) -> None:
        write = outcome.write
        self._ledger.record_kept(tier.name)
        self.events.emit(
            "kept",
            {
                "tier": tier.name,
                "nearness": tier.nearness.value,
                "how": tier.write_mode,
                "slice_bytes": sum(frame.nbytes for frame in write.frames),
                "written_bytes": outcome.written_bytes,
                "seconds": outcome.seconds,
                "crc_seconds": write.crc_seconds,
                "direct": write.source_tier == outcome.tier,
            },
            step=write.step,
        )

    def report_skipped(self, tier: Tier, order: Order, reason: Reason, *, counted: bool = True) -> None:
        """Report that a step is not kept. `counted`: False if this rank did not save the step at all."""
        cause, step = reason.cause, order[1]
        fields = {"tier": tier.name, "reason": reason.text, "cause": cause}
        self.events.emit("skipped_tier", fields, step=step)
        if not counted:
            return
        self._ledger.record_skipped(tier.name, cause)
        # An error has been logged where it occurred.
        if self._is_news(f"{tier.name}: {cause}") and cause != "failed":
            _log.warning("rank %d: step %d is not kept in tier %s: %s", self._rank, step, tier.name, reason)

    def report_no_slot(self, tier: Tier, step: int, error: HoldfastError) -> None:
        if self._is_news(str(error)):
            _log.error("rank %d: tier %s gives no slot for step %d: %s", self._rank, tier.name, step, error)

    def report_verdict(self, tier: Tier, verdict: StepVerdict) -> None:
        (_, step), why = verdict.order, verdict.why
        if why.cause == STATES_DIFFER:
            self._ledger.record_refused(step, why)
        if verdict.complete:
            self.events.emit("complete", {"tier": tier.name, "why": why.text}, step=step)
        else:
            self.events.emit("void", {"tier": tier.name, "why": why.text, "cause": why.cause}, step=step)

    def _is_news(self, text: str) -> bool:
        with self._guard:
            news = text not in self._warned
            self._warned.add(text)
        return news


class LocalTiers(TierSet):
    """The tiers of a rank that has some: slots for each step, the threads that write them, and the ranks' votes.

    `tiers`: Opened, in the order of the setting, nearest first. `inventory`: The steps that were found in them.
    `agreed_steps`: The step at which this rank acts on a notice; only in a job without a stager.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        port: CouncilPort,
        config: TrainerConfig,
        *,
        job: TierJob,
        inventory: TierInventory,
        report: TierReport,
        agreed_steps: AgreedSteps | None = None,
    ) -> None:
        assert tiers
        self.tiers, self.names = tuple(tiers), ", ".join(tier.name for tier in tiers)
        self.keeps_proofs = any(tier.keeps_proofs for tier in tiers)
        self.attempt, self._job = job
        self._rank, self._report, self._inventory = port.rank, report, inventory
        self._writers_per_tier, self._call_seconds_max = config.tier_writers, config.tier_seconds_max
        limits = VoteLimits(config.start_seconds_max, config.tier_seconds_max)
        self._prepare_seconds_max = max(limits)
        self._restored: tuple[Order | None, frozenset[str]] = None, frozenset()
        self._layout: Layout | None = None  # the tiers have room for it
        self._frames: tuple[SliceFrame, ...] = ()
        self._tiers_without_room: dict[int, Reason] = {}  # tiers without room for the layout
        self._newest_step = -1
        self._earlier_attempts: tuple[int, ...] = ()
        self._closed = False
        self._marking: list[threading.Thread] = []
        # One call of a tier may take as long as the slowest rank takes for its whole slice.
        seconds_max = limits.seal_seconds_max
        self._threads = tuple(
            TierWriterThreads(number, tier, port.rank, self._on_write_end, call_seconds_max=seconds_max)
            for number, tier in enumerate(tiers)
        )
        self._preemption: Rank0PreemptionCoordinator | None = None
        self._watch: ReplicaComparison | None = None
        rank0 = None
        if port.rank == ROOT:
            if agreed_steps is not None:
                self._preemption = self._preemption_coordinator(port.ranks)
            refuses = config.on_divergence == "refuse"
            self._watch = ReplicaComparison(port.ranks, report.events, refuses=refuses)
            rank0 = Rank0Votes(port.ranks, limits, self._preemption, self._watch)
        self._votes = CommitVotes(
            port,
            limits,
            on_verdict=self._on_verdict,
            on_poll=self._poll_threads,
            agreed_steps=agreed_steps,
            rank0=rank0,
        )
        super().__init__(self._votes)

    def _preemption_coordinator(self, ranks: int) -> Rank0PreemptionCoordinator:
        threads = self._threads[farthest(self.tiers)]
        return Rank0PreemptionCoordinator(
            ranks,
            threads.number,
            f"kept in {threads.tier.name} of every rank's machine",
            attempt=self.attempt,
            fraction=threads.written_fraction,
            events=self._report.events,
        )

    @property
    def accepts_steps(self) -> bool:
        """Whether threads of some tier, and the thread of the votes, are alive."""
        return not isinstance(self._votes.problem, ThreadDied) and any(
            threads.calls.died is None for threads in self._threads
        )

    @property
    def died(self) -> ThreadDied | None:
        problem = self._votes.problem
        if isinstance(problem, ThreadDied):
            return problem
        return next((threads.calls.died for threads in self._threads if threads.calls.died is not None), None)

    @property
    def is_direct(self) -> bool:
        # A device cannot copy straight into a file on persistent memory (DAX): CUDA cannot page-lock it.
        first = self.tiers[0].nearness
        return first is Nearness.MEMORY or (first is Nearness.PM and accelerator.kind() is None)

    @property
    def is_prepared(self) -> bool:
        return self._layout is not None

    @property
    def is_idle(self) -> bool:
        return all(map(self._is_idle_in, self._threads))

    def _is_idle_in(self, threads: TierWriterThreads) -> bool:
        """Whether no work in flight could free a slot of this tier."""
        # The threads are checked twice: a step may move between them and the votes meanwhile.
        return threads.is_idle and not self._votes.undecided and threads.is_idle

    # -- before the first step -----------------------------------------------------------------------------------

    def set_restored(self, order: Order, intact_in: Collection[str] = ()) -> None:
        self._restored = order, frozenset(intact_in)

    def set_attempt(self, attempt: int) -> None:
        if attempt > self.attempt:
            self._earlier_attempts = (*self._earlier_attempts, self.attempt)
            self.attempt = attempt

    def prepare(self, layout: Layout) -> None:
        for threads in self._threads:
            tier = threads.tier
            try:
                self._prepare(threads, layout)
            except HoldfastError as error:
                if self._layout is None:
                    raise
                why = f"it has no room for the new layout: {error}"
                self._tiers_without_room[threads.number] = DeclineCause.FAILED.because(why)
                _log.error("rank %d: tier %s takes nothing more: %s", self._rank, tier.name, error)
                continue
            self._tiers_without_room.pop(threads.number, None)
            threads.ensure_threads(self._writers_per_tier or tier.writers)
            _log.info("rank %d: tier %s: %s", self._rank, tier.name, tier.write_mode)
        self._layout, self._frames = layout, frames_of(layout, self._rank)
        if self._watch is not None:
            self._watch.laid_out(layout)

    def _prepare(self, threads: TierWriterThreads, layout: Layout) -> None:
        tier, is_first = threads.tier, self._layout is None

        def prepare() -> None:
            tier.prepare(layout, self._rank)
            if is_first:
                for verdict in self._inventory.verdicts(threads.number, tier.name, *self._restored):
                    (tier.complete if verdict.complete else tier.void)(*verdict.order)

        # Not on the training thread, which a hanging device must not block.
        what, limit = "making room for slices", self._prepare_seconds_max
        threads.calls.call_with_deadline(what, prepare, limit, lambda _: None)

    def slot_memories(self) -> Sequence[memoryview]:
        return self.tiers[0].memories() if self.is_direct else ()

    def await_slot(self, number: int) -> bool:
        return self.tiers[0].await_slot(number)

    def stop_making_slots(self) -> None:
        for tier in self.tiers:
            tier.stop_making_slots()

    # -- one step ------------------------------------------------------------------------------------------------

    def begin(self, step: int, record: SaveRecord, *, wait_until: float = 0.0) -> TierWrite | None:
        layout = self._layout
        assert layout is not None, "prepare comes first"
        if step <= self._newest_step:
            return None
        self._newest_step = step
        order = (self.attempt, step)
        writers: dict[int, SliceWriter] = {}
        for number, threads in enumerate(self._threads):
            taken = self._refusal(threads) or self._acquire_slot(threads, order, wait_until)
            if isinstance(taken, Reason):
                self._vote_skipped(number, order, taken)  # the step is then void in this tier on every rank
                continue
            writers[number] = taken
            if self._preemption is not None:
                self._preemption.record_begun(number, order, layout.image_bytes)
        if not writers:
            return None
        self.last_begun = order
        direct = self.is_direct and 0 in writers and writers[0].memory is not None
        return TierWrite(
            order,
            self._frames,
            record,
            writers,
            layout_digest=layout.digest,
            job=self._job,
            source_tier=0 if direct else -1,
            compare=partial(self._votes.compare, order, layout.digest),
        )

    def _refusal(self, threads: TierWriterThreads) -> Reason | None:
        """Return why this tier takes no step now; None if it does."""
        if (problem := self._votes.problem) is not None:
            return DeclineCause.LOST.because(problem)
        return self._tiers_without_room.get(threads.number) or threads.calls.hang_reason

    def _acquire_slot(
        self, threads: TierWriterThreads, order: Order, wait_until: float
    ) -> SliceWriter | Reason:
        try:
            while True:
                making = threads.tier.is_making_slots
                hopeless = (not making and self._is_idle_in(threads)) or time.monotonic() >= wait_until
                writer = self._try_begin(threads, order)
                if writer is not None:
                    return writer
                if hopeless:
                    why = "the next slot is still being made" if making else "no slot is free"
                    return DeclineCause.BUSY.because(why)
                if (problem := self._votes.problem) is not None:  # no verdict will free a slot
                    return DeclineCause.LOST.because(problem)
                time.sleep(_LOOK_SECONDS)
        except HoldfastError as error:
            self._report.report_no_slot(threads.tier, order[1], error)
            return DeclineCause.FAILED.because(error)

    def _try_begin(self, threads: TierWriterThreads, order: Order) -> SliceWriter | None:
        tier = threads.tier
        if tier.nearness is not Nearness.PM:
            return tier.begin(*order)

        def abandon_late(writer: SliceWriter | None) -> None:
            if writer is not None:
                writer.abandon()

        # `begin` may flush persistent memory, and the training thread must not hang with the device.
        what, begin = f"a slot for step {order[1]}", partial(tier.begin, *order)
        return threads.calls.call_with_deadline(what, begin, self._call_seconds_max, abandon_late)

    def keep(self, write: TierWrite, area: SliceSource | None) -> None:
        write.area = area
        for number in write.writers:
            self._threads[number].keep(write)

    def drop(self, write: TierWrite, reason: Reason) -> None:
        write.cancel(reason)
        write.link_released.set()
        self.keep(write, None)

    def keep_proof(self, order: Order, digest: Digest) -> None:
        for threads in self._threads:
            if threads.tier.keeps_proofs:
                threads.queue_proof(StepProof(order, digest))

    def skip(self, step: int, reason: Reason) -> None:
        if step > self._newest_step:
            self._newest_step = step
            for number in range(len(self._threads)):
                self._vote_skipped(number, (self.attempt, step), reason, counted=False)

    def release_area(self, write: TierWrite) -> None:
        reason = DeclineCause.HANGS.because("the tier has not released the staging area in time")
        for number in write.writers:
            self._threads[number].give_up(write, reason)

    def _on_write_end(self, outcome: WriteOutcome) -> None:
        """Handle the end of a slice: sealed, or given up. A thread of the tier, or that of the votes."""
        write = outcome.write
        if outcome.reason is not None:
            self._vote_skipped(outcome.tier, write.order, outcome.reason)
            return
        self._report.report_kept(self.tiers[outcome.tier], outcome)
        self._votes.vote_sealed(outcome.tier, write.order, write.layout_digest)

    def _vote_skipped(self, number: int, order: Order, reason: Reason, *, counted: bool = True) -> None:
        """Report that a tier does not keep a step. `counted`: False if this rank did not save the step at all."""
        self._report.report_skipped(self.tiers[number], order, reason, counted=counted)
        # Also for a step that rank 0 has called void: rank 0 remembers it until every rank has voted.
        self._votes.vote_skipped(number, order, reason)

    # -- the thread of the votes ---------------------------------------------------------------------------------

    def _on_verdict(self, verdict: StepVerdict) -> None:
        if verdict.tier >= len(self._threads):
            return
        if verdict.complete:
            self.complete_step = max(self.complete_step, verdict.order[1])
        self._report.report_verdict(self.tiers[verdict.tier], verdict)
        self._threads[verdict.tier].queue_verdict(verdict)

    def _poll_threads(self) -> None:
        for threads in self._threads:
            threads.poll()

    # -- doubts, and the end -------------------------------------------------------------------------------------

    def mark_doubtful(self, doubt: Doubt) -> None:
        # In a thread of its own, because a device may be slow.
        if doubt.steps is not None:
            thread = threading.Thread(target=self._mark, args=(doubt,), daemon=True)
            thread.start()
            self._marking.append(thread)  # after `start`, because `close` joins every thread in the list

    def _mark(self, doubt: Doubt) -> None:
        for tier in self.tiers:
            try:
                for attempt in (*self._earlier_attempts, self.attempt):
                    tier.record_doubt(DoubtedSteps(attempt, doubt))
            except (HoldfastError, OSError) as error:
                _log.error(
                    "rank %d: tier %s cannot record that steps are doubtful, so restore may use them: %s",
                    self._rank,
                    tier.name,
                    error,
                )

    def close(self, seconds_max: float) -> None:
        if self._closed:
            return
        self._closed = True
        self.stop_making_slots()
        for thread in tuple(self._marking):
            thread.join(seconds_max)
        deadline = time.monotonic() + seconds_max
        while not all(threads.is_idle for threads in self._threads) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        self._votes.close(max(0.0, deadline - time.monotonic()))
        for threads in self._threads:
            if threads.close(max(0.1, deadline - time.monotonic())):
                threads.tier.close()
            else:
                _log.error(
                    "rank %d: tier %s %s at close; every slice that is sealed in it stays",
                    self._rank,
                    threads.tier.name,
                    threads.calls.hang_reason or f"was not done after waiting {seconds_max:g} s",
                )
