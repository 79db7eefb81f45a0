"""All ranks act at one step or none does, for both users, in any order of messages and steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.notices import preemption
from holdfast.notices.messages import Announcement, AnnouncementKind, StepAnswer
from holdfast.notices.step_agreement import Margin, ProposalState, StepAgreement
from holdfast.wire.frames import Frame, Kind
from stager import interval_agreement
from tests.unit.trainer_side.agreeing import (
    APPOINTED,
    CALLED_OFF,
    PROPOSED,
    IntervalJob,
    NoticeJob,
)
from trainer_side.notice.promised_steps import PromisedSteps

User = type[NoticeJob] | type[IntervalJob]
both_users = pytest.mark.parametrize("user", [NoticeJob, IntervalJob])


@pytest.mark.parametrize("user", [NoticeJob, IntervalJob])
@settings(max_examples=300, deadline=None)
@given(
    ranks=st.integers(1, 4),
    ahead=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["hear", "hear", "answer", "train", "train", "train", "begin"]),
            st.integers(0, 3),
        ),
        max_size=200,
    ),
)
def test_all_ranks_act_at_one_step_whatever_comes_first(
    user: User, ranks: int, ahead: list[int], moves: list[tuple[str, int]]
) -> None:
    job = user(ranks)
    for rank, steps in zip(job.ranks, ahead, strict=False):
        for _ in range(steps):
            rank.train()
    job.begin(0)
    for move, who in moves:
        rank = job.ranks[who % ranks]
        if move == "hear" and rank.inbox:
            rank.hear()
        elif move == "answer" and rank.answers:
            job.answer(who % ranks)
        elif move == "train":
            rank.train()
        elif move == "begin":
            job.begin(
                who
            )  # a notice joins the open one; a wish takes the place of the open one, or follows it
    job.settle()
    acted = [rank.acted for rank in job.ranks]
    assert all(what == acted[0] for what in acted), acted
    assert len(acted[0]) == job.events().count(job.agreed)
    assert acted[0] or job.given_up in job.events()


@both_users
def test_a_rank_that_waits_at_its_step_goes_on_when_it_is_called_off(user: User) -> None:
    job = user(2)
    first, second = job.ranks
    job.begin(0)
    for index, rank in enumerate(job.ranks):  # where are you?
        rank.train()
        rank.hear()
        job.answer(index)
    first.hear()
    job.answer(0)
    while not first.waits:
        first.train()
    step = first.step
    first.train()
    assert first.step == step, "it has promised the next step"
    job.tick(10.0)
    assert job.given_up not in job.events()
    job.tick(10.5)  # the other one says nothing
    assert job.events()[-1] == job.given_up
    assert "rank 1 did not answer within 10 s" in job.said[-1].text
    job.settle()
    first.train()
    assert first.step == step + 1
    assert first.acted == second.acted == []
    job.begin(1)
    job.settle()
    assert len(first.acted) == len(second.acted) == 1


@both_users
def test_an_answer_to_a_proposal_that_was_called_off_counts_for_no_other(user: User) -> None:
    job = user(2)
    job.begin(0)
    job.tick(11.0)
    for rank in job.ranks:
        rank.hear()  # the proposal; its answer is late
        rank.hear()
    job.begin(0)
    late = [rank.answers.popleft() for rank in job.ranks]
    assert [job.take(index, answer) for index, answer in enumerate(late)] == [[], []]
    job.settle()
    assert [len(rank.acted) for rank in job.ranks] == [1, 1]


@both_users
def test_a_step_that_is_appointed_holds_though_another_is_proposed_before_a_slow_rank_comes_there(
    user: User,
) -> None:
    job = user(2)
    quick, slow = job.ranks
    job.begin(0)
    while job.agreed not in job.events():
        job.deliver()
    job.deliver()
    while not quick.acted:
        quick.train()
    job.follow(quick.step)
    slow.hear()
    job.settle()
    assert quick.acted == slow.acted
    assert len(slow.acted) == 2


@both_users
def test_ranks_that_race_past_every_step_are_given_up(user: User) -> None:
    job = user(2)
    job.begin(0)
    while job.decider.open:
        for rank in job.ranks:
            if rank.inbox[0].kind is PROPOSED:
                for _ in range(3000):  # before it hears of the step
                    rank.train()
        job.deliver()
    assert job.events()[-1] == job.given_up
    assert f"had passed each of {len(job.proposed)} steps that were proposed" in job.said[-1].text
    assert len(job.proposed) == {NoticeJob: 12, IntervalJob: 10}[user]
    assert all(rank.acted == [] for rank in job.ranks)


@both_users
def test_a_lost_rank_ends_it_and_no_other_waits(user: User) -> None:
    job = user(2)
    job.begin(0)
    job.deliver()
    job.ranks[0].hear()
    assert job.ranks[0].promises.waits_at(1_000_000)
    job.lose_rank(1, "rank 1 is dead")
    assert job.events()[-1] == job.given_up
    assert "rank 1 is dead" in job.said[-1].text
    job.ranks[0].hear()
    assert not job.ranks[0].promises.waits_at(1_000_000)
    job.begin(0)
    assert not job.decider.open
    job.settle()
    assert job.ranks[0].acted == []


# -- the decider's side alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("margin", "quickest_seconds", "doubled", "wait_seconds", "steps"),
    [
        (preemption._MARGIN, 0.0, 0, 5.0, 1),
        (preemption._MARGIN, 0.0, 3, 5.0, 8),
        (preemption._MARGIN, 0.05, 0, 0.0, 2),
        (preemption._MARGIN, 0.05, 3, 0.0, 16),
        (preemption._MARGIN, 0.05, 3, 1.0, 36),
        (preemption._MARGIN, 60.0, 0, 0.0, 1),
        (preemption._MARGIN, 1e-9, 0, 0.0, 100_000),
        (preemption._MARGIN, 5e-324, 0, 0.0, 100_000),
        (interval_agreement._MARGIN, 0.0, 0, 0.0, 8),
        (interval_agreement._MARGIN, 0.0, 3, 0.0, 64),
        (interval_agreement._MARGIN, 0.05, 0, 0.0, 10),
        (interval_agreement._MARGIN, 0.05, 3, 0.0, 80),
        (interval_agreement._MARGIN, 60.0, 0, 0.0, 2),
        (interval_agreement._MARGIN, 1e-9, 9, 0.0, 10_000),
        (interval_agreement._MARGIN, 0.0, 12, 0.0, 10_000),
    ],
)
def test_the_margin_doubles_within_its_bounds(
    margin: Margin, quickest_seconds: float, doubled: int, wait_seconds: float, steps: int
) -> None:
    assert margin.steps(quickest_seconds, doubled, wait_seconds) == steps


def _agreement() -> StepAgreement:
    return StepAgreement(2, Margin(1.0, 1, 100, 1), tries_max=4, answer_seconds_max=10.0)


def _all(agreement: StepAgreement, *next_steps: int) -> ProposalState:
    found = ProposalState.INCOMPLETE
    for rank, step in enumerate(next_steps):
        assert found is ProposalState.INCOMPLETE
        found = agreement.add_answer(rank, StepAnswer(agreement.number, step, 0.5 + rank))
    return found


def test_the_first_question_is_never_appointed_and_the_margin_doubles_from_try_to_try() -> None:
    agreement = _agreement()
    assert agreement.begin(0.0) == Announcement(PROPOSED, 0, 1)
    assert _all(agreement, 0) is ProposalState.INCOMPLETE
    assert agreement.overdue_text(10.0) == ""
    assert agreement.overdue_text(10.1) == "rank 1 did not answer within 10 s"
    assert _all(agreement, 0, 0) is ProposalState.PASSED
    assert agreement.propose_later(0.0) == Announcement(PROPOSED, 2, 2)
    assert _all(agreement, 3, 7) is ProposalState.PASSED
    assert agreement.propose_later(0.0, wait_seconds=1.0) == Announcement(PROPOSED, 7 + 4 + 2, 3)
    assert _all(agreement, 13, 14) is ProposalState.PASSED
    assert agreement.propose_later(0.0, above=40) == Announcement(PROPOSED, 41, 4)
    assert agreement.slowest_step_seconds == 1.5
    assert _all(agreement, 41, 41) is ProposalState.PROMISED
    assert agreement.appoint({"body": 1}) == Announcement(APPOINTED, 41, 4, {"body": 1})
    assert not agreement.open
    assert agreement.overdue_text(100.0) == ""


def test_promises_of_what_is_decided_anew_count_for_nothing() -> None:
    agreement = _agreement()
    agreement.begin(0.0)
    _all(agreement, 5, 5)
    agreement.propose_later(0.0)
    agreement.ignore_promises()
    assert _all(agreement, 5, 5) is ProposalState.PASSED
    assert agreement.propose_later(0.0).step == 7, "with the margin of a first try"
    assert _all(agreement, 5, 5) is ProposalState.PROMISED
    assert agreement.call_off() == Announcement(CALLED_OFF, 7, 3)
    agreement.ask(7, 0.0)
    assert _all(agreement, 5, 5) is ProposalState.EXHAUSTED
    agreement.begin(0.0)
    assert _all(agreement, 5, 5) is ProposalState.PASSED


# -- a rank's side alone -----------------------------------------------------------------------------------------


def test_a_promise_is_not_waited_for_for_ever_and_is_then_given_up() -> None:
    promises: PromisedSteps[str] = PromisedSteps(0.05)
    with promises.lock:
        assert promises.handle(Announcement(PROPOSED, 0, 1))
        assert promises.reach(0) == []
        assert not promises.waits_at(0)
        assert not promises.handle(Announcement(APPOINTED, 0, 1), "agreed")
        assert promises.handle(Announcement(PROPOSED, 5, 2))
        promises.end()
        assert not promises.waits_at(5)
        assert promises.reach(5) == []


def test_only_the_word_on_the_promised_step_counts() -> None:
    promises: PromisedSteps[str] = PromisedSteps(30)
    with promises.lock:
        promises.reach(3)
        promises.handle(Announcement(PROPOSED, 3, 1))
        assert not promises.pending, "it has passed the step"
        promises.handle(Announcement(PROPOSED, 5, 2))
        promises.handle(Announcement(CALLED_OFF, 3, 1))
        assert not promises.handle(Announcement(APPOINTED, 3, 1), "another")
        assert promises.waits_at(5)
        assert promises.handle(Announcement(APPOINTED, 5, 2), "first")
        promises.handle(Announcement(PROPOSED, 7, 3))
        promises.handle(Announcement(APPOINTED, 7, 3), "second")
        assert [promises.reach(step) for step in (4, 6, 8, 9)] == [[], ["first"], ["second"], []]
        promises.handle(Announcement(PROPOSED, 12, 4))
        promises.handle(Announcement(APPOINTED, 12, 4), "third")
        promises.handle(Announcement(PROPOSED, 14, 5))
        promises.end()
        assert promises.reach(20) == ["third"], "an appointed step stays so"
        promises.handle(Announcement(PROPOSED, 30, 6))
        promises.handle(Announcement(AnnouncementKind.LOOSE, 30, 5))
        assert not promises.pending


# -- messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (Kind.SAVE_AT, 3, "SAVE_AT: flags 3, expected 0 to 2"),
        (Kind.SAVE_AT, 9, "SAVE_AT: flags 9, expected 0 to 2"),
        (Kind.SAVE_EVERY, 4, "SAVE_EVERY: flags 4, expected 0 to 3"),
        (Kind.SAVE_EVERY, 0, "SAVE_EVERY: body is not JSON"),
    ],
)
def test_an_announcement_that_is_none_is_refused(kind: Kind, flags: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Announcement.from_frame(Frame(kind, flags=flags, body=b"?"))


@pytest.mark.parametrize("kind", [Kind.AT, Kind.HERE])
@pytest.mark.parametrize("seconds", [b'"x"', b"-1", b"NaN", b"Infinity", b"true", b"1e6", b"[]"])
def test_an_answer_with_no_time_for_a_step_is_refused(kind: Kind, seconds: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{kind.name}: step_seconds"):
        StepAnswer.from_frame(Frame(kind, body=b'{"step_seconds": ' + seconds + b"}"))
