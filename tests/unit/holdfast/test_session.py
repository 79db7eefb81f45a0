"""The stager's session: scripted cases, then seeded random jobs whose invariants are checked after every event."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.layout import REPLICATED, Entry, Layout
from holdfast.session import IN_FLIGHT_MAX, Phase, Session, pickle_reserve_bytes
from holdfast.session_steps import (
    Abort,
    Action,
    Began,
    Begin,
    CancelReceive,
    ChunkFull,
    Decline,
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

CHUNK = 4096


def make_layout(chunks: int = 6, ranks: int = 2, *, last_owner: int = REPLICATED) -> Layout:
    nbytes = chunks * CHUNK - 100
    entries = (
        Entry("a", 64, nbytes - 400, REPLICATED, ()),
        Entry("b", nbytes - 300, 100, last_owner, ()),
    )
    return Layout(nbytes, CHUNK, ranks, entries)


def is_empty(session: Session) -> bool:
    """Nothing is under way at all; all that was staged is durable or failed."""
    return not session._open


def phases_of(session: Session) -> dict[int, Phase]:
    return {step: checkpoint.phase for step, checkpoint in session._open.items()}


def slots_of(session: Session) -> tuple[set[int], set[int], set[int]]:
    """Which slots are free, being filled, and the flusher's."""
    assert len(session._free) == len(set(session._free)), "a slot is free twice"
    filling = {slot for checkpoint in session._open.values() for slot in checkpoint.open_slots.values()}
    return set(session._free), filling, set(session._flusher_slots)


class Stager:
    """Drives a session and keeps its actions; the clock is a number."""

    def __init__(self, layout: Layout, *, slots: int = 8) -> None:
        self.layout = layout
        self.now = 0.0
        self.session = Session(
            ranks=layout.ranks, free_slots=range(slots), offer_seconds_max=60, chunk_seconds_max=120
        )
        self.credits: dict[tuple[int, int, int], int] = {}
        self.done: list[Action] = []
        self.take(NewLayout(layout))

    def take(self, event: Event) -> list[Action]:
        actions = self.session.handle(event, self.now)
        self.done += actions
        for action in actions:
            if isinstance(action, GrantCredit):
                self.credits[action.rank, action.step, action.chunk] = action.slot
        return actions

    def offer_all(self, step: int, *, began: bool = True) -> list[Action]:
        for rank in range(self.layout.ranks):
            actions = self.take(Offer(rank, step, self.layout.digest))
        return self.take(Began(step)) if began else actions

    def pay(self, rank: int, step: int, chunk: int) -> list[Action]:
        """The rank answers a credit as it should."""
        del self.credits[rank, step, chunk]
        nbytes = sum(extent.nbytes for extent in self.layout.pieces(chunk, rank))
        self.take(Sent(rank, step, chunk, nbytes, 1000 * rank + chunk))
        return self.take(Received(rank, step, chunk))

    def pay_all(self, step: int) -> None:
        while due := [credit for credit in self.credits if credit[1] == step]:
            self.pay(*due[0])

    def said(self, kind: Kind) -> list[Tell]:
        return [action for action in self.done if isinstance(action, Tell) and action.kind is kind]

    def of(self, kind: type[Action]) -> list[Any]:
        return [action for action in self.done if isinstance(action, kind)]


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


def test_a_checkpoint_from_offer_to_durable(stager: Stager) -> None:
    assert stager.take(Offer(0, 5, stager.layout.digest, {"saved_at_unix": 1.0})) == []
    granted = stager.take(Offer(1, 5, stager.layout.digest))
    assert granted[:2] == [Begin(5, stager.layout), FillSlot(0, 5, 0)]
    assert isinstance(granted[2], GrantCredit)
    stager.pay_all(5)
    stager.take(Done(0, 5, {"crc_seconds": 0.5}))
    assert stager.take(Began(5)) == [], "not before every rank has said DONE"
    (staged,) = stager.take(Done(1, 5))
    assert isinstance(staged, Staged)
    assert staged.records[0] == {"saved_at_unix": 1.0, "crc_seconds": 0.5}
    assert {full.chunk for full in stager.of(ChunkFull)} == set(range(6))
    assert sum(full.nbytes for full in stager.of(ChunkFull)) == stager.layout.image_bytes
    assert stager.take(Durable(5, {"file": "f"})) == [Tell(None, Kind.DURABLE, 5, {"file": "f"})]
    assert is_empty(stager.session)


