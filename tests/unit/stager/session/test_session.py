"""The stager's session, case by case: from offer to durable, with everything that may interrupt it."""

from __future__ import annotations

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause
from holdfast.wire.frames import Kind
from holdfast.wire.layout_round import pickle_reserve_bytes
from stager.session.checkpoint import Phase
from stager.session.session_messages import (
    Began,
    BeginReceiving,
    CancelReceive,
    Decline,
    Done,
    Durable,
    Event,
    Failed,
    FillSlot,
    FlusherLost,
    GrantCredit,
    KnownCheckpoint,
    MarkFull,
    MarkStaged,
    NewLayout,
    Offer,
    RankBack,
    RankLost,
    RankSilent,
    Received,
    Returned,
    SendMessage,
    Sent,
    SlotsFreed,
    Tick,
)
from tests.unit.stager.session.sessions import CHUNK, Stager, is_empty, make_layout, phases_of, slots_of


@pytest.fixture
def stager() -> Stager:
    return Stager(make_layout())


def test_a_checkpoint_from_offer_to_durable(stager: Stager) -> None:
    assert stager.take(Offer(0, 5, stager.layout.digest, SaveRecord(saved_at_unix=1.0))) == []
    granted = stager.take(Offer(1, 5, stager.layout.digest))
    assert granted[:2] == [BeginReceiving(5, stager.layout), FillSlot(0, 5, 0)]
    assert isinstance(granted[2], GrantCredit)
    stager.pay_all(5)
    stager.take(Done(0, 5, SaveRecord(crc_seconds=0.5)))
    assert stager.take(Began(5)) == [], "not before every rank has said DONE"
    (staged,) = stager.take(Done(1, 5))
    assert isinstance(staged, MarkStaged)
    assert staged.records[0] == SaveRecord(saved_at_unix=1.0, crc_seconds=0.5)
    assert {full.chunk for full in stager.of(MarkFull)} == set(range(6))
    assert sum(full.nbytes for full in stager.of(MarkFull)) == stager.layout.image_bytes
    assert stager.take(Durable(5, {"file": "f"})) == [SendMessage(None, Kind.DURABLE, 5, {"file": "f"})]
    assert is_empty(stager.session)


def test_a_decline_is_told_to_all_and_gives_more_room_for_the_pickle(stager: Stager) -> None:
    stager.take(Offer(1, 4, stager.layout.digest))
    (tell,) = stager.take(Decline(0, 4, DeclineCause.OUTGROWN.because("of the test"), 200_000))
    assert isinstance(tell, SendMessage)
    assert (tell.rank, tell.kind, tell.step) == (None, Kind.DECLINED, 4)
    assert tell.body["new_pickle_reserve_bytes"] == pickle_reserve_bytes(200_000)
    assert (tell.body["reason"], tell.body["cause"]) == ("rank 0: outgrown: of the test", "outgrown")
    assert is_empty(stager.session)
    # A rank that offers it later gets the same answer, alone.
    assert stager.take(Offer(0, 4, stager.layout.digest)) == [SendMessage(0, Kind.DECLINED, 4, tell.body)]


def test_a_rank_that_goes_on_to_another_step_ends_the_wait_for_the_first(stager: Stager) -> None:
    stager.take(Offer(0, 1, stager.layout.digest))
    actions = stager.take(Offer(1, 2, stager.layout.digest))
    tells = [action for action in actions if isinstance(action, SendMessage)]
    assert [(tell.kind, tell.step) for tell in tells] == [(Kind.FAILED, 1)]
    assert phases_of(stager.session) == {2: Phase.OFFERING}


def test_a_step_whole_in_the_ring_is_staged_before_the_flusher_began(stager: Stager) -> None:
    stager.offer_all(1, began=False)
    stager.pay_all(1)
    stager.take(Done(0, 1))
    assert not stager.of(MarkStaged), "a rank may still withdraw it"
    stager.take(Done(1, 1))
    assert [staged.step for staged in stager.of(MarkStaged)] == [1]
    assert stager.take(Began(1)) == []
    stager.offer_all(2, began=False)
    assert not stager.said(Kind.DECLINED), "one that only waits for the store is in nobody's way"


def test_an_image_larger_than_the_ring_needs_the_flusher_to_begin() -> None:
    stager = Stager(make_layout(6), slots=4)
    stager.offer_all(1, began=False)
    stager.pay_all(1)
    assert not stager.of(MarkStaged)
    stager.take(Began(1))
    stager.take(SlotsFreed((stager.of(MarkFull)[0].slot, stager.of(MarkFull)[1].slot)))
    stager.pay_all(1)
    for rank in range(2):
        stager.take(Done(rank, 1))
    assert [staged.step for staged in stager.of(MarkStaged)] == [1]


