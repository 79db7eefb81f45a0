"""The fast choice of the next chunk equals that of a search over all ranks."""

from __future__ import annotations

import random

import pytest

from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.layout import Layout
from holdfast.image.shares import Shares
from stager.session.checkpoint import Checkpoint, Credit, Phase
from stager.session.chunk_queue import CREDITS_PER_RANK_MAX, ChunkQueue
from stager.session.session_messages import Began, GrantCredit, SlotsFreed
from tests.unit.stager.session.sessions import CHUNK, Stager, make_layout


class _PlainQueue:
    """The same rules, each time by a look at every rank and every chunk."""

    def __init__(self, layout: Layout, share: range) -> None:
        self.layout = layout
        self.queues = [
            [chunk for chunk in layout.slice_chunks(rank) if chunk in share] for rank in range(layout.ranks)
        ]
        self.open: set[int] = set()
        self.credits_out = [0] * layout.ranks

    @property
    def waiting(self) -> list[int]:
        return sorted(chunk for queue in self.queues for chunk in queue)

    def end(self, part_chunks: int) -> int:
        if not self.waiting:
            return 0
        first = min([*self.waiting, *self.open])
        return first - first % part_chunks + part_chunks

    def missing(self, part_chunks: int) -> int:
        return sum(chunk < self.end(part_chunks) for chunk in self.waiting)

    def next_of(self, heads: list[int]) -> int | None:
        def key(head: int) -> tuple[int, int]:
            return self.credits_out[self.layout.chunk_rank(head)], head

        chunk = min(heads, key=key, default=None)
        return None if chunk is None or key(chunk)[0] >= CREDITS_PER_RANK_MAX else chunk

    def choose(self, free: int, part_chunks: int, phase: Phase) -> int | None:
        heads = [queue[0] for queue in self.queues if queue]
        if not heads or free <= 0:
            return None
        missing, end = self.missing(part_chunks), self.end(part_chunks)
        if free <= missing:
            end = end if phase is Phase.RECEIVING else min(heads) + 1
            heads = [head for head in heads if head < end]
        return self.next_of(heads)

    def take(self, chunk: int) -> None:
        for queue in self.queues:
            if chunk in queue:
                assert queue[0] == chunk, "not the lowest of its rank"
                queue.remove(chunk)
        self.open.add(chunk)


def _layout(dice: random.Random) -> Layout:
    ranks, chunks = dice.randint(1, 9), dice.randint(1, 60)
    nbytes, owner = chunks * CHUNK, dice.randrange(ranks)
    entries = (
        Entry("a", 64, nbytes - 2000, REPLICATED, ()),
        Entry("b", nbytes - 1900, 100, owner, ()),
    )
    return Layout(nbytes, CHUNK, ranks, entries if chunks > 1 else entries[1:])


def _play(seed: int) -> int:
    """Choose, grant, settle at random; how many chunks were chosen."""
    dice = random.Random(seed)
    layout = _layout(dice)
    began_after, part_chunks = dice.randint(0, 40), dice.choice((1, 2, 3, 8, 100))
    shares = Shares.of(layout, dice.choice((1, 1, 2, 3)), part_chunks)
    share = shares.chunks_of(dice.randrange(shares.count))
    plain, checkpoint = _PlainQueue(layout, share), Checkpoint(1, layout.ranks, 0.0, 0.0)
    checkpoint.prepare(layout, share, 0.0)
    assert checkpoint.frames_missing == sum(len(layout.senders(chunk)) for chunk in share)
    chosen = 0
    for turn in range(400):
        if turn == began_after:
            checkpoint.phase, checkpoint.part_chunks = Phase.RECEIVING, part_chunks
        free = dice.choice((0, 1, 2, 3, part_chunks, 70))
        expected = plain.choose(free, checkpoint.part_chunks, checkpoint.phase)
        where = f"seed {seed}, turn {turn}"
        assert checkpoint.choose_chunk(free) == expected, where
        assert checkpoint.lowest_part_missing() == plain.missing(checkpoint.part_chunks), where
        assert checkpoint.next_chunk == min(plain.waiting, default=None), where
        assert checkpoint.ungranted == len(plain.waiting), where
        if expected is not None and dice.random() < 0.7:
            chosen += 1
            plain.take(expected)
            checkpoint.assign_slot(expected, expected)
            for rank in layout.senders(expected):
                plain.credits_out[rank] += 1
                checkpoint.add_credit(expected, rank, Credit(expected, 1, 0.0))
        elif checkpoint.credits:
            chunk, rank = dice.choice(sorted(checkpoint.credits))
            plain.credits_out[rank] -= 1
            checkpoint.settle_credit(chunk, rank)
            if chunk not in checkpoint.unsettled:
                assert checkpoint.hand_over(chunk) == chunk
                plain.open.remove(chunk)
    return chosen


def test_the_next_chunk_is_that_of_a_look_at_all_ranks() -> None:
    assert sum(_play(seed) for seed in range(120)) > 2000


@pytest.mark.parametrize("slots", [8, 64, 2048])
def test_a_frame_costs_as_many_looks_at_512_ranks_as_at_2(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = ChunkQueue._head

    def counted(queue: ChunkQueue, rank: int) -> int:
        nonlocal looks
        looks += 1
        return look(queue, rank)

    monkeypatch.setattr(ChunkQueue, "_head", counted)
    per_frame = {}
    for ranks in (2, 512):
        looks, stager = 0, Stager(make_layout(chunks=2048, ranks=ranks), slots=slots)
        stager.offer_all(1, began=False)
        stager.take(Began(1, 4))
        begun, paid = looks, 0
        while stager.credits:
            rank, step, chunk = min(stager.credits, key=lambda credit: credit[2])
            slot = stager.credits[rank, step, chunk]
            stager.pay(rank, step, chunk)
            stager.take(SlotsFreed((slot,)))
            paid += 1
        assert paid == len(stager.of(GrantCredit)) == 2048
        per_frame[ranks] = (looks - begun) / paid
    assert per_frame[512] <= per_frame[2] + 2, per_frame
    assert per_frame[512] <= 12
