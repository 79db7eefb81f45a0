"""The chunks of one checkpoint that have no slot yet, and which of them is next. Pure.

    chunks  0 0 0 1 1 1 │ 0 1 1 2 1 1 │ …     0: has its slot    1: waits    2: waits, and is urgent
    ranks   └─ slice 0 ─┘ └─ slice 1 ─┘       of each rank only the lowest that waits may be next

A frame costs the same whatever the number of ranks: the ranks' lowest chunks lie in a heap, by the credits that their
rank has out, and what is below them is found by cursors that only go forward. An entry of the heap that is no longer
true is dropped when it comes to the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from holdfast.image.layout import Layout

CREDITS_PER_RANK_MAX = 4  # enough to keep a rank sending; more only holds slots that others could use
_WAITS, _URGENT = 1, 2
_STALE_MIN = 64  # entries; a heap is only made anew when there are more than these beside the true ones


class ChunkQueue:
    """See the module. Changed only by `stager.session.checkpoint.Checkpoint`.

    Attributes:
        left: How many chunks wait, those that are urgent among them.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._ranks = layout, layout.ranks
        self.left = layout.chunks
        self._waiting = bytearray([_WAITS]) * layout.chunks
        for chunk in layout.urgent_chunks:
            self._waiting[chunk] = _URGENT
        self.urgent_left = len(layout.urgent_chunks)
        self._marks = (_WAITS, _URGENT) if self.urgent_left else (_WAITS,)
        self._lowest = dict.fromkeys(self._marks, 0)  # no chunk below waits with this mark
        self._incomplete = bytearray([1]) * layout.chunks
        self._first = 0
        slices = [layout.slice_chunks(rank) for rank in range(layout.ranks)]
        self._ends = [own.stop for own in slices]
        self._cursors = {mark: [own.start for own in slices] for mark in self._marks}
        self._credits_out = [0] * layout.ranks
        self._heaps: dict[int, list[tuple[int, int, int]]] = {mark: [] for mark in self._marks}
        self._moved = set(range(layout.ranks))  # ranks whose entries in the heaps are not true any more

    # -- what changes --------------------------------------------------------------------------------------------

    def take(self, chunk: int) -> None:
        """`chunk` has its slot."""
        self.left -= 1
        self.urgent_left -= self._waiting[chunk] == _URGENT
        self._waiting[chunk] = 0
        self._moved.add(self._layout.chunk_rank(chunk))

    def handed_over(self, chunk: int) -> None:
        """`chunk` is whole and the flusher's."""
        self._incomplete[chunk] = 0

    def credit(self, rank: int, change: int) -> None:
        """A credit of `rank` was given out (1) or is settled (-1)."""
        self._credits_out[rank] += change
        self._moved.add(rank)

    # -- which is next -------------------------------------------------------------------------------------------

    @property
    def next_chunk(self) -> int | None:
        """The lowest chunk without a slot."""
        return min((at for mark in self._marks if (at := self._next_with(mark)) >= 0), default=None)

    def part_end(self, part_chunks: int) -> int:
        """The chunk after the lowest incomplete part; 0 if every chunk has its slot."""
        if not self.left:
            return 0
        self._first = first = self._incomplete.find(1, self._first)
        return first - first % part_chunks + part_chunks

    def missing_below(self, end: int) -> int:
        """How many of the chunks below `end` have no slot."""
        if end >= self._layout.chunks:
            return self.left
        following = self.next_chunk
        if following is None:
            return 0
        return sum(self._waiting.count(mark, following, end) for mark in self._marks)

    def fewest(self) -> int | None:
        """Of the lowest chunks of all ranks, that of the rank with the fewest credits; None if each has enough."""
        return self._top(_WAITS)

    def fewest_urgent(self, end: int | None = None) -> int | None:
        """The same, of those that are urgent, and below `end`."""
        if end is None or end >= self._layout.chunks:
            return self._top(_URGENT)
        return self._best(self._heads_below(end, (_URGENT,)))

    def fewest_below(self, end: int) -> int | None:
        """The same, of those below `end`, urgent or not."""
        if end < self._layout.chunks:
            return self._best(self._heads_below(end, self._marks))
        tops = (self._top(mark) for mark in self._marks)
        return self._best((top, self._layout.chunk_rank(top)) for top in tops if top is not None)

    def lowest(self) -> int | None:
        """The lowest chunk without a slot; None if its rank has enough credits."""
        chunk = self.next_chunk
        return None if chunk is None else self._best([(chunk, self._layout.chunk_rank(chunk))])

    # -- how it is found -----------------------------------------------------------------------------------------

    def _next_with(self, mark: int) -> int:
        at = self._waiting.find(mark, self._lowest[mark])
        self._lowest[mark] = at if at >= 0 else len(self._waiting)
        return at

    def _head(self, rank: int, mark: int) -> int:
        """The lowest chunk of a rank's slice that waits with this mark; -1 if there is none."""
        cursors = self._cursors[mark]
        at = self._waiting.find(mark, cursors[rank], self._ends[rank])
        cursors[rank] = at if at >= 0 else self._ends[rank]
        return at

    def _heads_below(self, end: int, marks: Iterable[int]) -> list[tuple[int, int]]:
        """`(chunk, rank)` of the lowest chunks below `end`: no more ranks than there are chunks from the first on."""
        found: list[tuple[int, int]] = []
        following = self.next_chunk
        while following is not None and following < end:
            rank = self._layout.chunk_rank(following)
            heads = [self._head(rank, mark) for mark in marks]
            found += [(head, rank) for head in heads if 0 <= head < end]
            following = self._ends[rank]
        return found

    def _best(self, heads: Iterable[tuple[int, int]]) -> int | None:
        out, chunk = min(((self._credits_out[rank], head) for head, rank in heads), default=(0, None))
        return chunk if out < CREDITS_PER_RANK_MAX else None

    def _top(self, mark: int) -> int | None:
        if mark not in self._heaps:
            return None
        self._tell_heaps()
        heap = self._heaps[mark]
        while heap:
            out, head, rank = heap[0]
            if out == self._credits_out[rank] and head == self._head(rank, mark):
                return head
            heapq.heappop(heap)
        return None

    def _tell_heaps(self) -> None:
        for mark, heap in self._heaps.items():
            ranks: Iterable[int] = self._moved
            if len(heap) + len(self._moved) > 2 * self._ranks + _STALE_MIN:
                ranks = range(self._ranks)
                heap.clear()
            for rank in ranks:
                out = self._credits_out[rank]
                if out < CREDITS_PER_RANK_MAX and (head := self._head(rank, mark)) >= 0:
                    heapq.heappush(heap, (out, head, rank))
        self._moved.clear()
