"""One checkpoint in the stager's session: received chunks, open credits, the next chunk to grant, late ranks.

Changed only by `Session`, which draws the phases, and its slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from stager.session.chunk_queue import ChunkQueue


class Phase(Enum):
    """Phase of a checkpoint, as drawn in `stager.session.session`."""

    OFFERING = "offering"
    PREPARED = "prepared"
    RECEIVING = "receiving"
    STAGED = "staged"
    ENDED = "ended"


@dataclass(slots=True)
class Credit:
    """Permission for one rank to send its part of one chunk; complete once `received` and `crc` are both set."""

    slot: int
    nbytes: int
    granted_at: float
    received: bool = False
    crc: int | None = None


@dataclass(slots=True)
class Checkpoint:
    """One checkpoint in flight, as the session knows it.

    Attributes:
        ranks: How many must send. `begun_at`: time of the first offer.
        digests: rank → layout digest it offered. `records`: rank → its record. `done`: ranks that sent DONE.
        fingerprints: rank → fingerprints of its replicas, if it sent them.
        early_fingerprints: The same, as they came before the layout was known.
        chunks: The chunks that this stager receives: all of them, or its share.
        part_chunks: How many chunks the flusher writes at a time.
        queue: The chunks without a slot; None until all ranks have offered, and after the end.
        open_slots: chunk → slot, while the chunk is being filled.
        credits: (chunk, rank) → unsettled credit. `unsettled`: chunk → number of its unsettled credits.
        complete: chunk → rank → crc, while the chunk is being filled.
        frames_left: rank → number of incomplete frames. `frames_missing`: the same over all ranks.
    """

    step: int
    ranks: int
    begun_at: float
    progress_at: float
    phase: Phase = Phase.OFFERING
    digests: dict[int, str] = field(default_factory=dict)
    records: dict[int, SaveRecord] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    fingerprints: dict[int, tuple[int, ...]] = field(default_factory=dict)
    early_fingerprints: dict[int, Any] = field(default_factory=dict)
    layout: Layout | None = None
    chunks: range = range(0)
    part_chunks: int = 1
    queue: ChunkQueue | None = None
    open_slots: dict[int, int] = field(default_factory=dict)
    credits: dict[tuple[int, int], Credit] = field(default_factory=dict)
    unsettled: dict[int, int] = field(default_factory=dict)
    complete: dict[int, dict[int, int]] = field(default_factory=dict)
    frames_left: dict[int, int] = field(default_factory=dict)
    frames_missing: int = 0

    @property
    def under_way(self) -> bool:
        """Whether the checkpoint is still being offered or received."""
        # A tuple, not a set: hashing an enum runs Python code, and this property is read at each turn.
        return self.phase in (Phase.OFFERING, Phase.PREPARED, Phase.RECEIVING)

    @property
    def handed_over(self) -> int:
        """How many chunks are complete and were handed to the flusher."""
        return len(self.chunks) - self.ungranted - len(self.open_slots)

    @property
    def handed_over_fraction(self) -> float:
        return self.handed_over / len(self.chunks) if self.chunks else 0.0

    @property
    def ungranted(self) -> int:
        """How many chunks have no slot yet."""
        return 0 if self.queue is None else self.queue.remaining

    @property
    def next_chunk(self) -> int | None:
        """The lowest chunk without a slot."""
        return None if self.queue is None else self.queue.next_chunk

    def prepare(self, layout: Layout, chunks: range, now: float) -> None:
        """Begin to receive: all ranks have offered this layout, of which this stager receives `chunks`."""
        self.layout, self.chunks, self.phase, self.progress_at = layout, chunks, Phase.PREPARED, now
        # Do not wait for the flusher to open the upload: until it reports its part size, the whole image counts as one
        # part, so chunks are granted strictly from the lowest.
        self.part_chunks = layout.chunks
        self.queue = ChunkQueue(layout, chunks)
        self.frames_left = dict(enumerate(_frames_in(layout, chunks)))
        self.frames_missing = sum(self.frames_left.values())

    def is_waiting_for(self, rank: int) -> bool:
        """Whether `rank` has still to offer or to send."""
        return self.phase is Phase.OFFERING or self.frames_left.get(rank, 0) > 0

    def lowest_part_missing(self) -> int:
        """How many slots the lowest incomplete part still needs; the flusher can finish that part first."""
        queue = self.queue
        return 0 if queue is None else queue.missing_below(queue.part_end(self.part_chunks))

    def choose_chunk(self, free: int) -> int | None:
        """The next chunk to get a slot, given `free` slots; None if no chunk may have one now."""
        queue = self.queue
        if queue is None or not queue.remaining or free <= 0:
            return None
        end = queue.part_end(self.part_chunks)
        if free > queue.missing_below(end):
            return queue.least_credited()
        # Keep the remaining slots for the lowest part, the only one that is sure to be flushed. Until the flusher has
        # reported its part size, only the lowest chunk is known to be in it.
        return queue.least_credited_below(end) if self.phase is Phase.RECEIVING else queue.lowest()

    def assign_slot(self, chunk: int, slot: int) -> None:
        """Note the slot of `chunk`, which `choose_chunk` has returned."""
        assert self.queue is not None
        self.queue.remove(chunk)
        self.open_slots[chunk], self.complete[chunk] = slot, {}

    def add_credit(self, chunk: int, rank: int, credit: Credit) -> None:
        """Note the credit of `rank` for its part of `chunk`."""
        self.credits[chunk, rank] = credit
        self.unsettled[chunk] = self.unsettled.get(chunk, 0) + 1
        if self.queue is not None:
            self.queue.count_credit(rank, 1)

    def settle_credit(self, chunk: int, rank: int) -> Credit:
        """Remove the credit of `rank` for `chunk`, which is settled."""
        self.unsettled[chunk] -= 1
        if not self.unsettled[chunk]:
            del self.unsettled[chunk]
        if self.queue is not None:
            self.queue.count_credit(rank, -1)
        return self.credits.pop((chunk, rank))

    def hand_over(self, chunk: int) -> int:
        """Hand a complete chunk to the flusher; return its slot."""
        if self.queue is not None:
            self.queue.mark_complete(chunk)
        return self.open_slots.pop(chunk)

    def overdue_text(
        self,
        now: float,
        offer_seconds_max: float,
        chunk_seconds_max: float,
        lost: Collection[int],
        *,
        no_flusher: str = "",
    ) -> str:
        """Return a message about a missed deadline: who waits, for whom and for what; empty if none has passed.
        `no_flusher`: why no flusher is connected; empty if one is.
        """
        if not self.under_way:
            return ""
        if self.phase is Phase.OFFERING:
            if now - self.begun_at <= offer_seconds_max:
                return ""
            missing = _ranks([rank for rank in range(self.ranks) if rank not in self.digests])
            return (
                f"the stager waited {offer_seconds_max:g} s for the offer of {missing}; is a rank slow, stopped, or "
                "saving other steps than the rest?"
            )
        limit = chunk_seconds_max
        late = [place for place, credit in self.credits.items() if now - credit.granted_at > limit]
        if late:
            chunk, rank = min(late)
            return f"the stager granted chunk {chunk} to rank {rank} and it did not arrive within {limit:g} s"
        if self.credits or now - self.progress_at <= limit:
            return ""
        if self.next_chunk is not None:
            if no_flusher:
                return f"the stager waited {limit:g} s for another flusher to make room in the ring: {no_flusher}"
            return f"the ring had no free slot for {limit:g} s; is the store slow, or the ring too small?"
        silent = [rank for rank in range(self.ranks) if rank not in self.done and rank not in lost]
        return f"the stager waited {limit:g} s for {_ranks(silent)} to say that all was sent"


def _frames_in(layout: Layout, chunks: range) -> Sequence[int]:
    """For each rank, the number of frames that it sends into these chunks."""
    if len(chunks) == layout.chunks:
        return layout.frames
    frames = [0] * layout.ranks
    for chunk in chunks:
        for rank in layout.senders(chunk):
            frames[rank] += 1
    return frames


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
