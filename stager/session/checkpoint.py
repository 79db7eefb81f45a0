"""One checkpoint in the stager's session: what has come, what is out, what may be granted next, who is late.

Changed only by `Session`, which draws the phases, and its slots; here is what concerns one checkpoint
by itself.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.image.layout import Layout

_CREDITS_PER_RANK_MAX = 4  # enough to keep a rank sending; more only holds slots that others could use


class Phase(Enum):
    """Phase of a checkpoint; see the drawing in `stager.session.session`."""

    OFFERING = "offering"
    PREPARED = "prepared"
    RECEIVING = "receiving"
    STAGED = "staged"
    ENDED = "ended"


@dataclass(slots=True)
class Credit:
    """One (chunk, rank): `received` and `crc` must both be there for it to be complete."""

    slot: int
    nbytes: int
    granted_at: float
    received: bool = False
    crc: int | None = None


@dataclass(slots=True)
class Checkpoint:
    """One checkpoint in flight, as the session knows it.

    Attributes:
        step: Its step. `ranks`: how many must send. `begun_at`: time of its first offer.
        progress_at: When it last came forward, for deadlines.
        digests: rank → layout digest it offered. `records`: rank → what it said. `done`: ranks that said DONE.
        fingerprints: rank → those of its replicas, of the ranks that sent them.
        part_chunks: How many chunks the flusher writes at a time.
        queues: Per rank, the chunks of its slice without a slot, ascending.
        ungranted: How many chunks that are, with those in `urgent`.
        urgent: The same, of those that are granted before the others (`Layout.urgent_chunks`); empty without any.
        open_slots: chunk → slot, while it is being filled.
        credits: (chunk, rank) → credit, until it is settled.
        complete: chunk → rank → crc, while it is being filled.
        frames_left: rank → frames not yet complete.
    """

    step: int
    ranks: int
    begun_at: float
    progress_at: float
    phase: Phase = Phase.OFFERING
    digests: dict[int, str] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    fingerprints: dict[int, tuple[int, ...]] = field(default_factory=dict)
    layout: Layout | None = None
    part_chunks: int = 1
    queues: list[deque[int]] = field(default_factory=list)
    ungranted: int = 0
    urgent: list[deque[int]] = field(default_factory=list)
    open_slots: dict[int, int] = field(default_factory=dict)
    credits: dict[tuple[int, int], Credit] = field(default_factory=dict)
    complete: dict[int, dict[int, int]] = field(default_factory=dict)
    frames_left: dict[int, int] = field(default_factory=dict)

    @property
    def under_way(self) -> bool:
        """Whether it is still being offered or received."""
        # A tuple: the hash of an enum is Python code, and this is asked at each turn.
        return self.phase in (Phase.OFFERING, Phase.PREPARED, Phase.RECEIVING)

    @property
    def handed_over(self) -> int:
        """How many chunks have come in whole and were handed to the flusher."""
        assert self.layout is not None
        return self.layout.chunks - self.ungranted - len(self.open_slots)

    @property
    def handed_over_fraction(self) -> float:
        return self.handed_over / self.layout.chunks if self.layout is not None else 0.0

    @property
    def next_chunk(self) -> int | None:
        """The lowest chunk without a slot."""
        return min((queue[0] for queue in self._waiting if queue), default=None)

    @property
    def _waiting(self) -> list[deque[int]]:
        return self.queues + self.urgent if self.urgent else self.queues

    def prepare(self, layout: Layout, now: float) -> None:
        """All ranks have offered it, with this layout."""
        self.layout, self.phase, self.progress_at = layout, Phase.PREPARED, now
        # Opening the upload may take a while and need not be waited for: until the flusher says how large its parts
        # are, the whole image counts as one, which is to say that chunks are granted strictly from the lowest.
        self.part_chunks = layout.chunks
        self.ungranted = layout.chunks
        self.queues = [deque(layout.slice_chunks(rank)) for rank in range(self.ranks)]
        if urgent := layout.urgent_chunks:
            self.urgent = [deque(filter(urgent.__contains__, queue)) for queue in self.queues]
            self.queues = [deque(itertools.filterfalse(urgent.__contains__, queue)) for queue in self.queues]
        self.frames_left = dict(enumerate(layout.frames))

    def owed_by(self, rank: int) -> bool:
        """Whether something of `rank` is still to come."""
        return self.phase is Phase.OFFERING or self.frames_left.get(rank, 0) > 0

    def lowest_part_missing(self) -> int:
        """How many slots the lowest incomplete part still needs; the flusher can always finish that part."""
        end = self._lowest_part_end()
        return sum(1 for queue in self._waiting for chunk in _below(queue, end))

    def choose(self, credits_out: Sequence[int], free: int) -> int | None:
        """The next chunk to get a slot, None if none may have one now.

        Args:
            credits_out: Per rank, how many credits it holds.
            free: Free slots that older checkpoints do not need.
        """
        heads = [queue[0] for queue in self.queues if queue]
        urgent = [queue[0] for queue in self.urgent if queue]
        if not (heads or urgent) or free <= 0:
            return None
        missing = self.lowest_part_missing()
        if urgent:
            # The lowest part keeps its slots, whatever is urgent: a chunk that is in it takes one of them.
            end = self._lowest_part_end()
            may = [head for head in urgent if free > missing or (head < end and free == missing)]
            chunk = self._next_of(may, credits_out)
            if chunk is not None:
                return chunk
            if self.phase is Phase.PREPARED and free <= sum(map(len, self.urgent)):
                return (
                    None  # what is left is for them, as soon as the flusher has said how large its parts are
                )
            heads += urgent
        if free <= missing:
            # What is left is kept for the lowest part: nothing can be flushed to the end before it. Until the flusher
            # has said how large its parts are, only the lowest chunk is known to be in it.
            end = self._lowest_part_end() if self.phase is Phase.RECEIVING else min(heads) + 1
            heads = [head for head in heads if head < end]
        return self._next_of(heads, credits_out)

    def _next_of(self, heads: Sequence[int], credits_out: Sequence[int]) -> int | None:
        """Of the lowest chunks of some ranks, that of the rank with the fewest credits; None if each has enough."""
        layout = self.layout
        assert layout is not None
        if not heads:
            return None
        chunk = min(heads, key=lambda head: (credits_out[layout.chunk_rank(head)], head))
        return chunk if credits_out[layout.chunk_rank(chunk)] < _CREDITS_PER_RANK_MAX else None

    def granted(self, chunk: int) -> None:
        """`chunk`, which `choose` has named, has its slot."""
        assert self.layout is not None
        self.ungranted -= 1
        rank = self.layout.chunk_rank(chunk)
        if self.urgent and self.urgent[rank] and self.urgent[rank][0] == chunk:
            self.urgent[rank].popleft()
        else:
            self.queues[rank].popleft()

    def _lowest_part_end(self) -> int:
        """The chunk after the lowest incomplete part; 0 if every chunk has its slot."""
        following = self.next_chunk
        if following is None:
            return 0
        first = min([following, *self.open_slots])
        return first - first % self.part_chunks + self.part_chunks

    def overdue(
        self,
        now: float,
        offer_seconds_max: float,
        chunk_seconds_max: float,
        lost: Collection[int],
        *,
        no_flusher: str = "",
    ) -> str:
        """Who was waited for too long, by whom, and for what; empty if nobody was. `no_flusher`: why there is none."""
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
        if no_flusher and (self.phase is Phase.PREPARED or self.next_chunk is not None):
            return f"the stager waited {limit:g} s for another flusher to make room in the ring: {no_flusher}"
        if self.phase is Phase.PREPARED:
            return f"the stager waited {limit:g} s for the flusher to take it"
        if self.next_chunk is not None:
            return f"the ring had no free slot for {limit:g} s; is the store slow, or the ring too small?"
        silent = [rank for rank in range(self.ranks) if rank not in self.done and rank not in lost]
        return f"the stager waited {limit:g} s for {_ranks(silent)} to say that all was sent"


def _below(queue: deque[int], end: int) -> Iterable[int]:
    return itertools.takewhile(lambda chunk: chunk < end, queue)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
