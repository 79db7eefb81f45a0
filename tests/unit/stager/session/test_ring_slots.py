"""Slots and credits: which chunk gets a slot, how long it keeps the slot, and which one is next."""

from __future__ import annotations

import pytest

from holdfast.errors import ProtocolError
from holdfast.telemetry.causes import DeclineCause
from stager.session.session_messages import (
    Abort,
    Began,
    CancelReceive,
    Decline,
    FillSlot,
    FlusherLost,
    FlusherReplaced,
    FreeSlot,
    MarkFull,
    RankLost,
    RankSilent,
    Received,
    Returned,
    Sent,
    SlotsAdded,
    SlotsFreed,
)
from tests.unit.stager.session.sessions import CHUNK, Stager, is_empty, make_layout, slots_of


@pytest.fixture
def stager() -> Stager:
    return Stager(make_layout())


def test_slots_are_filled_in_turn_so_that_the_newest_chunks_stay_for_longest(stager: Stager) -> None:
    stager.offer_all(5)
    stager.pay_all(5)
    assert [fill.slot for fill in stager.of(FillSlot)] == [0, 1, 2, 3, 4, 5]
    stager.take(SlotsFreed((0, 1, 2, 3, 4, 5)))
    stager.offer_all(6)
    stager.pay_all(6)
    assert [fill.slot for fill in stager.of(FillSlot)][6:] == [6, 7, 0, 1, 2, 3]


def test_slots_that_are_added_serve_at_once_and_before_those_that_a_restore_may_read() -> None:
    stager = Stager(make_layout(), slots=3)
    stager.offer_all(5)
    assert len(stager.of(FillSlot)) == 3
    actions = stager.take(SlotsAdded((3, 4)))
    assert [action.slot for action in actions if isinstance(action, FillSlot)] == [3, 4]
    stager.take(SlotsAdded((5, 6)))
    stager.pay_all(5)
    stager.take(SlotsFreed((0, 1, 2, 3, 4, 5)))
    stager.take(SlotsAdded((7, 8)))
    stager.offer_all(6)
    assert [fill.slot for fill in stager.of(FillSlot)][6:] == [7, 8, 6, 0, 1, 2]


def test_a_chunk_of_two_ranks_is_full_when_both_frames_are_in() -> None:
    stager = Stager(make_layout(last_owner=0))
    assert stager.layout.senders(5) == (0, 1)
    stager.offer_all(1)
    for rank, chunk in [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]:
        stager.pay(rank, 1, chunk)
    assert 5 not in {full.chunk for full in stager.of(MarkFull)}
    assert stager.credits == {(0, 1, 5): stager.credits[0, 1, 5]}
    slot = stager.credits[0, 1, 5]
    (full,) = stager.pay(0, 1, 5)
    assert full == MarkFull(slot, 1, 5, ((0, 5), (1, 1005)), stager.layout.chunk_extent(5).nbytes)


def test_payload_and_sent_may_come_in_either_order(stager: Stager) -> None:
    stager.offer_all(1)
    nbytes = stager.layout.chunk_extent(0).nbytes
    assert stager.take(Received(0, 1, 0)) == []
    assert any(isinstance(action, MarkFull) for action in stager.take(Sent(0, 1, 0, nbytes, 7)))


def test_a_decline_in_the_middle_keeps_slots_until_credits_are_settled(stager: Stager) -> None:
    stager.offer_all(1)
    stager.pay(0, 1, 0)
    stager.take(Decline(1, 1, DeclineCause.COPY_FAILED.because("of the test")))
    assert [abort.step for abort in stager.of(Abort)] == [1]
    free, filling, full = slots_of(stager.session)
    assert len(filling) == len(stager.credits) == 5
    (rank, step, chunk), slot = next(iter(stager.credits.items()))
    actions = stager.take(Returned(rank, step, chunk))
    assert actions == [CancelReceive(rank, slot), FreeSlot(slot)]
    del stager.credits[rank, step, chunk]
    # A payload that was on its way when the checkpoint ended is taken and dropped.
    (rank, step, chunk), slot = next(iter(stager.credits.items()))
    assert stager.pay(rank, step, chunk) == [FreeSlot(slot)]
    for rank, step, chunk in list(stager.credits):
        stager.take(Returned(rank, step, chunk))
    free, filling, full = slots_of(stager.session)
    assert (len(free), filling, len(full)) == (7, set(), 1)
    stager.take(SlotsFreed(tuple(full)))
    assert slots_of(stager.session)[0] == set(range(8))
    assert is_empty(stager.session)


