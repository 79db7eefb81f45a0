"""Queue of the chunks of one checkpoint that have no slot yet. Pure.

    chunks  0 0 0 1 1 1 │ 0 1 1 1 1 1 │ …     0: has its slot    1: waits
    ranks   └─ slice 0 ─┘ └─ slice 1 ─┘       only the lowest waiting chunk of a rank may be next

The cost per frame does not depend on the number of ranks: a heap holds each rank's lowest waiting chunk, ordered by the
credits that the rank has out, and cursors that only advance find these chunks. Stale heap entries are dropped when they
reach the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from holdfast.image.layout import Layout

CREDITS_PER_RANK_MAX = 4  # enough to keep a rank sending; more would only take slots from other ranks
_WAITS = 1
_STALE_MIN = 64  # entries; the heap is rebuilt only when it has more than these beside the valid ones


class ChunkQueue:
    """Chunks that wait for a slot. Changed only by `stager.session.checkpoint.Checkpoint`. `remaining`: how many wait.

    `chunks`: the chunks of this stager's share; other chunks never wait here.
    """

    def __init__(self, layout: Layout, chunks: range) -> None:
        self._layout, self._ranks = layout, layout.ranks
        self.remaining = len(chunks)
        before, after = bytes(chunks.start), bytes(layout.chunks - chunks.stop)
        self._waiting = bytearray(before + bytes([_WAITS]) * len(chunks) + after)
        self._lowest = 0  # no chunk below this one waits
        self._incomplete = bytearray(before + bytes([1]) * len(chunks) + after)
        self._first = 0
        slices = [layout.slice_chunks(rank) for rank in range(layout.ranks)]
        self._ends = [own.stop for own in slices]
        self._cursors = [own.start for own in slices]
        self._credits_out = [0] * layout.ranks
        self._heap: list[tuple[int, int, int]] = []  # credits out, lowest chunk, rank
        self._stale_ranks = set(range(layout.ranks))  # ranks whose heap entries are stale

    # -- what changes --------------------------------------------------------------------------------------------

    def remove(self, chunk: int) -> None:
        """Remove `chunk`, which has its slot."""
        self.remaining -= 1
        self._waiting[chunk] = 0
        self._stale_ranks.add(self._layout.chunk_rank(chunk))

    def mark_complete(self, chunk: int) -> None:
        """Note that `chunk` is complete and belongs to the flusher."""
        self._incomplete[chunk] = 0

    def count_credit(self, rank: int, change: int) -> None:
        """Count a credit of `rank` that was granted (1) or settled (-1)."""
        self._credits_out[rank] += change
        self._stale_ranks.add(rank)

    # -- which is next -------------------------------------------------------------------------------------------

    @property
    def next_chunk(self) -> int | None:
        """The lowest chunk without a slot."""
        at = self._waiting.find(_WAITS, self._lowest)
        self._lowest = at if at >= 0 else len(self._waiting)
        return at if at >= 0 else None

    def part_end(self, part_chunks: int) -> int:
        """The first chunk after the lowest incomplete part; 0 if every chunk has its slot."""
        if not self.remaining:
            return 0
        self._first = first = self._incomplete.find(1, self._first)
        return first - first % part_chunks + part_chunks

    def missing_below(self, end: int) -> int:
        """How many of the chunks below `end` have no slot."""
        if end >= self._layout.chunks:
            return self.remaining
        following = self.next_chunk
        if following is None:
            return 0
        return self._waiting.count(_WAITS, following, end)

    def least_credited(self) -> int | None:
        """The lowest waiting chunk of the rank with the fewest credits; None if every rank has enough credits."""
        self._renew_heap()
        while self._heap:
            out, head, rank = self._heap[0]
            if out == self._credits_out[rank] and head == self._head(rank):
                return head
            heapq.heappop(self._heap)
        return None

    def least_credited_below(self, end: int) -> int | None:
        """As `least_credited`, among the chunks below `end`."""
        if end >= self._layout.chunks:
            return self.least_credited()
        heads: list[tuple[int, int]] = []  # at most one for each chunk of the part
        following = self.next_chunk
        while following is not None and following < end:
            rank = self._layout.chunk_rank(following)
            if 0 <= (head := self._head(rank)) < end:
                heads.append((self._credits_out[rank], head))
            following = self._ends[rank]
        out, chunk = min(heads, default=(0, None))
        return chunk if out < CREDITS_PER_RANK_MAX else None

    def lowest(self) -> int | None:
        """The lowest chunk without a slot; None if its rank has enough credits."""
        chunk = self.next_chunk
        if chunk is None or self._credits_out[self._layout.chunk_rank(chunk)] >= CREDITS_PER_RANK_MAX:
            return None
        return chunk

    def _head(self, rank: int) -> int:
        """The lowest waiting chunk of a rank's slice; -1 if no chunk waits."""
        at = self._waiting.find(_WAITS, self._cursors[rank], self._ends[rank])
        self._cursors[rank] = at if at >= 0 else self._ends[rank]
        return at

    def _renew_heap(self) -> None:
        ranks: Iterable[int] = self._stale_ranks
        if len(self._heap) + len(self._stale_ranks) > 2 * self._ranks + _STALE_MIN:
            ranks = range(self._ranks)
            self._heap.clear()
        for rank in ranks:
            out = self._credits_out[rank]
            if out < CREDITS_PER_RANK_MAX and (head := self._head(rank)) >= 0:
                heapq.heappush(self._heap, (out, head, rank))
        self._stale_ranks.clear()