def test_a_chunk_of_two_ranks_is_full_when_both_frames_are_in() -> None:
    stager = Stager(make_layout(last_owner=0))
    assert stager.layout.senders(5) == (0, 1)
    stager.offer_all(1)
    for rank, chunk in [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]:
        stager.pay(rank, 1, chunk)
    assert 5 not in {full.chunk for full in stager.of(ChunkFull)}
    assert stager.credits == {(0, 1, 5): stager.credits[0, 1, 5]}
    slot = stager.credits[0, 1, 5]
    (full,) = stager.pay(0, 1, 5)
    assert full == ChunkFull(slot, 1, 5, ((0, 5), (1, 1005)), stager.layout.chunk_extent(5).nbytes)


def test_payload_and_sent_may_come_in_either_order(stager: Stager) -> None:
    stager.offer_all(1)
    nbytes = stager.layout.chunk_extent(0).nbytes
    assert stager.take(Received(0, 1, 0)) == []
    assert any(isinstance(action, ChunkFull) for action in stager.take(Sent(0, 1, 0, nbytes, 7)))


def test_a_decline_is_told_to_all_and_gives_more_room_for_the_pickle(stager: Stager) -> None:
    stager.take(Offer(1, 4, stager.layout.digest))
    (tell,) = stager.take(Decline(0, 4, "outgrown", 200_000))
    assert isinstance(tell, Tell)
    assert (tell.rank, tell.kind, tell.step) == (None, Kind.DECLINED, 4)
    assert tell.body["new_pickle_reserve_bytes"] == pickle_reserve_bytes(200_000)
    assert "rank 0: outgrown" in tell.body["reason"]
    assert is_empty(stager.session)
    # A rank that offers it later gets the same answer, alone.
    assert stager.take(Offer(0, 4, stager.layout.digest)) == [Tell(0, Kind.DECLINED, 4, tell.body)]


def test_a_decline_in_the_middle_keeps_slots_until_credits_are_settled(stager: Stager) -> None:
    stager.offer_all(1)
    stager.pay(0, 1, 0)
    stager.take(Decline(1, 1, "copy failed"))
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
    stager.take(Decline(0, 1, "copy failed"))
    for credit in [credit for credit in stager.credits if credit[0] == 0]:
        stager.take(Returned(*credit))
    assert len(slots_of(stager.session)[1]) == 3
    stager.take(RankLost(1, "rank 1 is dead"))
    assert slots_of(stager.session)[0] == set(range(8))
    assert is_empty(stager.session)


def test_different_layouts_are_refused_with_rank_and_digests(stager: Stager) -> None:
    stager.take(Offer(0, 1, stager.layout.digest))
    (tell,) = stager.take(Offer(1, 1, "f" * 64))
    assert isinstance(tell, Tell)
    assert (tell.kind, tell.body["code"]) == (Kind.FAILED, "state")
    assert "rank 1" in tell.body["message"]
    assert "f" * 16 in tell.body["message"]


def test_a_layout_that_nobody_announced_is_refused(stager: Stager) -> None:
    stager.take(Offer(0, 1, "e" * 64))
    (tell,) = stager.take(Offer(1, 1, "e" * 64))
    assert isinstance(tell, Tell)
    assert tell.body["code"] == "protocol"


def test_an_older_step_is_refused(stager: Stager) -> None:
    stager.offer_all(9)
    (tell,) = stager.take(Offer(0, 8, stager.layout.digest))
    assert isinstance(tell, Tell)
    assert tell.kind is Kind.DECLINED
    assert "older than step 9" in tell.body["reason"]


def test_one_more_is_declined_while_as_many_are_received_as_ranks_may_hold(stager: Stager) -> None:
    for step in range(IN_FLIGHT_MAX):
        stager.offer_all(step)
        assert phases_of(stager.session)[step] is Phase.RECEIVING
    (tell,) = stager.take(Offer(0, IN_FLIGHT_MAX, stager.layout.digest))
    assert isinstance(tell, Tell)
    assert (tell.rank, tell.kind) == (None, Kind.DECLINED)
    assert "steps 0, 1, 2" in tell.body["reason"]


