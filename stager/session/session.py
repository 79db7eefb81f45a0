"""The stager's view of all checkpoints in flight: events in, actions out. No MPI, no clock, no threads.

                                                ┌── every chunk full, all DONE ──────────┐
    (first offer)        all offers     credits │ flusher began     every chunk full,    ▼
         │   ┌──────────┐ same digest ┌─────────┴┐  part size ┌───────────┐ all DONE ┌────────┐  durable
         └──►│ OFFERING ├────────────►│ PREPARED ├───────────►│ RECEIVING ├─────────►│ STAGED ├─────────► gone
             └────┬─────┘             └────┬─────┘            └─────┬─────┘          └───┬────┘
                  └──── decline, failure, rank lost, deadline ──────┴─ ENDED ◄───────────┘ failed
                                                                       └─ forgotten when its last credit is settled

The same table, event by event, is in docs/wire.md. `admission` decides which offers are accepted, `ring_slots` which
chunks get a slot and how long they keep it; this file decides the transitions between phases. Every wait has a
deadline, and its message names who waited for whom. A checkpoint that has arrived completely is staged even if the
flusher has not begun to write it: the ring has the bytes, so a store that is down does not matter. Only an image larger
than the ring needs `began`. The death of a flusher ends no checkpoint: credits are granted and chunks arrive while
slots are free. The next flusher gets the list of `known` and continues.

Each of several stagers has a session for its share of the chunks, and *staged* means that share. A staged share is
useless if another share fails: the ranks then decline the step, and it ends here although it is staged. After the loss
of a stager, the next process finds its steps in the ring: it reports the staged ones, and the ranks offer or abort the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, KeysView, Mapping
from typing import Any

from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.image.layout import Layout
from holdfast.image.replicas import OnDivergence, ReplicaComparer
from holdfast.image.save_record import SaveRecord
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.notices.should_save import InFlight
from holdfast.wire.frames import Kind
from holdfast.wire.layout_round import pickle_reserve_bytes
from stager.session.admission import Admission
from stager.session.checkpoint import Checkpoint, Phase
from stager.session.ring_slots import RingSlots
from stager.session.session_messages import (
    Abort,
    Action,
    Began,
    BeginReceiving,
    Decline,
    Diverged,
    Done,
    Durable,
    Event,
    Failed,
    FlusherLost,
    FlusherReplaced,
    KnownCheckpoint,
    MarkStaged,
    NewLayout,
    Offer,
    RankBack,
    RankLost,
    RankSilent,
    Received,
    Returned,
    SendMessage,
    Sent,
    SlotsAdded,
    SlotsFreed,
    Tick,
)


class Session:
    """All checkpoints of one stager. Not thread-safe; every event enters by `handle`.

    Args:
        free_slots: The free slots of the ring, in the order in which to fill them.
        flusher_slots: Slots that still hold chunks of an earlier job; the flusher will free them.
        offer_seconds_max: Deadline for the last rank's offer, from the first.
        chunk_seconds_max: Deadline for a granted chunk, and for a checkpoint that waits for room in the ring.
        share: Returns the chunks of an image that this stager receives; None for the only stager, which receives all.
    """

    def __init__(
        self,
        *,
        ranks: int,
        free_slots: Iterable[int],
        flusher_slots: Iterable[int] = (),
        offer_seconds_max: float,
        chunk_seconds_max: float,
        on_divergence: OnDivergence = "warn",
        share: Callable[[Layout], range] | None = None,
    ) -> None:
        self.ranks, self._share = ranks, share
        self._on_divergence, self._replicas = on_divergence, ReplicaComparer()
        self._offer_seconds_max, self._chunk_seconds_max = offer_seconds_max, chunk_seconds_max
        self._admission = Admission()
        self._slots = RingSlots(free_slots, flusher_slots)
        self._inherited: dict[int, bool] = {}
        self._newest_before = -1  # of the steps that the previous stager had begun
        self._inherited_until = math.inf
        self._open: dict[int, Checkpoint] = {}  # step → checkpoint, in order of first offer
        self._no_flusher_reason = ""  # why no flusher is connected; empty if one is
        self._actions: list[Action] = []
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            NewLayout: self._on_layout,
            Offer: self._on_offer,
            Decline: self._on_decline,
            Sent: self._on_credit,
            Received: self._on_credit,
            Returned: self._on_credit,
            Done: self._on_done,
            RankLost: self._on_rank_lost,
            RankSilent: self._on_rank_silent,
            RankBack: self._on_rank_back,
            Began: self._on_began,
            SlotsAdded: self._on_slots_added,
            SlotsFreed: self._on_slots_freed,
            Durable: self._on_durable,
            Failed: self._on_failed,
            FlusherLost: self._on_flusher_lost,
            FlusherReplaced: self._on_flusher_replaced,
            Tick: self._on_tick,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; return the actions to execute, in order. Raises `ProtocolError`: the event's sender broke
        the protocol; nothing has changed. The caller must drop the sender: a rank by `RankLost`.
        """
        self._now = now
        self._actions = []
        self._handlers[type(event)](event)
        self._actions += self._slots.grant(self._open.values(), now)
        return self._actions

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no step is being offered or received, and no credit is out."""
        return all(checkpoint.phase is Phase.STAGED for checkpoint in self._open.values())

    @property
    def may_stage(self) -> bool:
        """Whether a step in flight may still become staged."""
        return any(checkpoint.under_way for checkpoint in self._open.values())

    def in_flight(self, now: float) -> list[InFlight]:
        """The checkpoints in flight, oldest first, with their progress."""
        return [
            InFlight(step, checkpoint.handed_over_fraction, max(0.0, now - checkpoint.begun_at))
            for step, checkpoint in self._open.items()
            if checkpoint.under_way
        ]

    def outstanding(self) -> list[tuple[int, int, int, int]]:
        """`(rank, step, chunk, slot)` of all credits not yet settled."""
        return [
            (rank, step, chunk, credit.slot)
            for step, checkpoint in self._open.items()
            for (chunk, rank), credit in checkpoint.credits.items()
        ]

    @property
    def flusher_slots(self) -> KeysView[int]:
        """Live view of the slots that the flusher has not reported free."""
        return self._slots.flusher_slots.keys()

    def known(self) -> list[KnownCheckpoint]:
        """The checkpoints to tell a new flusher, oldest first; it ignores those that it already knows."""
        found = []
        for step, checkpoint in self._open.items():
            if checkpoint.phase not in (Phase.PREPARED, Phase.RECEIVING, Phase.STAGED):
                continue
            assert checkpoint.layout is not None
            digest, staged = checkpoint.layout.digest, checkpoint.phase is Phase.STAGED
            found.append(
                KnownCheckpoint(step, digest, self._slots.holding(step), checkpoint.handed_over, staged)
            )
        return found

    @property
    def inherited_staged(self) -> set[int]:
        """Steps whose share the previous stager had staged, and whose outcome is unknown."""
        return {step for step, staged in self._inherited.items() if staged}

    @property
    def inherited_slots(self) -> list[int]:
        """The flusher's slots that were filled before this session."""
        return [slot for slot, held in self._slots.flusher_slots.items() if held is None]

    def is_durable(self, step: int) -> bool:
        """Whether the flusher has reported this step as durable; False for steps long ago."""
        verdict = self._admission.verdict(step)
        return verdict is not None and verdict.kind is Kind.DURABLE

    def take_over(self, inherited: Mapping[int, bool], newest: int = -1) -> None:
        """Take over the steps of this attempt that the previous stager left in the ring. Call before the first event.

        `inherited`: By step: whether the previous stager had staged its share. `newest`: of all steps that it had
        begun; those that it did not leave have ended, and are not begun again.
        """
        self._inherited, self._newest_before = dict(inherited), newest

    def stop(self) -> None:
        """From now on decline each step that no rank has offered yet; steps in flight continue. Safe to call again."""
        self._admission.is_stopping = True

    def refuse_all(self, reason: str) -> list[Action]:
        """Fail all open checkpoints, staged ones included, and decline each later offer with `reason`."""
        self._actions = []
        self._admission.refuse_all_reason = reason
        for checkpoint in list(self._open.values()):
            if checkpoint.phase is not Phase.ENDED:
                self._fail(checkpoint, PeerLost(reason))
        for step in list(self._inherited):  # their chunks were in the lost ring, too
            self._on_failed(Failed(step, PeerLost.code, reason))
        return self._actions

    def reopen(self, *, free_slots: Iterable[int], flusher_slots: Iterable[int] = ()) -> None:
        """Accept checkpoints again, with another flusher's ring. Only after `refuse_all`, with no credit out. Slots as
        in the constructor.
        """
        assert self._admission.refuse_all_reason, "nothing was refused"
        assert not self._open, "credits are still out"
        self._admission.refuse_all_reason = self._no_flusher_reason = ""
        self._slots = RingSlots(free_slots, flusher_slots)
        self._inherited.clear()

    # -- offers --------------------------------------------------------------------------------------------------

    def _on_layout(self, event: NewLayout) -> None:
        if event.layout.ranks != self.ranks:
            raise ProtocolError(f"layout for {event.layout.ranks} ranks, this job has {self.ranks}")
        self._admission.add_layout(event.layout)

    def _admit(self, rank: int, step: int) -> Checkpoint | None:
        """The checkpoint of a rank's offer or decline, made if new; None if the rank got a verdict instead."""
        verdict = self._admission.verdict(step)
        if verdict is not None:
            self._actions.append(SendMessage(rank, verdict.kind, step, verdict.body))
            return None
        if self._inherited.get(step):
            self._actions.append(SendMessage(rank, Kind.STAGED, step))
            return None
        for older in list(self._open.values()):
            if older.phase is Phase.OFFERING and older.step < step and rank not in older.digests:
                # Every rank offers or declines its steps in order, so it will never offer the older one.
                self._fail(
                    older,
                    StateError(f"step {older.step}: rank {rank} went on to step {step} without offering it"),
                )
        checkpoint = self._open.get(step)
        if checkpoint is not None:
            return checkpoint
        under_way = [other for other, checkpoint in self._open.items() if checkpoint.under_way]
        refusal = self._admission.refusal(step, under_way, self._now)
        if refusal is None and step <= self._newest_before and step not in self._inherited:
            ended = (
                f"step {step} has ended while the stager was lost; `holdfast ls` shows whether it is durable"
            )
            refusal = {"reason": ended, "code": PeerLost.code}
        if refusal is not None:
            # Tell all ranks now: those that have not offered yet can skip the step.
            self._send_verdict(SendMessage(None, Kind.DECLINED, step, refusal))
            return None
        self._admission.advance_to(step)
        checkpoint = self._open[step] = Checkpoint(step, self.ranks, self._now, self._now)
        return checkpoint

    def _on_offer(self, event: Offer) -> None:
        known = self._open.get(event.step)
        if known is not None and event.rank in known.digests:
            raise ProtocolError(f"rank {event.rank} offered step {event.step} twice")
        checkpoint = self._admit(event.rank, event.step)
        if checkpoint is None:
            return
        checkpoint.digests[event.rank] = event.layout_digest
        checkpoint.records[event.rank] = event.record
        if len(checkpoint.digests) < self.ranks:
            return
        layout = self._admission.layout_of(checkpoint)
        if isinstance(layout, HoldfastError):
            self._fail(checkpoint, layout)
            return
        chunks = range(layout.chunks) if self._share is None else self._share(layout)
        if not chunks:
            self._fail(
                checkpoint,
                ProtocolError(
                    f"step {checkpoint.step}: this stager has no share of an image of {layout.chunks} chunks, and the "
                    "ranks offered it one; give all stagers and ranks the same list of stagers"
                ),
            )
            return
        self._inherited.pop(checkpoint.step, None)
        checkpoint.prepare(layout, chunks, self._now)
        try:
            for rank, text in checkpoint.early_fingerprints.items():
                checkpoint.fingerprints[rank] = self._replicas.read(layout, text)
        except ProtocolError as error:
            self._fail(checkpoint, error)
            return
        self._actions.append(BeginReceiving(checkpoint.step, layout))

    def _on_decline(self, event: Decline) -> None:
        checkpoint = self._admit(event.rank, event.step)
        if checkpoint is None or not (checkpoint.under_way or self._may_withdraw(checkpoint)):
            return
        reason = event.reason.with_rank(event.rank)
        body: dict[str, Any] = {"reason": reason.text, "cause": reason.cause}
        if event.needed_pickle_bytes > 0:
            body["new_pickle_reserve_bytes"] = pickle_reserve_bytes(event.needed_pickle_bytes)
        self._end(checkpoint, SendMessage(None, Kind.DECLINED, checkpoint.step, body), reason.text)

    def _may_withdraw(self, checkpoint: Checkpoint) -> bool:
        """Whether a staged checkpoint may still end: a share is useless if another one is missing."""
        return self._share is not None and checkpoint.phase is Phase.STAGED

    # -- credits and payloads ------------------------------------------------------------------------------------

    def _on_began(self, event: Began) -> None:
        checkpoint = self._open.get(event.step)
        if checkpoint is not None and checkpoint.phase is Phase.PREPARED:
            checkpoint.phase = Phase.RECEIVING
            checkpoint.part_chunks = max(1, event.part_chunks)
            checkpoint.progress_at = self._now

    def _on_credit(self, event: Sent | Received | Returned) -> None:
        checkpoint = self._open.get(event.step)
        self._actions += self._slots.advance_credit(checkpoint, event, self._now)
        assert checkpoint is not None
        if checkpoint.phase is Phase.ENDED:
            self._forget_if_settled(checkpoint)
        else:
            self._stage_if_complete(checkpoint)

    def _on_done(self, event: Done) -> None:
        checkpoint = self._open.get(event.step)
        if checkpoint is None or not checkpoint.under_way:
            return  # the checkpoint has ended meanwhile; drop the record
        if event.fingerprints is not None and self._on_divergence != "off":
            if checkpoint.layout is None:  # a rank without frames here may be done before all have offered
                checkpoint.early_fingerprints[event.rank] = event.fingerprints
            else:
                checkpoint.fingerprints[event.rank] = self._replicas.read(
                    checkpoint.layout, event.fingerprints
                )
        checkpoint.records.setdefault(event.rank, SaveRecord()).update(event.record)
        checkpoint.done.add(event.rank)
        self._stage_if_complete(checkpoint)

    def _stage_if_complete(self, checkpoint: Checkpoint) -> None:
        # PREPARED suffices: before `began` the flusher frees no slot, so the ring has the whole image.
        if checkpoint.phase not in (Phase.PREPARED, Phase.RECEIVING):
            return
        if checkpoint.frames_missing:
            return
        done = checkpoint.done
        if len(done) + sum(rank not in done for rank in self._admission.absent) < self.ranks:
            return
        layout = checkpoint.layout
        assert layout is not None
        divergence = self._replicas.compare(layout, checkpoint.step, checkpoint.fingerprints)
        if divergence is not None and self._on_divergence == "refuse":
            self._fail(checkpoint, StateError(divergence.message))
            return
        if divergence is not None and self._replicas.is_new(divergence):
            self._actions.append(Diverged(checkpoint.step, divergence.message, divergence.to_json()))
        drift = (
            divergence.message
            if divergence is not None
            else self._replicas.describe_unresolved(checkpoint.step)
        )
        checkpoint.phase = Phase.STAGED
        self._actions.append(MarkStaged(checkpoint.step, layout, checkpoint.records, drift))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _fail(self, checkpoint: Checkpoint, error: HoldfastError) -> None:
        is_begun = checkpoint.phase is not Phase.OFFERING
        if self._share is not None and not is_begun and isinstance(error, PeerLost):
            self._inherited.pop(checkpoint.step, None)
            # The other stagers' shares may be complete, and their flushers wait for this one.
            self._actions.append(Abort(checkpoint.step, str(error)))
        body = {"code": error.code, "message": str(error)}
        self._end(checkpoint, SendMessage(None, Kind.FAILED, checkpoint.step, body), str(error))

    def _send_verdict(self, verdict: SendMessage) -> None:
        self._admission.record_verdict(verdict)
        self._actions.append(verdict)

    def _end(self, checkpoint: Checkpoint, verdict: SendMessage, reason: str) -> None:
        """End a checkpoint on all ranks. It keeps the slots of unsettled credits until they are settled."""
        was_inherited = self._inherited.pop(checkpoint.step, None) is not None
        if was_inherited or checkpoint.phase is not Phase.OFFERING:
            self._actions.append(Abort(checkpoint.step, reason))
        checkpoint.phase = Phase.ENDED
        checkpoint.queue = None
        self._send_verdict(verdict)
        self._reclaim(checkpoint)

    def _reclaim(self, checkpoint: Checkpoint) -> None:
        self._actions += self._slots.reclaim(checkpoint, self._admission.lost.keys())
        self._forget_if_settled(checkpoint)

    def _forget_if_settled(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.open_slots:
            self._open.pop(checkpoint.step, None)

    def _on_rank_lost(self, event: RankLost) -> None:
        if event.rank in self._admission.lost:
            return
        self._admission.lost[event.rank] = event.reason
        self._admission.clear_silent(event.rank)
        for checkpoint in list(self._open.values()):
            if checkpoint.phase is Phase.ENDED:
                self._reclaim(checkpoint)
        self._continue_without(event.rank, event.reason)

    def _on_rank_silent(self, event: RankSilent) -> None:
        if event.rank in self._admission.absent:
            return
        self._admission.mark_silent(event, self._now)
        # Its credits stay out: the rank may wake up and send into their slots.
        self._continue_without(event.rank, f"{event.name} has been silent for {event.silent_seconds:.0f} s")

    def _continue_without(self, rank: int, reason: str) -> None:
        """Fail the checkpoints that need this rank; the others continue without it."""
        for checkpoint in list(self._open.values()):
            if checkpoint.under_way:
                if checkpoint.is_waiting_for(rank):
                    self._fail(checkpoint, PeerLost(f"step {checkpoint.step}: {reason}"))
                else:
                    self._stage_if_complete(checkpoint)

    def _on_rank_back(self, event: RankBack) -> None:
        self._admission.clear_silent(event.rank)

    def _on_flusher_lost(self, event: FlusherLost) -> None:
        self._no_flusher_reason = event.reason

    def _on_flusher_replaced(self, event: FlusherReplaced) -> None:
        self._no_flusher_reason = ""
        self._on_slots_freed(SlotsFreed(event.freed))

    def _on_slots_added(self, event: SlotsAdded) -> None:
        self._slots.free.extendleft(
            reversed(event.slots)
        )  # before slots whose chunks a restore may still read

    def _on_slots_freed(self, event: SlotsFreed) -> None:
        self._slots.add_freed(event.slots)
        for checkpoint in self._open.values():
            checkpoint.progress_at = self._now

    def _on_durable(self, event: Durable) -> None:
        checkpoint = self._open.get(event.step)
        was_inherited = checkpoint is None and self._inherited.pop(event.step, None) is not None
        if checkpoint is None and self.is_durable(event.step):
            return  # repeated by a new flusher
        if was_inherited or (checkpoint is None and self._share is not None):
            # In the second case it had ended before this stager came, and a rank may not have heard of it.
            self._send_verdict(SendMessage(None, Kind.DURABLE, event.step, event.body))
            return
        if checkpoint is None or checkpoint.phase is not Phase.STAGED:
            raise ProtocolError(f"the flusher says step {event.step} is durable; it is not staged")
        del self._open[event.step]
        self._send_verdict(SendMessage(None, Kind.DURABLE, event.step, event.body))

    def _on_failed(self, event: Failed) -> None:
        checkpoint = self._open.get(event.step)
        body = {"code": event.code, "message": event.message}
        if checkpoint is None and self._inherited.pop(event.step, None) is not None:
            self._send_verdict(SendMessage(None, Kind.FAILED, event.step, body))
        if checkpoint is None or checkpoint.phase is Phase.ENDED:
            return
        self._end(checkpoint, SendMessage(None, Kind.FAILED, event.step, body), event.message)

    def _on_tick(self, _event: Tick) -> None:
        for checkpoint in list(self._open.values()):
            overdue_text = checkpoint.overdue_text(
                self._now,
                self._offer_seconds_max,
                self._chunk_seconds_max,
                self._admission.lost.keys(),
                no_flusher=self._no_flusher_reason,
            )
            if overdue_text:
                self._fail(checkpoint, PeerLost(f"step {checkpoint.step}: {overdue_text}"))
        self._inherited_until = min(self._inherited_until, self._now + LOST_STAGER_SECONDS_MAX)
        if self._now > self._inherited_until:
            for step in [step for step, staged in self._inherited.items() if not staged]:
                if step not in self._open:
                    reason = f"step {step}: the stager was lost, and no rank has offered it to the next one"
                    self._actions.append(Abort(step, reason))
                    self._on_failed(Failed(step, PeerLost.code, reason))
