"""The ring's slots as the session fills them: whose each one is, and which credits are out into it.

    FREE ── grant ─► filling, a credit for each sender ── payload and SENT of each ─► the flusher's ── freed ─► FREE
                       └── its checkpoint has ended, and its last credit is settled ─► FREE

Rules:
1. A slot belongs to the stager from FREE until CHUNK FULL, to the flusher from there until SLOTS FREED.
2. A credit is settled by payload and SENT both, or by RETURN, or by the loss of its rank; only then may its slot serve
   again. A checkpoint that has ended keeps the slots of unsettled credits, so a late payload never lands in another's.
3. The lowest incomplete part of the oldest checkpoint can always get slots, so a ring smaller than the image flows: a
   chunk of any other part, or of a newer checkpoint, is granted only while as many slots stay free as the lowest parts
   of all older checkpoints still need. A newer checkpoint therefore never blocks an older one, however many there are.
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
    """See the module. The actions that it returns must be carried out in order. Changed only by
    `stager.session.session.Session`.

    Args:
        free_slots: Slots of the ring that are free now; those to be filled first, first.
        flusher_slots: Slots that still hold chunks of an earlier job; the flusher will free them.

    Attributes:
        free: Taken from the front, given back at the end: a freed slot still has its chunk, for a restore, and the
            newest ones the longest.
        flushers: slot → (step, chunk) that was handed over in it; None: a chunk of an earlier job.
    """

    def __init__(self, free_slots: Iterable[int], flusher_slots: Iterable[int]) -> None:
        self.free = deque(free_slots)
        self.flushers: dict[int, tuple[int, int] | None] = dict.fromkeys(flusher_slots)

    def holding(self, step: int) -> tuple[int, ...]:
        """The flusher's slots with chunks of `step`, lowest chunk first."""
        chunks = sorted(
            (held[1], slot) for slot, held in self.flushers.items() if held is not None and held[0] == step
        )
        return tuple(slot for _, slot in chunks)

    def grant(self, checkpoints: Iterable[Checkpoint], now: float) -> list[Action]:
        """Give free slots to chunks: the oldest checkpoint first, within one fair over ranks (rules 2 and 3)."""
        actions: list[Action] = []
        reserved = 0  # slots that the lowest incomplete parts of older checkpoints still need
        for checkpoint in checkpoints:
            # A thousand senders to a chunk settle a thousand credits: what needs no look at all of them comes first.
            if len(self.free) <= reserved:
                break
            # A tuple: the hash of an enum is Python code.
            if checkpoint.phase not in (Phase.PREPARED, Phase.RECEIVING) or not checkpoint.ungranted:
                continue
            while (chunk := checkpoint.choose(len(self.free) - reserved)) is not None:
                actions += self._assign(checkpoint, chunk, now)
            reserved += checkpoint.lowest_part_missing()
        return actions

    def _assign(self, checkpoint: Checkpoint, chunk: int, now: float) -> list[Action]:
        layout = checkpoint.layout
        assert layout is not None
        slot = self.free.popleft()
        checkpoint.granted(chunk, slot)
        checkpoint.progress_at = now
        actions: list[Action] = [FillSlot(slot, checkpoint.step, chunk)]
        for rank in layout.senders(chunk):
            nbytes = sum(extent.nbytes for extent in layout.pieces(chunk, rank))
            checkpoint.credited(chunk, rank, Credit(slot, nbytes, now))
            actions.append(GrantCredit(rank, checkpoint.step, chunk, slot, layout))
        return actions

    def settle(
        self, checkpoint: Checkpoint | None, event: Sent | Received | Returned, now: float
    ) -> list[Action]:
        """A credit has come forward: its rank says what it has sent, its payload is there, or it is given back. Raises
        `ProtocolError`: the rank has no such credit, or may not say this of it; nothing has changed.
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
                checkpoint.settled(chunk, rank)
                return [CancelReceive(rank, credit.slot), *self._settle_ended(checkpoint, chunk)]
        return self._complete(checkpoint, chunk, rank, credit, now)

    def _complete(
        self, checkpoint: Checkpoint, chunk: int, rank: int, credit: Credit, now: float
    ) -> list[Action]:
        """See whether this has settled the credit, and it the chunk."""
        if not credit.received or credit.crc is None:
            return []
        checkpoint.settled(chunk, rank)
        checkpoint.progress_at = now
        if checkpoint.phase is Phase.ENDED:
            return self._settle_ended(checkpoint, chunk)
        checkpoint.frames_left[rank] -= 1
        checkpoint.frames_missing -= 1
        checkpoint.complete[chunk][rank] = credit.crc
        layout = checkpoint.layout
        assert layout is not None
        if len(checkpoint.complete[chunk]) < len(layout.senders(chunk)):
            return []
        slot = checkpoint.handed(chunk)
        sources = tuple(sorted(checkpoint.complete.pop(chunk).items()))
        self.flushers[slot] = (checkpoint.step, chunk)
        nbytes = layout.chunk_extent(chunk).nbytes
        return [MarkFull(slot, checkpoint.step, chunk, sources, nbytes)]

    def reclaim(self, checkpoint: Checkpoint, lost: Collection[int]) -> list[Action]:
        """A checkpoint has ended: take back its slots but those into which a living rank may still send."""
        actions: list[Action] = []
        for chunk, rank in list(checkpoint.credits):
            if rank in lost:
                actions.append(CancelReceive(rank, checkpoint.settled(chunk, rank).slot))
        for chunk in list(checkpoint.open_slots):
            actions += self._settle_ended(checkpoint, chunk)
        return actions

    def _settle_ended(self, checkpoint: Checkpoint, chunk: int) -> list[Action]:
        if chunk in checkpoint.unsettled:
            return []
        slot = checkpoint.open_slots.pop(chunk)
        self.free.appendleft(slot)  # what is in it is of no use
        return [FreeSlot(slot)]

    def freed(self, slots: Collection[int]) -> None:
        """The flusher has freed these. Raises `ProtocolError`: they are not its own."""
        # One that is free already: freed while the stager attached, and seen in the journal before the message.
        strange = [slot for slot in slots if slot not in self.flushers and slot not in self.free]
        if strange:
            raise ProtocolError(f"the flusher freed slots {list(slots)}, but {strange} do not belong to it")
        for slot in self.flushers.keys() & set(slots):
            del self.flushers[slot]
            self.free.append(slot)