def test_a_rank_that_goes_on_to_another_step_ends_the_wait_for_the_first(stager: Stager) -> None:
    stager.take(Offer(0, 1, stager.layout.digest))
    actions = stager.take(Offer(1, 2, stager.layout.digest))
    tells = [action for action in actions if isinstance(action, Tell)]
    assert [(tell.kind, tell.step) for tell in tells] == [(Kind.FAILED, 1)]
    assert phases_of(stager.session) == {2: Phase.OFFERING}


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


def test_a_checkpoint_may_be_complete_before_the_flusher_began(stager: Stager) -> None:
    stager.offer_all(1, began=False)
    stager.pay_all(1)
    stager.take(Done(0, 1))
    stager.take(Done(1, 1))
    assert not stager.of(Staged)
    (staged,) = stager.take(Began(1))
    assert isinstance(staged, Staged)


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


def test_a_lost_rank_ends_what_it_still_owes_and_not_what_it_has_sent() -> None:
    stager = Stager(make_layout(), slots=12)
    stager.offer_all(1)
    stager.offer_all(2)
    for credit in [credit for credit in stager.credits if credit[:2] == (1, 1)]:
        stager.pay(*credit)
    slots_of_2 = {slot for (rank, step, _), slot in stager.credits.items() if (rank, step) == (1, 2)}
    actions = stager.take(RankLost(1, "rank 1 is dead"))
    assert {(a.rank, a.slot) for a in actions if isinstance(a, CancelReceive)} == {
        (1, slot) for slot in slots_of_2
    }
    assert [(t.step, t.body["code"]) for t in stager.said(Kind.FAILED)] == [(2, "peer_lost")]
    assert "rank 1 is dead" in stager.said(Kind.FAILED)[0].body["message"]
    stager.pay_all(1)
    stager.take(Done(0, 1))
    assert [staged.step for staged in stager.of(Staged)] == [1], "the survivor finishes it"
    (tell,) = stager.take(Offer(0, 3, stager.layout.digest))
    assert isinstance(tell, Tell)
    assert "rank 1 is dead" in tell.body["reason"]


# -- a flusher that dies and comes back ------------------------------------------------------------------------------


def test_what_another_flusher_is_told_follows_the_phases() -> None:
    stager = Stager(make_layout(3), slots=12)
    digest = stager.layout.digest
    stager.take(Offer(0, 1, digest))
    assert stager.session.known() == [], "an offer is between the stager and its ranks"
    stager.take(Offer(1, 1, digest))
    assert stager.session.known() == [Known(1, digest, (), handed_over=0, staged=False)]
    stager.take(Began(1))
    stager.pay(0, 1, 0)
    slot = stager.of(ChunkFull)[0].slot
    assert stager.session.known() == [Known(1, digest, (slot,), handed_over=1, staged=False)]
    stager.pay_all(1)
    for rank in range(2):
        stager.take(Done(rank, 1))
    slots = {action.chunk: action.slot for action in stager.of(ChunkFull)}
    assert stager.session.known() == [
        Known(1, digest, tuple(slots[chunk] for chunk in range(3)), handed_over=3, staged=True)
    ]
    stager.offer_all(2)
    stager.take(SlotsFreed((slots[0],)))
    assert [(known.step, known.slots, known.handed_over) for known in stager.session.known()] == [
        (1, (slots[1], slots[2]), 3),
        (2, (), 0),
    ]
    stager.take(Decline(1, 2, "busy"))
    stager.take(Durable(1))
    assert stager.session.known() == []
    assert stager.session.is_durable(1)
    assert not stager.session.is_durable(2)
    assert stager.take(Durable(1)) == [], "a flusher that was told again may say it again"


def test_began_again_changes_nothing(stager: Stager) -> None:
    stager.offer_all(1)
    stager.pay(0, 1, 0)
    before = (slots_of(stager.session), stager.session.outstanding(), phases_of(stager.session))
    assert stager.take(Began(1, 4)) == []
    assert (slots_of(stager.session), stager.session.outstanding(), phases_of(stager.session)) == before


