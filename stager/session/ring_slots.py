"""The ring's slots in the session: the owner of each slot, and the credits that are out into it.

    FREE ── grant ─► filling, a credit for each sender ── payload and SENT of each ─► the flusher's ── freed ─► FREE
                       └── its checkpoint has ended, and its last credit is settled ─► FREE

Rules:
1. A slot belongs to the stager from FREE until CHUNK FULL, to the flusher from there until SLOTS FREED.
2. A credit is settled by payload and SENT together, or by RETURN, or by the loss of its rank; only then is its slot
   reused. An ended checkpoint keeps the slots of unsettled credits, so a late payload never lands in another's chunk.
3. The lowest incomplete part of the oldest checkpoint can always get slots, so an image larger than the ring streams
   through: a chunk of another part, or of a newer checkpoint, is granted only while as many slots stay free as the
   lowest parts of all older checkpoints still need. A newer checkpoint therefore never blocks an older one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from holdfast.errors import ProtocolError
from stager.session.checkpoint import Checkpoint, Credit, Phase
from stager.session.session_messages import (
    Action,
    CancelReceive,
    FillSlot,
    FreeSlot,
    GrantCredit,
    MarkFull,
    Received,
    Returned,
    Sent,
)


class RingSlots:
    """Owners of all slots. The caller executes the returned actions in order. Changed only by
    `stager.session.session.Session`.

    Args:
        free_slots: The free slots of the ring, in the order in which to fill them.
        flusher_slots: Slots that still hold chunks of an earlier job; the flusher will free them.

    Attributes:
        free: Free slots, taken from the front and returned at the end: a freed slot keeps its chunk for a restore until
            it is reused, and the newest chunks stay longest.
        flusher_slots: slot → (step, chunk) that it holds for the flusher; None: a chunk of an earlier job.
    """

    def __init__(self, free_slots: Iterable[int], flusher_slots: Iterable[int]) -> None:
        self.free = deque(free_slots)
        self.flusher_slots: dict[int, tuple[int, int] | None] = dict.fromkeys(flusher_slots)

    def holding(self, step: int) -> tuple[int, ...]:
        """The flusher's slots with chunks of `step`, lowest chunk first."""
        chunks = sorted(
            (held[1], slot)
            for slot, held in self.flusher_slots.items()
            if held is not None and held[0] == step
        )
        return tuple(slot for _, slot in chunks)

    def grant(self, checkpoints: Iterable[Checkpoint], now: float) -> list[Action]:
        """Assign free slots to chunks: the oldest checkpoint first, fair among its ranks (rules 2 and 3)."""
        actions: list[Action] = []
        reserved = 0  # slots that the lowest incomplete parts of older checkpoints still need
        for checkpoint in checkpoints:
            # This runs at each event, a thousand times for a chunk with a thousand senders: cheap checks come first.
            if len(self.free) <= reserved:
                break
            # A tuple, not a set: hashing an enum runs Python code.
            if checkpoint.phase not in (Phase.PREPARED, Phase.RECEIVING) or not checkpoint.ungranted:
                continue
            while (chunk := checkpoint.choose_chunk(len(self.free) - reserved)) is not None:
                actions += self._assign(checkpoint, chunk, now)
            reserved += checkpoint.lowest_part_missing()
        return actions

    def _assign(self, checkpoint: Checkpoint, chunk: int, now: float) -> list[Action]:
        layout = checkpoint.layout
        assert layout is not None
        slot = self.free.popleft()
        checkpoint.assign_slot(chunk, slot)
        checkpoint.progress_at = now
        actions: list[Action] = [FillSlot(slot, checkpoint.step, chunk)]
        for rank in layout.senders(chunk):
            nbytes = sum(extent.nbytes for extent in layout.pieces(chunk, rank))
            checkpoint.add_credit(chunk, rank, Credit(slot, nbytes, now))
            actions.append(GrantCredit(rank, checkpoint.step, chunk, slot, layout))
        return actions

    def advance_credit(
        self, checkpoint: Checkpoint | None, event: Sent | Received | Returned, now: float
    ) -> list[Action]:
        """Advance a credit by SENT, its payload, or RETURN. Raises `ProtocolError`: the rank has no such credit, or the
        message does not fit its state; nothing has changed.
        """
        rank, step, chunk = event.rank, event.step, event.chunk
        credit = checkpoint.credits.get((chunk, rank)) if checkpoint is not None else None
        if checkpoint is None or credit is None:
            what = {Sent: "SENT", Received: "payload", Returned: "RETURN"}[type(event)]
            raise ProtocolError(
                f"rank {rank}: {what} for step {step}, chunk {chunk}, for which it has no credit"
            )
        match event:
            case Sent():
                if credit.crc is not None:
                    raise ProtocolError(f"rank {rank}: SENT twice for step {step}, chunk {chunk}")
                if event.nbytes != credit.nbytes:
                    raise ProtocolError(
                        f"rank {rank}: step {step}, chunk {chunk}: sent {event.nbytes} bytes, "
                        f"expected {credit.nbytes}"
                    )
                credit.crc = event.crc
            case Received():
                credit.received = True
            case Returned():
                if credit.crc is not None or credit.received:
                    raise ProtocolError(
                        f"rank {rank}: RETURN for step {step}, chunk {chunk}, which it has already sent"
                    )
                if checkpoint.phase is not Phase.ENDED:
                    raise ProtocolError(
                        f"rank {rank}: RETURN for step {step}, which has not ended; decline it first"
                    )
                checkpoint.settle_credit(chunk, rank)
                return [CancelReceive(rank, credit.slot), *self._free_if_settled(checkpoint, chunk)]
        return self._settle_if_complete(checkpoint, chunk, rank, credit, now)

    def _settle_if_complete(
        self, checkpoint: Checkpoint, chunk: int, rank: int, credit: Credit, now: float
    ) -> list[Action]:
        """Settle the credit if it is complete; hand over the chunk if that was its last credit."""
        if not credit.received or credit.crc is None:
            return []
        checkpoint.settle_credit(chunk, rank)
        checkpoint.progress_at = now
        if checkpoint.phase is Phase.ENDED:
            return self._free_if_settled(checkpoint, chunk)
        checkpoint.frames_left[rank] -= 1
        checkpoint.frames_missing -= 1
        checkpoint.complete[chunk][rank] = credit.crc
        layout = checkpoint.layout
        assert layout is not None
        if len(checkpoint.complete[chunk]) < len(layout.senders(chunk)):
            return []
        slot = checkpoint.hand_over(chunk)
        sources = tuple(sorted(checkpoint.complete.pop(chunk).items()))
        self.flusher_slots[slot] = (checkpoint.step, chunk)
        nbytes = layout.chunk_extent(chunk).nbytes
        return [MarkFull(slot, checkpoint.step, chunk, sources, nbytes)]

    def reclaim(self, checkpoint: Checkpoint, lost: Collection[int]) -> list[Action]:
        """Take back the slots of an ended checkpoint, except those into which a living rank may still send."""
        actions: list[Action] = []
        for chunk, rank in list(checkpoint.credits):
            if rank in lost:
                actions.append(CancelReceive(rank, checkpoint.settle_credit(chunk, rank).slot))
        for chunk in list(checkpoint.open_slots):
            actions += self._free_if_settled(checkpoint, chunk)
        return actions

    def _free_if_settled(self, checkpoint: Checkpoint, chunk: int) -> list[Action]:
        if chunk in checkpoint.unsettled:
            return []
        slot = checkpoint.open_slots.pop(chunk)
        self.free.appendleft(slot)  # first in line: it holds no chunk for a restore
        return [FreeSlot(slot)]

    def add_freed(self, slots: Collection[int]) -> None:
        """Take slots that the flusher has freed. Raises `ProtocolError`: a slot is not the flusher's."""
        # A slot may be free already: the journal said so when the stager attached, before this message.
        unowned = [slot for slot in slots if slot not in self.flusher_slots and slot not in self.free]
        if unowned:
            raise ProtocolError(f"the flusher freed slots {list(slots)}, but {unowned} do not belong to it")
        for slot in self.flusher_slots.keys() & set(slots):
            del self.flusher_slots[slot]
            self.free.append(slot)