def test_the_flusher_may_give_up_a_staged_one_for_a_newer_one() -> None:
    stager = Stager(make_layout(), slots=12)
    for step in (1, 2):
        stager.offer_all(step, began=False)
        stager.pay_all(step)
        for rank in range(2):
            stager.take(Done(rank, step))
    stager.take(Failed(1, "busy", "it gives its place to step 2"))
    stager.take(SlotsFreed(tuple(action.slot for action in stager.of(MarkFull) if action.step == 1)))
    stager.offer_all(3, began=False)
    stager.pay_all(3)
    for rank in range(2):
        stager.take(Done(rank, 3))
    assert [staged.step for staged in stager.of(MarkStaged)] == [1, 2, 3]
    assert [known.step for known in stager.session.known()] == [2, 3]


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
    assert [staged.step for staged in stager.of(MarkStaged)] == [1], "the survivor finishes it"
    (tell,) = stager.take(Offer(0, 3, stager.layout.digest))
    assert isinstance(tell, SendMessage)
    assert "rank 1 is dead" in tell.body["reason"]


# -- a flusher that dies and comes back ------------------------------------------------------------------------------


def test_steps_told_to_another_flusher_follow_the_phases() -> None:
    stager = Stager(make_layout(3), slots=12)
    digest = stager.layout.digest
    stager.take(Offer(0, 1, digest))
    assert stager.session.known() == [], "an offer is between the stager and its ranks"
    stager.take(Offer(1, 1, digest))
    assert stager.session.known() == [KnownCheckpoint(1, digest, (), handed_over=0, staged=False)]
    stager.take(Began(1))
    stager.pay(0, 1, 0)
    slot = stager.of(MarkFull)[0].slot
    assert stager.session.known() == [KnownCheckpoint(1, digest, (slot,), handed_over=1, staged=False)]
    stager.pay_all(1)
    for rank in range(2):
        stager.take(Done(rank, 1))
    slots = {action.chunk: action.slot for action in stager.of(MarkFull)}
    assert stager.session.known() == [
        KnownCheckpoint(1, digest, tuple(slots[chunk] for chunk in range(3)), handed_over=3, staged=True)
    ]
    stager.offer_all(2)
    stager.take(SlotsFreed((slots[0],)))
    assert [(known.step, known.slots, known.handed_over) for known in stager.session.known()] == [
        (1, (slots[1], slots[2]), 3),
        (2, (), 0),
    ]
    stager.take(Decline(1, 2, DeclineCause.BUSY.because("of the test")))
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
    stager.take(FlusherLost("killed"))
    stager.pay_all(1)
    for rank in range(2):
        stager.take(Done(rank, 1))
    assert [staged.step for staged in stager.of(MarkStaged)] == [1]
    assert stager.take(Began(1)) == [], "heard when the next flusher is told of it"
    assert stager.session.known()[0].staged


def test_a_wait_for_another_flusher_has_a_deadline_that_says_so() -> None:
    stager = Stager(make_layout(6), slots=4)
    stager.offer_all(1)
    stager.take(FlusherLost("process 7 has ended"))
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
    assert [staged.step for staged in stager.of(MarkStaged)] == [1], "it had sent all of that one"
    stager.now += 10
    (tell,) = stager.take(Offer(0, 3, stager.layout.digest))
    assert isinstance(tell, SendMessage)
    assert "rank 1 on host h (process 7) has been silent for 41 s" in tell.body["reason"]
    stager.take(RankBack(1))
    for rank, step, chunk in [credit for credit in stager.credits if credit[1] == 2]:
        stager.take(Returned(rank, step, chunk))
    stager.offer_all(4)
    assert phases_of(stager.session) == {1: Phase.STAGED, 4: Phase.RECEIVING}


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
    assert isinstance(tell, SendMessage)
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
def test_an_event_against_the_protocol_changes_nothing(stager: Stager, event: Event) -> None:
    stager.offer_all(1)
    before = (slots_of(stager.session), stager.session.outstanding(), phases_of(stager.session))
    with pytest.raises(ProtocolError):
        stager.take(event)
    assert (slots_of(stager.session), stager.session.outstanding(), phases_of(stager.session)) == before