def test_without_a_flusher_what_comes_in_whole_is_staged(stager: Stager) -> None:
    stager.offer_all(1, began=False)
    stager.take(FlusherGone("killed"))
    stager.pay_all(1)
    for rank in range(2):
        stager.take(Done(rank, 1))
    assert [staged.step for staged in stager.of(Staged)] == [1]
    assert stager.take(Began(1)) == [], "heard when the next flusher is told of it"
    assert stager.session.known()[0].staged


def test_what_was_whole_before_the_flusher_died_is_staged_when_it_dies(stager: Stager) -> None:
    stager.offer_all(1, began=False)
    stager.pay_all(1)
    for rank in range(2):
        stager.take(Done(rank, 1))
    assert not stager.of(Staged), "the flusher has yet to take it"
    stager.take(FlusherGone("killed"))
    assert [staged.step for staged in stager.of(Staged)] == [1]


def test_slots_that_the_dead_flusher_freed_serve_again(stager: Stager) -> None:
    stager.offer_all(1)
    stager.pay_all(1)
    slots = sorted(stager.session.flusher_slots)
    stager.take(FlusherGone("killed"))
    stager.take(FlusherBack(tuple(slots[:2])))
    assert sorted(stager.session.flusher_slots) == slots[2:]
    assert slots_of(stager.session)[0] >= set(slots[:2])


def test_a_wait_for_another_flusher_has_a_deadline_that_says_so() -> None:
    stager = Stager(make_layout(6), slots=4)
    stager.offer_all(1)
    stager.take(FlusherGone("process 7 has ended"))
    while stager.credits:
        stager.pay(*next(iter(stager.credits)))
    stager.now += 121
    stager.take(Tick())
    (told,) = stager.said(Kind.FAILED)
    assert told.body["message"] == (
        "step 1: the stager waited 120 s for another flusher to make room in the ring: process 7 has ended"
    )


# -- ranks that say nothing ------------------------------------------------------------------------------------------


def test_a_silent_rank_ends_what_waits_for_it_and_keeps_its_slots() -> None:
    stager = Stager(make_layout(), slots=12)
    stager.offer_all(1)
    stager.offer_all(2)
    for credit in [credit for credit in stager.credits if credit[:2] == (1, 1)]:
        stager.pay(*credit)
    its_slots = {slot for (rank, step, _), slot in stager.credits.items() if (rank, step) == (1, 2)}
    actions = stager.take(RankSilent(1, "rank 1 on host h (process 7)", 31.0))
    assert not [action for action in actions if isinstance(action, CancelReceive)], "it may wake up and send"
    assert [tell.body["message"] for tell in stager.said(Kind.FAILED)] == [
        "step 2: rank 1 on host h (process 7) has been silent for 31 s"
    ]
    assert its_slots <= slots_of(stager.session)[1]
    stager.pay_all(1)
    stager.take(Done(0, 1))
    assert [staged.step for staged in stager.of(Staged)] == [1], "it had sent all of that one"
    stager.now += 10
    (tell,) = stager.take(Offer(0, 3, stager.layout.digest))
    assert isinstance(tell, Tell)
    assert "rank 1 on host h (process 7) has been silent for 41 s" in tell.body["reason"]
    stager.take(RankBack(1))
    for rank, step, chunk in [credit for credit in stager.credits if credit[1] == 2]:
        stager.take(Returned(rank, step, chunk))
    stager.offer_all(4)
    assert phases_of(stager.session) == {1: Phase.STAGED, 4: Phase.RECEIVING}


def test_a_silent_rank_that_turns_out_to_be_dead_gives_its_slots_back(stager: Stager) -> None:
    stager.offer_all(1)
    stager.take(RankSilent(1, "rank 1", 31.0))
    for rank, step, chunk in [credit for credit in stager.credits if credit[0] == 0]:
        stager.take(Returned(rank, step, chunk))
    assert slots_of(stager.session)[1]
    stager.take(RankLost(1, "rank 1 is dead"))
    assert slots_of(stager.session) == (set(range(8)), set(), set())


