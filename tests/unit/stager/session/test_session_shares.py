"""The session of one of several stagers: requests the chunks of its share, and may drop a staged share."""

from __future__ import annotations

from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.telemetry.causes import DeclineCause
from holdfast.wire.frames import Kind
from stager.session.checkpoint import Phase
from stager.session.session_messages import (
    Abort,
    Decline,
    Done,
    Durable,
    Failed,
    GrantCredit,
    KnownCheckpoint,
    MarkFull,
    MarkStaged,
    Offer,
    RankLost,
    SendMessage,
    SlotsFreed,
    Tick,
)
from tests.unit.stager.session.sessions import Stager, is_empty, make_layout, phases_of

LAYOUT = make_layout(chunks=7)
SHARE = range(3, 5)
LATE = DeclineCause.LATE.because("another stager has lost its share")


def _staged(share: range | None = SHARE, *, slots: int = 8) -> Stager:
    stager = Stager(LAYOUT, share=share, slots=slots)
    stager.offer_all(1)
    stager.pay_all(1)
    for rank in range(LAYOUT.ranks):
        stager.take(Done(rank, 1))
    assert stager.of(MarkStaged)
    return stager


def test_the_chunks_of_the_share_are_granted_and_no_others() -> None:
    stager = _staged()
    assert {(grant.chunk, grant.rank) for grant in stager.of(GrantCredit)} == {
        (chunk, rank) for chunk in SHARE for rank in LAYOUT.senders(chunk)
    }
    assert [full.chunk for full in stager.of(MarkFull)] == list(SHARE)
    assert stager.session.known() == [KnownCheckpoint(1, LAYOUT.digest, (0, 1), 2, True)]


def test_two_shares_have_each_frame_of_the_image_once() -> None:
    frames = [
        (grant.chunk, grant.rank)
        for share in (range(4), range(4, 7))
        for grant in _staged(share).of(GrantCredit)
    ]
    assert sorted(frames) == [(chunk, rank) for chunk in range(7) for rank in LAYOUT.senders(chunk)]


def test_a_rank_without_a_frame_in_the_share_is_waited_for_all_the_same() -> None:
    stager = Stager(LAYOUT, share=range(1))
    (idle,) = {0, 1} - set(LAYOUT.senders(0))
    stager.offer_all(1)
    stager.pay_all(1)
    stager.take(Done(1 - idle, 1))
    assert not stager.of(MarkStaged)
    stager.take(Done(idle, 1))
    assert stager.of(MarkStaged)


def test_a_share_flows_through_a_smaller_ring() -> None:
    stager = Stager(LAYOUT, share=range(1, 7), slots=2)
    stager.offer_all(1)
    while stager.credits:
        (rank, step, chunk), slot = min(stager.credits.items(), key=lambda credit: credit[0][2])
        stager.pay(rank, step, chunk)
        if slot in stager.session.flusher_slots:
            stager.take(SlotsFreed((slot,)))
    assert [full.chunk for full in stager.of(MarkFull)] == list(range(1, 7))


def test_a_staged_share_is_given_up_when_a_rank_declines_the_step() -> None:
    stager = _staged()
    assert phases_of(stager.session) == {1: Phase.STAGED}
    stager.take(Decline(0, 1, LATE))
    (abort,) = stager.of(Abort)
    assert "rank 0: late: another stager" in abort.reason
    assert [(tell.rank, tell.step) for tell in stager.said(Kind.DECLINED)] == [(None, 1)]
    assert is_empty(stager.session)
    stager.take(Decline(1, 1, LATE))  # it was told the same by another stager
    assert len(stager.of(Abort)) == 1
    assert stager.said(Kind.DECLINED)[1].rank == 1
    stager.take(SlotsFreed((0, 1)))
    stager.offer_all(2)
    stager.pay_all(2)
    for rank in range(LAYOUT.ranks):
        stager.take(Done(rank, 2))
    assert len(stager.of(MarkStaged)) == 2


def test_the_only_stager_gives_up_nothing_that_is_staged() -> None:
    stager = _staged(None)
    stager.take(Decline(0, 1, LATE))
    assert not stager.of(Abort)
    stager.take(Durable(1))
    assert stager.said(Kind.DURABLE)


def test_a_durable_step_is_not_given_up() -> None:
    stager = _staged()
    stager.take(Durable(1))
    stager.take(Decline(0, 1, LATE))
    assert not stager.of(Abort)
    assert [tell.rank for tell in stager.said(Kind.DURABLE)] == [None, 0]


def test_a_staged_share_outlives_the_ranks() -> None:
    stager = _staged()
    for rank in range(LAYOUT.ranks):
        stager.take(RankLost(rank, f"rank {rank} is dead"))
    assert phases_of(stager.session) == {1: Phase.STAGED}


def test_a_step_that_a_lost_rank_never_offered_is_aborted_since_other_stagers_may_have_it() -> None:
    stager = Stager(LAYOUT, share=SHARE)
    stager.take(Offer(0, 1, LAYOUT.digest))
    stager.take(RankLost(1, "its process is dead"))
    (failed,) = stager.said(Kind.FAILED)
    assert "its process is dead" in str(failed.body["message"])
    assert [abort.step for abort in stager.of(Abort)] == [1]


