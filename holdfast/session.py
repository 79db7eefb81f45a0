"""The stager's view of all checkpoints in flight: events in, actions out. No MPI, no clock, no threads.

    (first offer)        all offers     credits  flusher began      every chunk full, all DONE
         │   ┌──────────┐ same digest ┌──────────┐  part size ┌───────────┐            ┌────────┐  durable
         └──►│ OFFERING ├────────────►│ PREPARED ├───────────►│ RECEIVING ├───────────►│ STAGED ├─────────► gone
             └────┬─────┘             └────┬─────┘            └─────┬─────┘            └───┬────┘
                  └──── decline, failure, rank lost, deadline ──────┴─ ENDED ◄─────────────┘ failed
                                                                       └─ forgotten when its last credit is settled

The same table, event by event, is in docs/wire.md. Rules:
1. A slot belongs to the stager from FREE until CHUNK FULL, to the flusher from there until SLOTS FREED.
2. A credit is settled by payload and SENT both, or by RETURN, or by the loss of its rank; only then may its slot serve
   again. A checkpoint that has ended keeps the slots of unsettled credits, so a late payload never lands in another's.
3. The lowest incomplete part of the oldest checkpoint can always get slots, so a ring smaller than the image flows:
   a chunk of any other part, or of a newer checkpoint, is granted only while as many slots stay free as the lowest
   parts of all older ones still need. So a newer one never stands in the way of an older one, however many there are.
4. Every wait has a deadline, and its end names who waited for whom.
5. A flusher that dies ends nothing. Credits are granted and chunks come in while slots are free; one that has come in
   whole is staged, began or not. The next flusher is told what `known` says, and goes on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.emergency_plan import InFlight
from holdfast.errors import BusyError, HoldfastError, PeerLost, ProtocolError, StateError
from holdfast.layout import Layout
from holdfast.replicas import FIELD, OnDivergence, Replicas
from holdfast.session_checkpoint import IN_FLIGHT_MAX, Checkpoint, Credit, Phase
from holdfast.session_steps import (
    Abort,
    Action,
    Began,
    Begin,
    CancelReceive,
    ChunkFull,
    Decline,
    Diverged,
    Done,
    Durable,
    Event,
    Failed,
    FillSlot,
    FlusherBack,
    FlusherGone,
    FreeSlot,
    GrantCredit,
    Known,
    NewLayout,
    Offer,
    RankBack,
    RankLost,
    RankSilent,
    Received,
    Returned,
    Sent,
    SlotsFreed,
    Staged,
    Tell,
    Tick,
)
from holdfast.wire import Kind

__all__ = ["IN_FLIGHT_MAX", "Phase", "Session", "pickle_reserve_bytes"]

_VERDICTS_KEPT = 256  # answers for ranks that ask late
_LAYOUTS_KEPT = 4


class Session:
    """All checkpoints of one stager. Not for several threads; `handle` is the only way in.

    Args:
        ranks: Training ranks.
        free_slots: Slots of the ring that are free now; those to be filled first, first.
        flusher_slots: Slots that still hold chunks of an earlier job; the flusher will free them.
        offer_seconds_max: How long the last rank's offer is waited for after the first.
        chunk_seconds_max: How long a granted chunk may take; also how long a checkpoint may wait for room in the ring.
        on_divergence: What to do when replicas differ.
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
    ) -> None:
        self.ranks = ranks
        self._on_divergence, self._replicas = on_divergence, Replicas()
        self._offer_seconds_max, self._chunk_seconds_max = offer_seconds_max, chunk_seconds_max
        # Taken from the front, given back at the end: a freed slot still has its chunk, for a restore, and the newest
        # ones the longest.
        self._free = deque(free_slots)
        # slot → (step, chunk) that was handed over in it; None: a chunk of an earlier job
        self._flusher_slots: dict[int, tuple[int, int] | None] = dict.fromkeys(flusher_slots)
        self._open: dict[int, Checkpoint] = {}  # step → checkpoint, in order of first offer
        self._verdicts: OrderedDict[int, Tell] = OrderedDict()
        self._layouts: OrderedDict[str, Layout] = OrderedDict()
        self._lost: dict[int, str] = {}
        self._silent: dict[int, tuple[str, float]] = {}  # rank → its name, and since when it has been silent
        self._no_flusher = ""  # why there is none
        self._newest_step = -1
        self._ended_for_good = ""
        self._actions: list[Action] = []
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            NewLayout: self._on_layout,
            Offer: self._on_offer,
            Decline: self._on_decline,
            Sent: self._on_sent,
            Received: self._on_received,
            Returned: self._on_returned,
            Done: self._on_done,
            RankLost: self._on_rank_lost,
            RankSilent: self._on_rank_silent,
            RankBack: self._on_rank_back,
            Began: self._on_began,
            SlotsFreed: self._on_slots_freed,
            Durable: self._on_durable,
            Failed: self._on_failed,
            FlusherGone: self._on_flusher_gone,
            FlusherBack: self._on_flusher_back,
            Tick: self._on_tick,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and say what must be done, in order.

        Args:
            event: What happened.
            now: Seconds of any clock that only goes forward.

        Raises:
            ProtocolError: The event's sender broke the protocol; nothing has changed. Drop the sender: a rank by
                `RankLost`.
        """
        self._now = now
        self._actions = []
        self._handlers[type(event)](event)
        self._grant()
        return self._actions

    # -- what others may look at ---------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is being offered or received, and no credit is out."""
        return all(checkpoint.phase is Phase.STAGED for checkpoint in self._open.values())

    @property
    def may_stage(self) -> bool:
        """Something is under way that may still become staged."""
        return any(checkpoint.under_way for checkpoint in self._open.values())

    def in_flight(self, now: float) -> list[InFlight]:
        """What is on its way, oldest first, and how far it is."""
        found = []
        for step, checkpoint in self._open.items():
            if checkpoint.under_way:
                layout = checkpoint.layout
                fraction = checkpoint.handed_over / layout.chunks if layout is not None else 0.0
                found.append(InFlight(step, fraction, max(0.0, now - checkpoint.begun_at)))
        return found

    def outstanding(self) -> list[tuple[int, int, int, int]]:
        """`(rank, step, chunk, slot)` of all credits not yet settled."""
        return [
            (rank, step, chunk, credit.slot)
            for step, checkpoint in self._open.items()
            for (chunk, rank), credit in checkpoint.credits.items()
        ]

    @property
    def flusher_slots(self) -> frozenset[int]:
        """Slots that the flusher has not said are free."""
        return frozenset(self._flusher_slots)

    def known(self) -> list[Known]:
        """What another flusher must be told, oldest first; it takes what it knows already for said twice."""
        found = []
        for step, checkpoint in self._open.items():
            if checkpoint.phase not in {Phase.PREPARED, Phase.RECEIVING, Phase.STAGED}:
                continue
            assert checkpoint.layout is not None
            chunks = sorted(
                (held[1], slot)
                for slot, held in self._flusher_slots.items()
                if held is not None and held[0] == step
            )
            slots = tuple(slot for _, slot in chunks)
            staged = checkpoint.phase is Phase.STAGED
            found.append(Known(step, checkpoint.layout.digest, slots, checkpoint.handed_over, staged))
        return found

    def is_durable(self, step: int) -> bool:
        """Whether the flusher has said so, not too many steps ago."""
        verdict = self._verdicts.get(step)
        return verdict is not None and verdict.kind is Kind.DURABLE

    def refuse_all(self, reason: str) -> list[Action]:
        """From now on take no checkpoint: what is not staged ends, each later offer is declined with `reason`."""
        self._actions = []
        self._ended_for_good = reason
        for checkpoint in list(self._open.values()):
            if checkpoint.phase is not Phase.ENDED:
                self._fail(checkpoint, PeerLost(reason))
        return self._actions

    def reopen(self, *, free_slots: Iterable[int], flusher_slots: Iterable[int] = ()) -> None:
        """Take checkpoints again, with another flusher's ring. Only after `refuse_all`, with no credit out.

        Args:
            free_slots: Slots of that ring that are free; those to be filled first, first.
            flusher_slots: Slots that still hold chunks of an earlier job.
        """
        assert self._ended_for_good, "nothing was refused"
        assert not self._open, "credits are still out"
        self._ended_for_good = ""
        self._no_flusher = ""
        self._free = deque(free_slots)
        self._flusher_slots = dict.fromkeys(flusher_slots)

    # -- offers --------------------------------------------------------------------------------------------------

    def _on_layout(self, event: NewLayout) -> None:
        if event.layout.ranks != self.ranks:
            raise ProtocolError(f"layout for {event.layout.ranks} ranks, this job has {self.ranks}")
        self._layouts[event.layout.digest] = event.layout
        self._layouts.move_to_end(event.layout.digest)
        while len(self._layouts) > _LAYOUTS_KEPT:
            self._layouts.popitem(last=False)

    def _entered(self, rank: int, step: int) -> Checkpoint | None:
        """The checkpoint that a rank speaks of for the first time; None if it has its answer already."""
        if step in self._verdicts:
            verdict = self._verdicts[step]
            self._actions.append(Tell(rank, verdict.kind, step, verdict.body))
            return None
        for older in list(self._open.values()):
            if older.phase is Phase.OFFERING and older.step < step and rank not in older.digests:
                # Every rank speaks of its steps in order, so this one will never offer the older one.
                self._fail(
                    older,
                    StateError(f"step {older.step}: rank {rank} went on to step {step} without offering it"),
                )
        checkpoint = self._open.get(step)
        if checkpoint is not None:
            return checkpoint
        refusal = self._refusal(step)
        if refusal is not None:
            # Every rank is told now: one that has not offered yet learns it before it does.
            self._verdict(step, None, refusal)
            return None
        self._newest_step = step
        checkpoint = Checkpoint(step, self.ranks, self._now, self._now)
        self._open[step] = checkpoint
        return checkpoint

    def _refusal(self, step: int) -> HoldfastError | None:
        if self._ended_for_good:
            return PeerLost(self._ended_for_good)
        if self._lost:
            return PeerLost(f"no checkpoint can be whole: {'; '.join(self._lost.values())}")
        if self._silent:
            silent = [
                f"{name} has been silent for {self._now - since:.0f} s"
                for name, since in self._silent.values()
            ]
            return PeerLost(f"no checkpoint can be whole: {'; '.join(silent)}")
        if step <= self._newest_step:
            return BusyError(f"step {step} is older than step {self._newest_step}, which was offered before")
        under_way = [s for s, c in self._open.items() if c.under_way]
        if len(under_way) >= IN_FLIGHT_MAX:
            return BusyError(f"steps {', '.join(map(str, under_way))} are still being received")
        return None

    def _on_offer(self, event: Offer) -> None:
        known = self._open.get(event.step)
        if known is not None and event.rank in known.digests:
            raise ProtocolError(f"rank {event.rank} offered step {event.step} twice")
        checkpoint = self._entered(event.rank, event.step)
        if checkpoint is None:
            return
        checkpoint.digests[event.rank] = event.layout_digest
        checkpoint.records[event.rank] = dict(event.record)
        if len(checkpoint.digests) < self.ranks:
            return
        digest = checkpoint.digests[0]
        others = [rank for rank in range(self.ranks) if checkpoint.digests[rank] != digest]
        layout = self._layouts.get(digest)
        if others:
            got = checkpoint.digests[others[0]]
            error: HoldfastError = StateError(
                f"step {event.step}: the layout of rank {others[0]} has digest {got[:16]}, that of rank 0 "
                f"{digest[:16]}; all ranks must hold the same tensors in the same order, and adopt a new reserve at "
                "the same step"
            )
            self._fail(checkpoint, error)
        elif layout is None:
            self._fail(
                checkpoint, ProtocolError(f"step {event.step}: rank 0 announced no layout {digest[:16]}")
            )
        else:
            self._prepare(checkpoint, layout)

    def _prepare(self, checkpoint: Checkpoint, layout: Layout) -> None:
        checkpoint.layout = layout
        checkpoint.phase = Phase.PREPARED
        checkpoint.progress_at = self._now
        # Opening the upload may take a while and need not be waited for: until the flusher says how large its parts
        # are, the whole image counts as one, which is to say that chunks are granted strictly from the lowest.
        checkpoint.part_chunks = layout.chunks
        checkpoint.queues = [deque(layout.slice_chunks(rank)) for rank in range(self.ranks)]
        checkpoint.frames_left = {rank: sum(1 for _ in layout.sends(rank)) for rank in range(self.ranks)}
        self._actions.append(Begin(checkpoint.step, layout))

    def _on_decline(self, event: Decline) -> None:
        checkpoint = self._entered(event.rank, event.step)
        if checkpoint is None or not checkpoint.under_way:
            return
        reason = f"rank {event.rank}: {event.reason}"
        body: dict[str, Any] = {"reason": reason}
        if event.needed_pickle_bytes > 0:
            body["new_pickle_reserve_bytes"] = pickle_reserve_bytes(event.needed_pickle_bytes)
        self._end(checkpoint, Tell(None, Kind.DECLINED, checkpoint.step, body), reason)

    # -- credits and payloads ------------------------------------------------------------------------------------

    def _on_began(self, event: Began) -> None:
        checkpoint = self._open.get(event.step)
        if checkpoint is not None and checkpoint.phase is Phase.PREPARED:
            checkpoint.phase = Phase.RECEIVING
            checkpoint.part_chunks = max(1, event.part_chunks)
            checkpoint.progress_at = self._now
            self._check_staged(checkpoint)

    def _grant(self) -> None:
        """Give free slots to chunks: the oldest checkpoint first, within one fair over ranks (rules 2 and 3)."""
        reserved = 0  # slots that the lowest incomplete parts of older checkpoints still need
        for checkpoint in self._open.values():
            if checkpoint.phase not in {Phase.PREPARED, Phase.RECEIVING}:
                continue
            credits_out = [0] * self.ranks
            for _, rank in checkpoint.credits:
                credits_out[rank] += 1
            while (chunk := checkpoint.choose(credits_out, len(self._free) - reserved)) is not None:
                self._assign(checkpoint, chunk, credits_out)
            reserved += checkpoint.lowest_part_missing()

    def _assign(self, checkpoint: Checkpoint, chunk: int, credits_out: list[int]) -> None:
        layout = checkpoint.layout
        assert layout is not None
        slot = self._free.popleft()
        checkpoint.queues[layout.chunk_rank(chunk)].popleft()
        checkpoint.open_slots[chunk] = slot
        checkpoint.complete[chunk] = {}
        checkpoint.progress_at = self._now
        self._actions.append(FillSlot(slot, checkpoint.step, chunk))
        for rank in layout.senders(chunk):
            credits_out[rank] += 1
            nbytes = sum(extent.nbytes for extent in layout.pieces(chunk, rank))
            checkpoint.credits[chunk, rank] = Credit(slot, nbytes, self._now)
            self._actions.append(GrantCredit(rank, checkpoint.step, chunk, slot, layout))

    def _credit(self, what: str, rank: int, step: int, chunk: int) -> tuple[Checkpoint, Credit]:
        checkpoint = self._open.get(step)
        credit = checkpoint.credits.get((chunk, rank)) if checkpoint is not None else None
        if checkpoint is None or credit is None:
            raise ProtocolError(
                f"rank {rank}: {what} for step {step}, chunk {chunk}, for which it has no credit"
            )
        return checkpoint, credit

    def _on_sent(self, event: Sent) -> None:
        checkpoint, credit = self._credit("SENT", event.rank, event.step, event.chunk)
        if credit.crc is not None:
            raise ProtocolError(f"rank {event.rank}: SENT twice for step {event.step}, chunk {event.chunk}")
        if event.nbytes != credit.nbytes:
            raise ProtocolError(
                f"rank {event.rank}: step {event.step}, chunk {event.chunk}: sent {event.nbytes} bytes, "
                f"expected {credit.nbytes}"
            )
        credit.crc = event.crc
        self._check_complete(checkpoint, event.chunk, event.rank, credit)

    def _on_received(self, event: Received) -> None:
        checkpoint, credit = self._credit("payload", event.rank, event.step, event.chunk)
        credit.received = True
        self._check_complete(checkpoint, event.chunk, event.rank, credit)

    def _check_complete(self, checkpoint: Checkpoint, chunk: int, rank: int, credit: Credit) -> None:
        if not credit.received or credit.crc is None:
            return
        del checkpoint.credits[chunk, rank]
        checkpoint.progress_at = self._now
        if checkpoint.phase is Phase.ENDED:
            self._settle_ended(checkpoint, chunk)
            return
        checkpoint.frames_left[rank] -= 1
        checkpoint.complete[chunk][rank] = credit.crc
        layout = checkpoint.layout
        assert layout is not None
        if len(checkpoint.complete[chunk]) == len(layout.senders(chunk)):
            slot = checkpoint.open_slots.pop(chunk)
            sources = tuple(sorted(checkpoint.complete.pop(chunk).items()))
            self._flusher_slots[slot] = (checkpoint.step, chunk)
            nbytes = layout.chunk_extent(chunk).nbytes
            self._actions.append(ChunkFull(slot, checkpoint.step, chunk, sources, nbytes))
            self._check_staged(checkpoint)

    def _on_returned(self, event: Returned) -> None:
        checkpoint, credit = self._credit("RETURN", event.rank, event.step, event.chunk)
        if credit.crc is not None or credit.received:
            raise ProtocolError(
                f"rank {event.rank}: RETURN for step {event.step}, chunk {event.chunk}, which it has sent"
            )
        if checkpoint.phase is not Phase.ENDED:
            raise ProtocolError(
                f"rank {event.rank}: RETURN for step {event.step}, which has not ended; decline it first"
            )
        del checkpoint.credits[event.chunk, event.rank]
        self._actions.append(CancelReceive(event.rank, credit.slot))
        self._settle_ended(checkpoint, event.chunk)

    def _on_done(self, event: Done) -> None:
        checkpoint = self._open.get(event.step)
        if checkpoint is None or not checkpoint.under_way:
            return  # it has ended meanwhile; the record is of no use
        record = dict(event.record)
        fingerprints = record.pop(FIELD, None)
        if fingerprints is not None and self._on_divergence != "off" and checkpoint.layout is not None:
            checkpoint.fingerprints[event.rank] = self._replicas.read(checkpoint.layout, fingerprints)
        checkpoint.records.setdefault(event.rank, {}).update(record)
        checkpoint.done.add(event.rank)
        self._check_staged(checkpoint)

    def _check_staged(self, checkpoint: Checkpoint) -> None:
        # Without a flusher nobody says `began`; what is whole in the ring waits there for the next one.
        whole_unheard = checkpoint.phase is Phase.PREPARED and self._no_flusher
        if checkpoint.phase is not Phase.RECEIVING and not whole_unheard:
            return
        if any(checkpoint.frames_left.values()):
            return
        if len(checkpoint.done | self._lost.keys() | self._silent.keys()) < self.ranks:
            return
        layout = checkpoint.layout
        assert layout is not None
        divergence = self._replicas.compare(layout, checkpoint.step, checkpoint.fingerprints)
        if divergence is not None and self._on_divergence == "refuse":
            self._fail(checkpoint, StateError(divergence.message))
            return
        if divergence is not None and self._replicas.is_news(divergence):
            self._actions.append(Diverged(checkpoint.step, divergence.message, divergence.to_json()))
        checkpoint.phase = Phase.STAGED
        self._actions.append(Staged(checkpoint.step, layout, checkpoint.records))

    # -- ends ----------------------------------------------------------------------------------------------------

    def _fail(self, checkpoint: Checkpoint, error: HoldfastError) -> None:
        body = {"code": error.code, "message": str(error)}
        self._end(checkpoint, Tell(None, Kind.FAILED, checkpoint.step, body), str(error))

    def _verdict(self, step: int, rank: int | None, error: HoldfastError) -> None:
        tell = Tell(rank, Kind.DECLINED, step, {"reason": str(error), "code": error.code})
        self._remember(tell)
        self._actions.append(tell)

    def _remember(self, verdict: Tell) -> None:
        self._newest_step = max(self._newest_step, verdict.step)
        self._verdicts[verdict.step] = verdict
        while len(self._verdicts) > _VERDICTS_KEPT:
            self._verdicts.popitem(last=False)

    def _end(self, checkpoint: Checkpoint, verdict: Tell, reason: str) -> None:
        """End a checkpoint for everybody. Slots of unsettled credits stay with it until they are settled."""
        if checkpoint.phase is not Phase.OFFERING:
            self._actions.append(Abort(checkpoint.step, reason))
        checkpoint.phase = Phase.ENDED
        checkpoint.queues = []
        self._remember(verdict)
        self._actions.append(verdict)
        for chunk, rank in list(checkpoint.credits):
            if rank in self._lost:
                self._actions.append(CancelReceive(rank, checkpoint.credits.pop((chunk, rank)).slot))
        for chunk in list(checkpoint.open_slots):
            self._settle_ended(checkpoint, chunk)
        self._forget_if_settled(checkpoint)

    def _settle_ended(self, checkpoint: Checkpoint, chunk: int) -> None:
        if any(other == chunk for other, _ in checkpoint.credits):
            return
        slot = checkpoint.open_slots.pop(chunk)
        self._actions.append(FreeSlot(slot))
        self._free.appendleft(slot)  # what is in it is of no use
        self._forget_if_settled(checkpoint)

    def _forget_if_settled(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.open_slots:
            self._open.pop(checkpoint.step, None)

    def _on_rank_lost(self, event: RankLost) -> None:
        if event.rank in self._lost:
            return
        self._lost[event.rank] = event.reason
        self._silent.pop(event.rank, None)
        for checkpoint in list(self._open.values()):
            if checkpoint.phase is Phase.STAGED:
                continue
            owes = checkpoint.phase is Phase.OFFERING or checkpoint.frames_left.get(event.rank, 0) > 0
            if checkpoint.phase is Phase.ENDED:
                for chunk, rank in list(checkpoint.credits):
                    if rank == event.rank:
                        credit = checkpoint.credits.pop((chunk, rank))
                        self._actions.append(CancelReceive(rank, credit.slot))
                        self._settle_ended(checkpoint, chunk)
            elif owes:
                self._fail(checkpoint, PeerLost(f"step {checkpoint.step}: {event.reason}"))
            else:
                self._check_staged(checkpoint)  # it had sent everything: the others finish it

    def _on_rank_silent(self, event: RankSilent) -> None:
        if event.rank in self._lost or event.rank in self._silent:
            return
        self._silent[event.rank] = (event.name, self._now - event.silent_seconds)
        for checkpoint in list(self._open.values()):
            if not checkpoint.under_way:
                continue
            owes = checkpoint.phase is Phase.OFFERING or checkpoint.frames_left.get(event.rank, 0) > 0
            if owes:
                # Its credits stay out: it may wake up and send into their slots.
                reason = f"{event.name} has been silent for {event.silent_seconds:.0f} s"
                self._fail(checkpoint, PeerLost(f"step {checkpoint.step}: {reason}"))
            else:
                self._check_staged(checkpoint)  # it had sent everything: the others finish it

    def _on_rank_back(self, event: RankBack) -> None:
        self._silent.pop(event.rank, None)

    def _on_flusher_gone(self, event: FlusherGone) -> None:
        self._no_flusher = event.reason
        for checkpoint in list(self._open.values()):
            self._check_staged(checkpoint)

    def _on_flusher_back(self, event: FlusherBack) -> None:
        self._no_flusher = ""
        self._on_slots_freed(SlotsFreed(event.freed))

    def _on_slots_freed(self, event: SlotsFreed) -> None:
        # One that is free already: freed while the stager attached, and seen in the journal before the message.
        strange = [slot for slot in event.slots if slot not in self._flusher_slots and slot not in self._free]
        if strange:
            raise ProtocolError(f"the flusher freed slots {list(event.slots)}; {strange} are not its own")
        for slot in self._flusher_slots.keys() & set(event.slots):
            del self._flusher_slots[slot]
            self._free.append(slot)
        for checkpoint in self._open.values():
            checkpoint.progress_at = self._now

    def _on_durable(self, event: Durable) -> None:
        checkpoint = self._open.get(event.step)
        if checkpoint is None and self.is_durable(event.step):
            return  # said again, by a flusher that was told again what the one before had made durable
        if checkpoint is None or checkpoint.phase is not Phase.STAGED:
            raise ProtocolError(f"the flusher says step {event.step} is durable; it is not staged")
        del self._open[event.step]
        tell = Tell(None, Kind.DURABLE, event.step, event.body)
        self._remember(tell)
        self._actions.append(tell)

    def _on_failed(self, event: Failed) -> None:
        checkpoint = self._open.get(event.step)
        if checkpoint is None or checkpoint.phase is Phase.ENDED:
            return
        body = {"code": event.code, "message": event.message}
        self._end(checkpoint, Tell(None, Kind.FAILED, event.step, body), event.message)

    def _on_tick(self, _event: Tick) -> None:
        for checkpoint in list(self._open.values()):
            overdue = checkpoint.overdue(
                self._now,
                self._offer_seconds_max,
                self._chunk_seconds_max,
                self._lost.keys(),
                no_flusher=self._no_flusher,
            )
            if overdue:
                self._fail(checkpoint, PeerLost(f"step {checkpoint.step}: {overdue}"))


def pickle_reserve_bytes(pickle_bytes: int) -> int:
    """Room for data.pkl: twice what it needs now, in steps of 64 KiB, so that a growing value seldom outgrows it."""
    unit = 64 * 1024
    return max(unit, (2 * pickle_bytes // unit + 1) * unit)