def test_an_offer_that_waits_for_a_silent_rank_ends(stager: Stager) -> None:
    stager.take(Offer(0, 1, stager.layout.digest))
    stager.take(RankSilent(1, "rank 1", 31.0))
    assert [tell.step for tell in stager.said(Kind.FAILED)] == [1]


# -- deadlines -------------------------------------------------------------------------------------------------------


def test_deadline_of_an_offer_names_who_is_missing(stager: Stager) -> None:
    stager.take(Offer(0, 1, stager.layout.digest))
    stager.now = 60.0
    assert stager.take(Tick()) == []
    stager.now = 60.1
    (tell,) = stager.take(Tick())
    assert isinstance(tell, Tell)
    assert "60 s for the offer of rank 1" in tell.body["message"]


def test_deadline_of_a_chunk_names_rank_and_chunk(stager: Stager) -> None:
    stager.offer_all(1)
    for credit in [credit for credit in stager.credits if credit[0] == 0]:
        stager.pay(*credit)
    stager.now = 121.0
    stager.take(Tick())
    assert "chunk 3 to rank 1" in stager.said(Kind.FAILED)[0].body["message"]


def test_deadline_of_room_blames_the_store() -> None:
    stager = Stager(make_layout(chunks=8), slots=4)
    stager.offer_all(1)
    stager.pay_all(1)
    stager.now = 121.0
    stager.take(Tick())
    assert "ring had no free slot" in stager.said(Kind.FAILED)[0].body["message"]


def test_deadline_of_the_flusher(stager: Stager) -> None:
    stager.offer_all(1, began=False)
    stager.pay_all(1)
    stager.now = 121.0
    stager.take(Tick())
    assert "flusher to take it" in stager.said(Kind.FAILED)[0].body["message"]


def test_deadline_of_done(stager: Stager) -> None:
    stager.offer_all(1)
    stager.pay_all(1)
    stager.take(Done(0, 1))
    stager.now = 121.0
    stager.take(Tick())
    assert "rank 1 to say that all was sent" in stager.said(Kind.FAILED)[0].body["message"]


def test_the_flushers_failure_is_told(stager: Stager) -> None:
    stager.offer_all(1)
    stager.take(Failed(1, "store", "disk full"))
    assert stager.said(Kind.FAILED)[0].body == {"code": "store", "message": "disk full"}
    assert stager.take(Failed(1, "store", "again")) == []


def test_refusing_all_ends_everything_and_every_later_offer(stager: Stager) -> None:
    stager.offer_all(1)
    stager.session.refuse_all("the flusher ended")
    (tell,) = stager.take(Offer(0, 2, stager.layout.digest))
    assert isinstance(tell, Tell)
    assert tell.body["reason"] == "the flusher ended"


def test_another_flushers_ring_is_taken_up(stager: Stager) -> None:
    stager.offer_all(1)
    stager.session.refuse_all("the flusher ended")
    for rank, step, chunk in list(stager.credits):
        stager.take(Returned(rank, step, chunk))
    stager.credits.clear()
    assert not stager.session.outstanding()
    stager.session.reopen(free_slots=range(3), flusher_slots=[3])
    assert slots_of(stager.session) == ({0, 1, 2}, set(), {3})
    stager.offer_all(2)
    assert len(stager.credits) == 3


@pytest.mark.parametrize(
    "event",
    [
        Offer(0, 1, "d"),
        Sent(0, 1, 0, 1, 7),
        Sent(0, 1, 99, CHUNK, 7),
        Sent(0, 2, 0, CHUNK, 7),
        Sent(1, 1, 0, CHUNK, 7),
        Received(1, 1, 0),
        Returned(0, 1, 0),
        Returned(0, 1, 99),
        Durable(1),
        Durable(77),
        SlotsFreed((0,)),
        SlotsFreed((10**6,)),
        NewLayout(make_layout(ranks=3)),
    ],
    ids=repr,
)
def test_what_the_protocol_does_not_allow_changes_nothing(stager: Stager, event: Event) -> None:
    stager.offer_all(1)
    before = (slots_of(stager.session), stager.session.outstanding(), phases_of(stager.session))
    with pytest.raises(ProtocolError):
        stager.take(event)
    assert (slots_of(stager.session), stager.session.outstanding(), phases_of(stager.session)) == before