def test_a_stager_without_a_share_of_the_image_fails_an_offer_by_name() -> None:
    stager = Stager(LAYOUT, share=range(0))
    for rank in range(LAYOUT.ranks):
        stager.take(Offer(rank, 1, LAYOUT.digest))
    (failed,) = stager.said(Kind.FAILED)
    assert "no share of an image of 7 chunks" in str(failed.body["message"])
    assert not stager.of(Abort)


def test_a_rank_hears_that_its_share_was_staged_by_the_stager_before() -> None:
    stager = Stager(LAYOUT, share=SHARE, left={1: True})
    stager.take(Offer(0, 1, LAYOUT.digest))
    stager.take(Decline(1, 1, LATE))  # it has heard so before the loss, and has gone on
    assert [(tell.rank, tell.step) for tell in stager.said(Kind.STAGED)] == [(0, 1), (1, 1)]
    assert is_empty(stager.session)
    assert not stager.of(Abort)
    stager.take(Durable(1))
    assert [tell.rank for tell in stager.said(Kind.DURABLE)] == [None]
    assert not stager.session.inherited_staged


def test_ranks_hear_that_a_share_of_the_stager_before_has_failed() -> None:
    stager = Stager(LAYOUT, share=SHARE, left={1: True})
    stager.take(Failed(1, "peer_lost", "share 1 was given up"))
    stager.take(Offer(0, 1, LAYOUT.digest))
    assert [tell.rank for tell in stager.said(Kind.FAILED)] == [None, 0]


def test_a_share_that_the_stager_before_had_begun_is_received_as_a_whole() -> None:
    stager = Stager(LAYOUT, share=SHARE, left={1: False})
    stager.offer_all(1)
    assert not stager.session.inherited_staged
    stager.pay_all(1)
    for rank in range(LAYOUT.ranks):
        stager.take(Done(rank, 1))
    assert [full.chunk for full in stager.of(MarkFull)] == list(SHARE)
    assert stager.of(MarkStaged)
    assert not stager.of(Abort)


def test_a_share_that_the_stager_before_had_begun_is_aborted_when_a_rank_declines_it() -> None:
    stager = Stager(LAYOUT, share=SHARE, left={1: False})
    stager.take(Decline(0, 1, LATE))
    assert [abort.step for abort in stager.of(Abort)] == [1]
    stager.take(Failed(1, "peer_lost", "aborted"))
    assert not stager.said(Kind.FAILED)


def test_a_share_that_no_rank_offers_again_is_aborted_once() -> None:
    stager = Stager(LAYOUT, share=SHARE, left={1: False, 2: True})
    stager.take(Tick())
    stager.now = LOST_STAGER_SECONDS_MAX
    stager.take(Tick())
    assert not stager.of(Abort)
    stager.now += 1
    for _ in range(2):
        stager.take(Tick())
    assert [abort.step for abort in stager.of(Abort)] == [1]
    assert [tell.step for tell in stager.said(Kind.FAILED)] == [1]
    assert stager.session.inherited_staged == {2}


def test_shares_of_the_stager_before_fail_with_the_ring() -> None:
    stager = Stager(LAYOUT, share=SHARE, left={1: True, 2: False})
    actions = stager.session.refuse_all("the flusher ended")
    told = [(tell.kind, tell.step) for tell in actions if isinstance(tell, SendMessage)]
    assert told == [(Kind.FAILED, 1), (Kind.FAILED, 2)]
    stager.session.reopen(free_slots=range(8))
    stager.take(Offer(0, 2, LAYOUT.digest))
    assert [tell.rank for tell in stager.said(Kind.FAILED)] == [0]
    assert is_empty(stager.session)


def test_the_end_of_a_step_of_the_stager_before_that_is_not_known_here_changes_nothing() -> None:
    stager = Stager(LAYOUT, share=SHARE)
    stager.take(Durable(1))
    assert is_empty(stager.session)


def test_a_step_that_the_stager_before_had_begun_and_did_not_leave_is_not_begun_again() -> None:
    stager = Stager(LAYOUT, share=SHARE)
    stager.session.take_over({3: False}, newest=4)
    stager.offer_all(3)
    assert phases_of(stager.session) == {3: Phase.RECEIVING}
    for rank in range(LAYOUT.ranks):
        stager.take(Offer(rank, 4, LAYOUT.digest))
    assert [tell.rank for tell in stager.said(Kind.DECLINED)] == [None, 1]
    assert "step 4 has ended" in str(stager.said(Kind.DECLINED)[0].body["reason"])
    assert not stager.of(Abort)
    stager.take(Durable(4))
    assert [tell.rank for tell in stager.said(Kind.DURABLE)] == [None]
    stager.take(Offer(0, 5, LAYOUT.digest))
    assert phases_of(stager.session) == {3: Phase.RECEIVING, 5: Phase.OFFERING}
