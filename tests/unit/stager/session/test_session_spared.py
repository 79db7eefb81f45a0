"""A rank that is spared hands over its own bytes first; after that its death ends nothing."""

from __future__ import annotations

from holdfast.image.entries import REPLICATED, SPLIT, Entry
from holdfast.image.layout import Layout
from holdfast.image.regions import Region, unite
from holdfast.wire.frames import Kind
from stager.session.session_messages import (
    Done,
    GrantCredit,
    HandedOver,
    MarkFull,
    MarkStaged,
    RankLost,
    SlotsFreed,
)
from tests.unit.stager.session.sessions import CHUNK, Stager

_CHUNKS, _PART = 24, 4
_OWN = Entry("own", (_CHUNKS - 1) * CHUNK + 8, 100, 2, ())
_LAYOUT = Layout(_CHUNKS * CHUNK, CHUNK, 3, (Entry("a", 64, 20 * CHUNK, REPLICATED, ()), _OWN))


def _begin(layout: Layout, slots: int) -> Stager:
    stager = Stager(layout, slots=slots)
    stager.offer_all(1, began=False)
    return stager


def _finish(stager: Stager) -> None:
    """The others send all; the flusher writes part after part, and frees their slots."""
    full: dict[int, int] = {}
    freed = 0
    while not stager.of(MarkStaged) and not stager.said(Kind.FAILED):
        due = [credit for credit in stager.credits if credit[0] != 2]
        assert due or len(full) > freed, "nothing moves any more"
        for credit in due:
            stager.pay(*credit)
        full |= {action.chunk: action.slot for action in stager.of(MarkFull)}
        while freed < _CHUNKS and all(chunk in full for chunk in range(freed, freed + _PART)):
            stager.take(SlotsFreed(tuple(full[chunk] for chunk in range(freed, freed + _PART))))
            freed += _PART
        if len(full) == _CHUNKS:
            for rank in (0, 1):
                stager.take(Done(rank, 1))


def test_it_hands_over_first_whatever_else_waits_and_then_may_die() -> None:
    for slots in (_PART + 1, 9, _CHUNKS, 60):
        stager = _begin(_LAYOUT.sparing((2,)), slots)
        stager.take_began(1, _PART)
        assert (2, 1, _CHUNKS - 1) in stager.credits, slots
        stager.pay(2, 1, _CHUNKS - 1)
        assert stager.of(HandedOver) == [HandedOver(2, 1)]
        stager.take(RankLost(2, "rank 2 is dead"))
        _finish(stager)
        assert [staged.step for staged in stager.of(MarkStaged)] == [1], slots


def test_without_that_the_same_death_ends_the_step() -> None:
    stager = _begin(_LAYOUT, 60)
    stager.take_began(1, _PART)
    stager.take(RankLost(2, "rank 2 is dead"))
    assert [tell.body["code"] for tell in stager.said(Kind.FAILED)] == ["peer_lost"]
    assert stager.of(HandedOver) == []


def test_a_spared_rank_that_has_not_handed_over_yet_ends_the_step_too() -> None:
    stager = _begin(_LAYOUT.sparing((2,)), 60)
    stager.take(RankLost(2, "rank 2 is dead"))
    assert [tell.body["code"] for tell in stager.said(Kind.FAILED)] == ["peer_lost"]


def test_one_that_owns_nothing_owes_nothing_from_the_start() -> None:
    stager = _begin(_LAYOUT.sparing((1,)), 60)
    assert stager.of(HandedOver) == [HandedOver(1, 1)]
    assert not [credit for credit in stager.of(GrantCredit) if credit.rank == 1]
    stager.take(RankLost(1, "rank 1 is dead"))
    assert stager.said(Kind.FAILED) == []


_SHARD = (_CHUNKS - 4) * CHUNK // 4


def _split(*shards: int) -> Layout:
    """Each rank holds one shard of four of a tensor; those of equal number are replicas."""
    pattern = unite((4, _SHARD), 1, [Region((shard, 0), (1, _SHARD)) for shard in shards])
    entry = Entry("a", 64, pattern.nbytes, SPLIT, ())
    return Layout(_CHUNKS * CHUNK, CHUNK, len(shards), (entry,), patterns=(pattern,))


def test_under_hsdp_its_replica_sends_all_and_it_may_die_at_once() -> None:
    layout = _split(0, 1, 2, 3, 0, 1, 2, 3).sparing((2,))
    stager = _begin(layout, 60)
    assert stager.of(HandedOver) == [HandedOver(2, 1)]
    stager.take_began(1, _PART)
    stager.take(RankLost(2, "rank 2 is dead"))
    stager.pay_all(1)
    assert not [credit for credit in stager.of(GrantCredit) if credit.rank == 2]
    for rank in {*range(8)} - {2}:
        stager.take(Done(rank, 1))
    assert [staged.step for staged in stager.of(MarkStaged)] == [1]


def test_under_fsdp_its_shard_goes_first_and_then_it_may_die() -> None:
    layout = _split(0, 1, 2, 3).sparing((2,))
    own = [chunk for chunk, _ in layout.sends(2)]
    assert min(own) > _PART, "not the lowest, which would be first anyhow"
    stager = _begin(layout, len(own) + _PART)
    stager.take_began(1, _PART)
    granted = [credit.chunk for credit in stager.of(GrantCredit) if credit.rank == 2]
    assert granted == own[: len(granted)]
    assert len(granted) >= 4, "as many as a rank may have out"
    while due := [credit for credit in stager.credits if credit[0] == 2 or credit[2] in own]:
        stager.pay(*due[0])
    assert stager.of(HandedOver) == [HandedOver(2, 1)]
    assert {action.chunk for action in stager.of(MarkFull)} <= {*own}, "nothing else was in the way"
    stager.take(RankLost(2, "rank 2 is dead"))
    assert stager.said(Kind.FAILED) == []


def test_under_fsdp_its_death_before_that_ends_the_step() -> None:
    stager = _begin(_split(0, 1, 2, 3).sparing((2,)), 60)
    stager.take_began(1, _PART)
    stager.take(RankLost(2, "rank 2 is dead"))
    assert [tell.body["code"] for tell in stager.said(Kind.FAILED)] == ["peer_lost"]


def test_a_ring_as_large_as_the_image_is_not_waited_for() -> None:
    """Nobody has said yet how large parts are: with room for all, it does not matter."""
    assert (2, 1, _CHUNKS - 1) in _begin(_LAYOUT.sparing((2,)), _CHUNKS).credits
    tight = _begin(_LAYOUT.sparing((2,)), 2)
    assert list(tight.credits) == [(0, 1, 0)], "one slot is kept until then"


def test_the_lowest_part_keeps_its_slots() -> None:
    """With room for one part alone, the turn of what is urgent comes when its part is the lowest."""
    stager = _begin(_LAYOUT.sparing((2,)), _PART)
    stager.take_began(1, _PART)
    assert not [credit for credit in stager.credits if credit[0] == 2]
    for part in range(_CHUNKS // _PART):
        for credit in list(stager.credits):
            stager.pay(*credit)
        chunks = range(part * _PART, (part + 1) * _PART)
        slots = {action.chunk: action.slot for action in stager.of(MarkFull)}
        stager.take(SlotsFreed(tuple(slots[chunk] for chunk in chunks)))
    for rank in range(3):
        stager.take(Done(rank, 1))
    assert [staged.step for staged in stager.of(MarkStaged)] == [1]