def test_sent_twice_is_refused(stager: Stager) -> None:
    stager.offer_all(1)
    stager.take(Sent(0, 1, 0, CHUNK, 7))
    with pytest.raises(ProtocolError, match="twice"):
        stager.take(Sent(0, 1, 0, CHUNK, 7))


@pytest.mark.parametrize(
    ("needed", "given"), [(0, 65536), (1, 65536), (32767, 65536), (32768, 131072), (70_000, 196608)]
)
def test_pickle_reserve(needed: int, given: int) -> None:
    assert pickle_reserve_bytes(needed) == given


# -- random jobs ---------------------------------------------------------------------------------------------------


class Job:
    """A whole job by chance: ranks that offer, decline, stall, fall silent and die; a flusher that frees parts only in
    the order in which CRCs become known (the worst one: a chunk can be written when all chunks below it are in), and
    that is killed and comes back, its last words lost.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ranks = self.draw.randint(1, 4)
        self.slots = self.draw.randint(4, 10)
        self.part_chunks = self.draw.randint(1, 4)
        self.layout = self._layout()
        self.session = Session(
            ranks=self.ranks, free_slots=range(self.slots), offer_seconds_max=60, chunk_seconds_max=120
        )
        self.now = 0.0
        self.alive = set(range(self.ranks))
        self.next_step = dict.fromkeys(range(self.ranks), 0)
        self.owned: dict[int, str] = {}  # slot → who has it, as the actions say
        self.posted: set[tuple[int, int]] = set()  # (rank, slot) with a receive
        self.credits: dict[tuple[int, int, int], set[str]] = {}  # → what has come of it: "sent", "received"
        self.begun: dict[int, bool] = {}  # steps at the flusher → staged?
        self.full: dict[int, dict[int, int]] = {}  # step → chunk → slot
        self.freed_below: dict[int, int] = {}
        self.offered: dict[int, set[int]] = {}
        self.ended: dict[int, Kind] = {}
        self.mortal = self.draw.random() < 0.5
        self.silent: set[int] = set()
        self.flusher_lives = True
        self.freed_unheard: list[int] = []  # slots that a flusher freed when nobody heard it
        self.take(NewLayout(self.layout))

    def _layout(self) -> Layout:
        chunks = self.draw.randint(1, 24)
        nbytes = chunks * CHUNK - self.draw.randrange(CHUNK)
        entries, offset = [], 0
        while offset < nbytes - 50:
            size = self.draw.randrange(0, min(3 * CHUNK, nbytes - offset))
            entries.append(Entry(str(offset), offset, size, self.draw.randrange(-1, self.ranks), ()))
            offset += size + self.draw.randrange(0, 50) + 1
        return Layout(nbytes, CHUNK, self.ranks, tuple(entries))

    # The environment keeps its own books from the actions alone, and compares.

    def take(self, event: Event) -> None:
        for action in self.session.handle(event, self.now):
            self.follow(action)
        free, filling, full = slots_of(self.session)
        assert sorted([*free, *filling, *full]) == list(range(self.slots)), "a slot is lost or shared"
        assert {slot for slot, owner in self.owned.items() if owner == "stager"} == filling
        assert {slot for slot, owner in self.owned.items() if owner == "flusher"} == full

    def follow(self, action: Action) -> None:
        match action:
            case FillSlot(slot, _, _):
                assert slot not in self.owned, "granted a slot that is not free"
                self.owned[slot] = "stager"
            case GrantCredit(rank, step, chunk, slot):
                assert self.owned[slot] == "stager"
                assert rank in self.alive
                assert (rank, slot) not in self.posted, "two receives from one rank into one slot"
                self.posted.add((rank, slot))
                self.credits[rank, step, chunk] = set()
            case CancelReceive(rank, slot):
                self.posted.remove((rank, slot))
            case FreeSlot(slot):
                assert not any(s == slot for _, s in self.posted), "freed under a posted receive"
                assert self.owned.pop(slot) == "stager"
            case ChunkFull(slot, step, chunk, sources, _):
                assert not any(s == slot for _, s in self.posted)
                assert tuple(rank for rank, _ in sources) == self.layout.senders(chunk)
                self.owned[slot] = "flusher"
                self.full[step][chunk] = slot
            case Begin(step, _):
                assert step not in self.begun
                self.begun[step] = False
                self.full[step] = {}
                self.freed_below[step] = 0
            case Staged(step, _, _):
                assert self.begun[step] is False
                self.begun[step] = True
            case Abort(step, _):
                del self.begun[step]
            case Tell(_, kind, step, _):
                if kind in {Kind.DECLINED, Kind.FAILED, Kind.DURABLE}:
                    assert self.ended.setdefault(step, kind) == kind, "two verdicts on one step"

    # -- what may happen next

    def moves(self) -> list[Event]:
        moves: list[Event] = []
        for (rank, step, chunk), come in self.credits.items():
            if rank not in self.alive or rank in self.silent:
                continue
            nbytes = sum(extent.nbytes for extent in self.layout.pieces(chunk, rank))
            if step in self.ended and not come and self.draw.random() < 0.5:
                moves.append(Returned(rank, step, chunk))
            elif "sent" not in come:
                moves.append(Sent(rank, step, chunk, nbytes, chunk))
            else:
                moves.append(Received(rank, step, chunk))
        if not self.flusher_lives:
            return moves
        moves += [
            Began(step, self.part_chunks)
            for step, p in phases_of(self.session).items()
            if p is Phase.PREPARED
        ]
        moves += self._flusher_moves()
        return moves

    def _flusher_moves(self) -> list[Event]:
        moves: list[Event] = []
        for step, full in self.full.items():
            if step not in self.begun:
                moves += [SlotsFreed((slot,)) for slot in full.values()]
                continue
            start = self.freed_below[step]
            part = range(start, min(start + self.part_chunks, self.layout.chunks))
            if part and all(chunk in full for chunk in part):
                moves.append(SlotsFreed(tuple(full[chunk] for chunk in part)))
            if self.begun[step] and start >= self.layout.chunks:
                moves.append(Durable(step))
        return moves

    def play(self, event: Event) -> None:
        match event:
            case Sent(rank, step, chunk):
                self.credits[rank, step, chunk].add("sent")
            case Received(rank, step, chunk):
                slot = next(
                    s for r, st, c, s in self.session.outstanding() if (r, st, c) == (rank, step, chunk)
                )
                self.posted.remove((rank, slot))
                del self.credits[rank, step, chunk]
            case Returned(rank, step, chunk):
                del self.credits[rank, step, chunk]
            case SlotsFreed(slots):
                self._free(slots)
            case Durable(step):
                del self.begun[step]
        self.take(event)
        if isinstance(event, Received):
            self._say_done(event.rank, event.step)

    def _free(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            assert self.owned.pop(slot) == "flusher"
        for step, full in self.full.items():
            gone = [chunk for chunk, slot in full.items() if slot in slots]
            for chunk in gone:
                del full[chunk]
            if gone and step in self.begun:
                self.freed_below[step] = max(gone) + 1

    def kill_flusher(self) -> None:
        """Some of what it did last, nobody hears."""
        self.flusher_lives = False
        freed = [move for move in self._flusher_moves() if isinstance(move, SlotsFreed)]
        self.freed_unheard = [slot for move in freed if self.draw.random() < 0.5 for slot in move.slots]
        self.take(FlusherGone("killed"))

    def next_flusher(self) -> None:
        """Another one: what it is told is what the books say."""
        told = {known.step: (set(known.slots), known.staged) for known in self.session.known()}
        assert told == {step: (set(self.full[step].values()), staged) for step, staged in self.begun.items()}
        self._free(tuple(self.freed_unheard))
        freed, self.freed_unheard, self.flusher_lives = tuple(self.freed_unheard), [], True
        self.take(FlusherBack(freed))

    def fall_silent(self) -> None:
        rank = self.draw.choice(sorted(self.alive))
        if rank in self.silent:
            self.silent.discard(rank)
            self.take(RankBack(rank))
        else:
            self.silent.add(rank)
            self.take(RankSilent(rank, f"rank {rank}", 31.0))

    def _say_done(self, rank: int, step: int) -> None:
        outstanding = {(r, s) for r, s, _, _ in self.session.outstanding()}
        if (rank, step) not in outstanding:
            self.take(Done(rank, step))

    def offer(self) -> None:
        heard = sorted(self.alive - self.silent)
        if not heard:
            return
        rank = self.draw.choice(heard)
        step = self.next_step[rank]
        self.next_step[rank] += 1
        self.offered.setdefault(step, set()).add(rank)
        chance = self.draw.random()
        if chance < 0.1:
            self.take(Decline(rank, step, "busy"))
        elif chance > 0.05:
            self.take(Offer(rank, step, self.layout.digest))
            self._say_done(rank, step)

    def kill(self) -> None:
        rank = self.draw.choice(sorted(self.alive))
        self.alive.remove(rank)
        for credit in [credit for credit in self.credits if credit[0] == rank]:
            del self.credits[credit]
        self.take(RankLost(rank, f"rank {rank} is dead"))

    def run(self) -> None:
        for _ in range(400):
            self.now += self.draw.random()
            chance = self.draw.random()
            moves = self.moves()
            if chance < 0.1:
                self.offer()
            elif chance < 0.12:
                self.now += self.draw.choice([1.0, 30.0, 70.0, 130.0])
                self.take(Tick())
            elif chance < 0.13 and self.mortal and len(self.alive) > 1:
                self.kill()
            elif chance < 0.15:
                self.kill_flusher() if self.flusher_lives else self.next_flusher()
            elif chance < 0.16:
                self.fall_silent()
            elif moves:
                self.play(self.draw.choice(moves))
        self.settle()

    def settle(self) -> None:
        """No rank offers any more: everything must come to an end by itself, then by its deadlines."""
        for rank in sorted(self.silent & self.alive):
            self.take(RankBack(rank))
        self.silent.clear()
        if not self.flusher_lives:
            self.next_flusher()
        for _ in range(10_000):
            moves = self.moves()
            if not moves:
                if is_empty(self.session):
                    break
                self.now += 200
                self.take(Tick())
                continue
            self.play(self.draw.choice(moves))
        assert is_empty(self.session), f"still there: {phases_of(self.session)}"
        assert slots_of(self.session)[0] == set(range(self.slots)), "not every slot came back"
        assert not self.session.outstanding()


@pytest.mark.parametrize("seed", range(150))
def test_a_random_job_keeps_the_rules(seed: int) -> None:
    Job(seed).run()


class Flow(Job):
    """Several checkpoints in a ring that is hardly larger than one part, with ranks that answer, and no deadline.

    With `keeps` the flusher gives the slots of a checkpoint back together, when it is published: another flusher could
    not go on with its upload.
    """

    def __init__(self, seed: int, *, keeps: bool) -> None:
        super().__init__(seed)
        if keeps:
            self.part_chunks = self.layout.chunks
        self.slots = max(self.part_chunks, 2)
        self.session = Session(
            ranks=self.ranks, free_slots=range(self.slots), offer_seconds_max=60, chunk_seconds_max=120
        )
        self.take(NewLayout(self.layout))

    def run(self) -> None:
        steps = self.draw.randint(2, IN_FLIGHT_MAX)
        offers = [(step, rank) for step in range(steps) for rank in range(self.ranks)]
        while (moves := self.moves()) or offers:
            if offers and (not moves or self.draw.random() < 0.2):
                step, rank = offers.pop(0)
                self.take(Offer(rank, step, self.layout.digest))
                self._say_done(rank, step)
            else:
                self.play(self.draw.choice(moves))
        assert self.ended == dict.fromkeys(range(steps), Kind.DURABLE), phases_of(self.session)


@pytest.mark.parametrize("keeps", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize("seed", range(60))
def test_newer_checkpoints_never_starve_an_older_one(seed: int, keeps: bool) -> None:
    """Progress: no step fails or stands still, whatever the order of events."""
    Flow(1000 + seed, keeps=keeps).run()
