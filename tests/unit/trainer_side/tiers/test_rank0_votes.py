"""Rank 0's decisions, frames in and messages out: no thread, no wait."""

from __future__ import annotations

import pytest

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind, decode
from holdfast.wire.state_messages import Proposal
from trainer_side.tiers.commit_votes import Voter
from trainer_side.tiers.rank0_votes import Rank0Votes, VoteLimits
from trainer_side.tiers.tier import StepVerdict

RANKS = 2


@pytest.fixture
def votes() -> Rank0Votes:
    return Rank0Votes(RANKS, VoteLimits(agree_seconds_max=10.0, seal_seconds_max=20.0))


def sealed(step: int, layout: bytes = b"a") -> Frame:
    return Frame(Kind.SEALED, attempt=1, step=step, arg=3, body=layout)


def verdicts(messages: list[bytes]) -> list[StepVerdict]:
    return [StepVerdict.from_frame(decode(message)) for message in messages]


def kinds(messages: list[bytes]) -> list[Kind]:
    return [decode(message).kind for message in messages]


def test_a_step_is_complete_when_every_rank_has_sealed_it(votes: Rank0Votes) -> None:
    assert votes.handle(0, sealed(7), 0.0) == []
    assert verdicts(votes.handle(1, sealed(7), 1.0)) == [StepVerdict(3, (1, 7), complete=True)]


def test_the_deadline_counts_from_the_first_seal(votes: Rank0Votes) -> None:
    votes.handle(0, sealed(7), 5.0)
    assert votes.tick(25.0) == []
    (verdict,) = verdicts(votes.tick(25.1))
    assert (verdict.complete, verdict.why.text) == (False, "rank 1 has not sealed it within 20 s")
    assert votes.tick(100.0) == []


def test_all_ranks_hear_when_all_are_ready_or_who_is_not(votes: Rank0Votes) -> None:
    assert votes.handle(1, Frame(Kind.READY, body=b"{}"), 0.0) == []
    assert kinds(votes.handle(0, Frame(Kind.READY, body=b"{}"), 0.0)) == [Kind.GO]
    votes.handle(0, Frame(Kind.READY, body=b"{}"), 0.0)
    refusal = Frame(Kind.READY, body=b'{"code": "config", "message": "too small"}')
    (refused,) = map(decode, votes.handle(1, refusal, 0.0))
    assert wire.json_body(refused) == {"code": "config", "message": "rank 1: too small"}


def test_a_rank_that_is_dead_ends_every_open_question(votes: Rank0Votes) -> None:
    votes.handle(0, sealed(7), 0.0)
    votes.handle(0, Frame(Kind.READY, body=b"{}"), 0.0)
    votes.handle(0, decode(Proposal("digest", [], 100, {}).to_frame(0)), 0.0)
    messages = votes.rank_died(1)
    assert kinds(messages) == [Kind.VOID, Kind.REFUSED, Kind.REFUSED]
    assert not votes.all_left
    votes.handle(0, Frame(Kind.BYE), 0.0)
    assert votes.all_left


def test_a_rank_that_ended_without_a_save_ends_the_open_round(votes: Rank0Votes) -> None:
    votes.handle(1, Frame(Kind.BYE), 0.0)
    proposal = decode(Proposal("digest", [], 100, {}).to_frame(0))
    (refused,) = map(decode, votes.handle(0, proposal, 1.0))
    assert refused.kind is Kind.REFUSED
    assert "rank 1 has ended. Every rank must call step() or save()" in wire.json_body(refused)["message"]


def test_ranks_waited_for_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    patient = Rank0Votes(RANKS, VoteLimits(agree_seconds_max=300.0, seal_seconds_max=20.0))
    patient.handle(0, decode(Proposal("digest", [], 100, {}).to_frame(0)), 0.0)
    assert patient.tick(11.0) == []
    assert "rank 0 has waited 10 s for the layout of rank 1, and gives up after 300 s" in caplog.text


def test_only_rank_0_gives_its_pickle_more_room(votes: Rank0Votes) -> None:
    (room,) = map(decode, votes.handle(0, Frame(Kind.ROOM, arg=65536), 0.0))
    assert (room.kind, room.arg) == (Kind.ROOM, 65536)
    with pytest.raises(ProtocolError, match="rank 1 sent ROOM to rank 0"):
        votes.handle(1, Frame(Kind.ROOM, arg=65536), 0.0)


def test_every_message_of_rank_0_is_one_that_a_member_takes(votes: Rank0Votes) -> None:
    heard: list[StepVerdict] = []
    member = Voter(1, heard.append, None, silence_seconds_max=50.0)
    member.expect_verdict(3, (1, 7), 0.0)
    question = member.start_question()
    messages = votes.handle(0, sealed(7), 0.0) + votes.handle(1, sealed(7), 0.0)
    messages += votes.handle(0, Frame(Kind.ROOM, arg=65536), 0.0)
    votes.handle(0, Frame(Kind.READY, body=b"{}"), 0.0)
    messages += votes.tick(10.1)
    for message in messages:
        assert member.handle(decode(message)) is None
    assert heard == [StepVerdict(3, (1, 7), complete=True)]
    assert (member.undecided, member.new_pickle_reserve_bytes) == (0, 65536)
    assert question.done()
    with pytest.raises(HoldfastError, match="rank 0 waited 10 s for rank 1 to prepare"):
        question.result()