def test_a_rank_lost_after_the_end_gives_its_slots_back(stager: Stager) -> None:
    stager.offer_all(1)
    stager.take(Decline(0, 1, DeclineCause.COPY_FAILED.because("of the test")))
    for credit in [credit for credit in stager.credits if credit[0] == 0]:
        stager.take(Returned(*credit))
    assert len(slots_of(stager.session)[1]) == 3
    stager.take(RankLost(1, "rank 1 is dead"))
    assert slots_of(stager.session)[0] == set(range(8))
    assert is_empty(stager.session)


def test_the_oldest_checkpoint_gets_the_slots() -> None:
    stager = Stager(make_layout(chunks=12), slots=3)
    stager.offer_all(1)
    stager.offer_all(2)
    for _ in range(8):
        due = next(credit for credit in stager.credits if credit[1] == 1)
        stager.pay(*due)
        stager.take(SlotsFreed(tuple(slots_of(stager.session)[2])))
    assert {fill.step for fill in stager.of(FillSlot)[:8]} == {1}


def test_credits_are_shared_out_evenly() -> None:
    stager = Stager(make_layout(chunks=40, ranks=4), slots=9)
    stager.offer_all(1)
    by_rank = [sum(rank == credit[0] for credit in stager.credits) for rank in range(4)]
    assert sum(by_rank) == 9
    # Rank 0 got its four before the flusher began; the rest is even.
    assert by_rank == [4, 2, 2, 1]


def test_before_the_flusher_says_how_large_parts_are_chunks_are_granted_from_the_lowest() -> None:
    stager = Stager(make_layout(chunks=24), slots=4)
    stager.offer_all(1, began=False)
    assert {chunk for _, _, chunk in stager.credits} == {0, 1, 2, 3}
    stager.pay_all(1)
    stager.take(SlotsFreed((0, 1, 2)))
    assert {chunk for _, _, chunk in stager.credits} == {4, 5, 6}


@pytest.mark.parametrize("part_chunks", [1, 2, 3])
def test_slots_are_kept_for_the_lowest_part(part_chunks: int) -> None:
    """Without this rule a ring full of high chunks, whose CRC fields wait for low ones, would never move again."""
    stager = Stager(make_layout(chunks=24), slots=4)
    stager.offer_all(1, began=False)
    stager.take(Began(1, part_chunks))
    # Rank 0, who has the low chunks, is slow; rank 1 is fast.
    for _ in range(30):
        fast = [credit for credit in stager.credits if credit[0] == 1]
        if not fast:
            break
        stager.pay(*fast[0])
    low = {chunk for _, _, chunk in stager.credits}
    free, _, _ = slots_of(stager.session)
    assert low | set(range(len(low), len(low) + len(free))) >= set(range(part_chunks))


def test_slots_that_the_dead_flusher_freed_serve_again(stager: Stager) -> None:
    stager.offer_all(1)
    stager.pay_all(1)
    slots = sorted(stager.session.flusher_slots)
    stager.take(FlusherLost("killed"))
    stager.take(FlusherReplaced(tuple(slots[:2])))
    assert sorted(stager.session.flusher_slots) == slots[2:]
    assert slots_of(stager.session)[0] >= set(slots[:2])


def test_a_silent_rank_that_turns_out_to_be_dead_gives_its_slots_back(stager: Stager) -> None:
    stager.offer_all(1)
    stager.take(RankSilent(1, "rank 1", 31.0))
    for rank, step, chunk in [credit for credit in stager.credits if credit[0] == 0]:
        stager.take(Returned(rank, step, chunk))
    assert slots_of(stager.session)[1]
    stager.take(RankLost(1, "rank 1 is dead"))
    assert slots_of(stager.session) == (set(range(8)), set(), set())


def test_sent_twice_is_refused(stager: Stager) -> None:
    stager.offer_all(1)
    stager.take(Sent(0, 1, 0, CHUNK, 7))
    with pytest.raises(ProtocolError, match="twice"):
        stager.take(Sent(0, 1, 0, CHUNK, 7))
