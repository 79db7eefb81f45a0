"""The stager's emergency and the ranks' appointments together, in every order in which messages and steps may come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.notices.decider import Appoint, Call, Emergency, Said, Word
from holdfast.notices.notice import Notice, NoticeKind, Terms
from holdfast.notices.sparing import NO_LIMIT, NOBODY, Ability, Sparing
from holdfast.notices.worth import InFlight
from trainer_side.notice.appointments import Appointments

_REBALANCE = Notice(NoticeKind.REBALANCE, None, "aws")
_TERMS = Terms(True, "there is time", _REBALANCE, 4, 100).to_json()


def terminate(seconds: float) -> Notice:
    return Notice(NoticeKind.TERMINATE, time.time() + seconds, "aws")


class Rank:
    def __init__(self) -> None:
        self.appointments = Appointments(wait_seconds_max=30, clock=lambda: 0.0)
        self.inbox: deque[Appoint] = deque()
        self.answers: deque[tuple[int, int, float | None]] = deque()
        self.step = -1
        self.acted: list[tuple[int, bool]] = []
        self.noticed_at: list[int] = []

    def hear(self) -> None:
        said = self.inbox.popleft()
        answer = self.appointments.heard(said.word, said.step, said.number, said.body)
        if answer is not None:
            self.answers.append((said.number, *answer))

    @property
    def waits(self) -> bool:
        """Whether training would stand still in its next `reach`; the test has one thread."""
        promise = self.appointments._promise
        return promise is not None and self.step + 1 >= promise.step

    @property
    def is_due(self) -> bool:
        """Whether something is proposed or appointed that this rank has not come to."""
        return self.appointments._promise is not None or bool(self.appointments._held)

    def train(self) -> None:
        if self.waits:
            return
        self.step += 1
        before = self.appointments.notice
        due = self.appointments.reach(self.step)
        if due is not None:
            self.acted.append((self.step, due.save))
        if self.appointments.notice is not before:
            self.noticed_at.append(self.step)


class Job:
    """Ranks and a stager whose messages are delivered when the test says so."""

    def __init__(self, ranks: int, in_flight: Sequence[InFlight] = ()) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self.in_flight = list(in_flight)
        self.emergency = Emergency(ranks, lambda: self.in_flight, answer_seconds_max=10.0)
        self.said: list[Said] = []
        self.now = 0.0

    def do(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if isinstance(call, Said):
                self.said.append(call)
                continue
            for rank in self.ranks:
                rank.inbox.append(call)

    def notice(self, rank: int, notice: Notice, left: float | None) -> None:
        self.do(self.emergency.noticed(rank, notice, left, f"rank {rank}", self.now))

    def answer(self, index: int) -> None:
        self.emergency.spares.can(index, self.ranks[index].appointments.ability)
        self.do(self.emergency.at(index, *self.ranks[index].answers.popleft(), self.now))

    def settle(self) -> None:
        """Deliver all that is on its way, and let every rank come to what is appointed."""
        for _ in range(10_000):
            for index, rank in enumerate(self.ranks):
                while rank.inbox:
                    rank.hear()
                while rank.answers:
                    self.answer(index)
            busy = any(rank.inbox or rank.answers for rank in self.ranks)
            due = [rank for rank in self.ranks if rank.is_due]
            if not busy and not due:
                return
            for rank in due:
                rank.train()
        raise AssertionError("the ranks come to no end")

    def events(self) -> list[str]:
        return [said.event for said in self.said]


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.integers(1, 4),
    ahead=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    moves=st.lists(
        st.tuples(st.sampled_from(["hear", "answer", "train", "train", "train"]), st.integers(0, 3)),
        max_size=200,
    ),
    told=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_all_ranks_act_at_one_step_whatever_comes_first(
    ranks: int, ahead: list[int], moves: list[tuple[str, int]], told: list[int]
) -> None:
    job = Job(ranks)
    for rank, steps in zip(job.ranks, ahead, strict=False):
        for _ in range(steps):
            rank.train()
    notices = deque(told)
    for index, (move, who) in enumerate(moves):
        if notices and index % 7 == 0:
            # Several are told while the first notice is open: they join it.
            if index == 0 or job.emergency.open:
                job.notice(notices.popleft() % ranks, terminate(100), 100.0)
            else:
                notices.clear()
        rank = job.ranks[who % ranks]
        if move == "hear" and rank.inbox:
            rank.hear()
        elif move == "answer" and rank.answers:
            job.answer(who % ranks)
        elif move == "train":
            rank.train()
    if not moves:
        job.notice(0, terminate(100), 100.0)
    job.settle()
    acted = [rank.acted for rank in job.ranks]
    assert all(what == acted[0] for what in acted), acted
    assert all(rank.noticed_at == [step for step, _ in rank.acted] for rank in job.ranks)
    if "emergency_failed" not in job.events():
        assert len(acted[0]) == 1
        assert acted[0][0][1] is True
        assert job.events().count("emergency") == 1


def test_a_rank_that_waits_at_its_step_goes_on_when_it_is_called_off() -> None:
    job = Job(2)
    job.notice(0, terminate(100), 100.0)
    for index, rank in enumerate(job.ranks):  # where are you?
        rank.train()
        rank.hear()
        job.answer(index)
    first, second = job.ranks
    first.hear()
    while not first.waits:
        first.train()
    job.now = 10.5  # the other one says nothing
    job.do(job.emergency.tick(job.now))
    assert job.events() == ["notice", "emergency_failed"]
    assert "rank 0, 1 did not answer" in job.said[-1].text
    first.hear()
    assert not first.is_due
    first.train()
    assert first.acted == second.acted == []


def test_a_rank_that_was_not_there_yet_is_asked_again_while_there_is_time() -> None:
    job = Job(2)
    job.notice(0, terminate(35), 35.0)
    for now in (11.0, 15.0, 22.0):  # not answered; not yet; asked again
        job.now = now
        job.do(job.emergency.tick(job.now))
        assert job.emergency.open == (now == 22.0)
    job.settle()
    assert [len(rank.acted) for rank in job.ranks] == [1, 1]
    silent = Job(1)
    silent.notice(0, terminate(15), 15.0)
    for now in (11.0, 22.0, 33.0):
        silent.now = now
        silent.do(silent.emergency.tick(silent.now))
    assert silent.events() == [
        "notice",
        "emergency_failed",
    ]  # the deadline has passed: nobody is asked for nothing
    assert not silent.emergency.open


def test_what_was_declined_is_tried_at_a_later_step() -> None:
    job = Job(2)
    job.notice(0, terminate(100), 100.0)
    job.settle()
    saved = job.ranks[0].acted[-1][0]
    job.emergency.offered(saved)
    job.do(job.emergency.ended(saved, "busy", job.now))
    job.settle()
    again = job.ranks[1].acted[-1][0]
    assert again > saved
    assert [rank.acted for rank in job.ranks] == [[(saved, True), (again, True)]] * 2
    job.emergency.offered(again)
    job.now = 7.0
    job.do(job.emergency.staged(again, 1000, 1.0, job.now))
    assert job.events()[-1] == "emergency_staged"
    assert "93.0 s before the deadline" in job.said[-1].text
    assert not job.emergency.open


def test_what_a_quick_rank_has_declined_a_slow_one_comes_to_all_the_same() -> None:
    job = Job(2)
    quick, slow = job.ranks
    job.notice(0, terminate(100), 100.0)
    while not quick.appointments._held or not slow.appointments._held:
        for index, rank in enumerate(job.ranks):
            while rank.inbox:
                rank.hear()
            while rank.answers:
                job.answer(index)
    while not quick.acted:
        quick.train()
    job.emergency.offered(quick.step)
    job.do(job.emergency.ended(quick.step, "busy", job.now))
    slow.hear()  # another step is proposed before it has come to the first
    job.settle()
    assert quick.acted == slow.acted
    assert [step for step, _ in slow.acted] == slow.noticed_at
    assert len(slow.acted) == 2


def test_it_gives_up_after_some_saves() -> None:
    job = Job(1)
    job.notice(0, _REBALANCE, None)
    for _ in range(20):
        job.settle()
        if not job.emergency.open:
            break
        saved = job.ranks[0].acted[-1][0]
        job.emergency.offered(saved)
        job.do(job.emergency.ended(saved, "busy", job.now))
    assert len(job.ranks[0].acted) == 6
    assert job.events()[-1] == "emergency_failed"


def test_a_lost_rank_ends_it_and_a_later_notice_says_why() -> None:
    job = Job(2)
    job.notice(1, terminate(100), 100.0)
    job.do(job.emergency.rank_left(1, "rank 1 is dead", job.now))
    assert job.said[-1].event == "emergency_failed"
    assert "rank 1 is dead" in job.said[-1].text
    job.notice(0, terminate(100), 100.0)
    assert "rank 1 is dead" in job.said[-1].text
    job.settle()
    assert job.ranks[0].acted == []


def test_a_rank_that_dies_in_mid_send_is_not_saved_for_again() -> None:
    job = Job(2)
    job.notice(1, terminate(100), 100.0)
    job.settle()
    saved = job.ranks[0].acted[-1][0]
    job.emergency.offered(saved)
    job.do(job.emergency.rank_left(1, "rank 1 is dead", job.now))
    assert job.emergency.open  # it may have sent all
    job.do(job.emergency.ended(saved, "rank 1 is dead", job.now))
    assert job.events()[-1] == "emergency_failed"
    assert not job.emergency.open


def test_too_late_is_said_and_nobody_saves() -> None:
    job = Job(2)
    job.emergency.measures.staged(1000, 60.0)
    job.notice(0, terminate(5), 5.0)
    job.settle()
    assert [rank.acted for rank in job.ranks] == [[(job.ranks[0].step, False)]] * 2
    assert job.said[-1].loud
    assert "a new one needs" in job.said[-1].text


def test_what_is_in_flight_is_finished_and_nothing_new_is_begun() -> None:
    job = Job(2, [InFlight(3, 0.5, 4.0)])
    job.emergency.measures.staged(1000, 8.0)
    job.notice(0, terminate(6), 6.0)
    job.settle()
    assert not any(save for rank in job.ranks for _, save in rank.acted)
    assert "step 3 is finished" in job.said[-1].text
    assert not job.said[-1].loud


def test_a_rebalance_shortens_the_interval_for_a_while_at_the_same_steps_on_all() -> None:
    job = Job(2)
    job.notice(0, _REBALANCE, None)
    job.settle()
    at = job.ranks[0].acted[0][0]
    for rank in job.ranks:
        assert rank.appointments.every(100, at + 1) == 25
        assert rank.appointments.every(2, at + 1) == 1
        assert rank.appointments.every(0, at + 1) == 0
        assert rank.appointments.every(100, 10**9) == 100
        assert rank.appointments.notice is not None
        assert rank.appointments.notice.kind is NoticeKind.REBALANCE
    assert job.ranks[0].acted == job.ranks[1].acted == [(at, True)]


def test_a_graver_notice_takes_over_one_that_is_open() -> None:
    job = Job(2)
    job.notice(0, _REBALANCE, None)
    job.notice(1, terminate(50), 50.0)
    job.settle()
    assert [rank.acted for rank in job.ranks] == [[(job.ranks[0].step, True)]] * 2
    notice = job.ranks[0].appointments.notice
    assert notice is not None
    assert (notice.kind, notice.rank) == (NoticeKind.TERMINATE, 1)
    assert job.events() == ["notice", "notice", "emergency"]


def test_a_deadline_that_is_heard_of_while_a_step_is_proposed_is_planned_for() -> None:
    job = Job(1)
    job.emergency.measures.staged(1000, 60.0)
    job.notice(0, _REBALANCE, None)
    job.ranks[0].hear()
    job.answer(0)  # the decision is made, and a step proposed
    job.notice(0, terminate(5), 5.0)
    job.settle()
    assert [save for _, save in job.ranks[0].acted] == [False]
    assert job.events() == ["notice", "notice", "emergency"]


def test_ranks_that_race_past_every_step_are_given_up() -> None:
    job = Job(2)
    job.notice(0, terminate(1000), 1000.0)
    for _ in range(200):
        for index, rank in enumerate(job.ranks):
            while rank.inbox:
                if rank.inbox[0].word is Word.PROPOSED:
                    for _ in range(5000):  # before it hears of the step
                        rank.train()
                rank.hear()
            while rank.answers:
                job.answer(index)
    assert job.events()[-1] == "emergency_failed"
    assert not job.emergency.open
    assert all(rank.acted == [] for rank in job.ranks)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"save": 1},
        {"save": True, "reason": "", "notice": 7},
        {**_TERMS, "notice": {"kind": "dance"}},
        {**_TERMS, "factor": 0},
        {**_TERMS, "factor": True},
        {**_TERMS, "until_step": "x"},
        {**_TERMS, "until_step": -1},
        {**_TERMS, "spared": [1]},
        {**_TERMS, "spared": "1", "area_bytes_max": 1},
    ],
)
def test_a_body_that_is_none_is_refused(body: dict[str, Any]) -> None:
    appointments = Appointments(wait_seconds_max=1)
    appointments.heard(Word.PROPOSED, 3, 1, {})
    with pytest.raises(ProtocolError):
        appointments.heard(Word.APPOINTED, 3, 1, body)


def test_a_promise_is_not_waited_for_for_ever() -> None:
    appointments = Appointments(wait_seconds_max=0.05)
    appointments.heard(Word.PROPOSED, 0, 1, {})
    assert appointments.reach(0) is None
    appointments.heard(Word.PROPOSED, 5, 2, {})
    appointments.end()
    assert appointments.reach(5) is None


def test_a_second_notice_joins_the_first_until_its_step_is_staged() -> None:
    job = Job(2)
    job.notice(0, terminate(5), 5.0)
    job.notice(1, terminate(100), 100.0)
    job.settle()
    (emergency,) = [said for said in job.said if said.event == "emergency"]
    assert emergency.fields["seconds_left"] == 5.0  # the earlier deadline holds
    job.notice(1, terminate(90), 90.0)
    job.settle()
    saved = job.ranks[0].step
    assert [rank.acted for rank in job.ranks] == [[(saved, True)]] * 2
    job.emergency.offered(saved)
    job.do(job.emergency.staged(saved, 1000, 1.0, job.now))
    assert job.events() == ["notice", "notice", "emergency", "notice", "emergency_staged"]
    job.now = 9.0
    job.notice(1, terminate(80), 80.0)
    job.notice(0, _REBALANCE, None)
    job.settle()
    assert len(job.ranks[0].acted) == 1
    assert f"step {saved}, staged 9.0 s ago, is that of this notice, too" in job.said[-1].text
    job.now = 11.0
    job.notice(1, terminate(70), 70.0)
    job.settle()
    assert len(job.ranks[0].acted) == 2


def test_the_end_after_a_rebalance_gets_a_step_of_its_own() -> None:
    job = Job(2)
    for number, notice in enumerate((_REBALANCE, terminate(100)), 1):
        job.notice(0, notice, notice.seconds_left())
        job.settle()
        saved = job.ranks[0].step
        job.emergency.offered(saved)
        job.do(job.emergency.staged(saved, 1000, 1.0, job.now))
        assert [len(rank.acted) for rank in job.ranks] == [number, number]


def test_an_answer_to_a_proposal_that_was_called_off_counts_for_no_other() -> None:
    job = Job(2)
    job.notice(0, terminate(100), 100.0)
    job.now = 11.0
    job.do(job.emergency.tick(job.now))
    for rank in job.ranks:
        rank.hear()  # the proposal; its answer is late
        rank.hear()
    job.notice(0, terminate(80), 80.0)
    late = [rank.answers.popleft() for rank in job.ranks]
    assert [job.emergency.at(index, *answer, job.now) for index, answer in enumerate(late)] == [[], []]
    job.settle()
    assert [len(rank.acted) for rank in job.ranks] == [1, 1]


def test_checkpoints_of_the_usual_interval_are_not_taken_for_the_one_that_was_meant() -> None:
    job = Job(1)
    job.notice(0, terminate(100), 100.0)
    job.settle()
    saved = job.ranks[0].step
    job.emergency.offered(saved - 1)
    job.do(job.emergency.staged(saved - 1, 1000, 1.0, job.now))
    job.do(job.emergency.ended(saved - 1, "busy", job.now))
    assert job.emergency.open
    assert job.events() == ["notice", "emergency"]
    job.emergency.offered(saved)
    job.do(job.emergency.staged(saved, 1000, 1.0, job.now))
    assert not job.emergency.open


def test_a_step_that_no_rank_comes_to_is_given_up_after_the_deadline() -> None:
    job = Job(1)
    job.notice(0, terminate(20), 20.0)
    job.settle()
    job.now = 29.0
    assert job.emergency.tick(job.now) == []
    job.now = 31.0
    job.do(job.emergency.tick(job.now))
    assert job.events()[-1] == "emergency_failed"
    assert not job.emergency.open


def _able(job: Job, plan_seconds: float) -> None:
    for rank in job.ranks:
        rank.appointments.ability = Ability(plan_seconds, NO_LIMIT)


def test_ranks_that_go_are_spared_from_the_appointed_step_on_and_stay_so() -> None:
    job = Job(3)
    _able(job, 1.0)
    job.emergency.measures.staged(1000, 4.0)
    job.emergency.spares.go({2})
    job.notice(2, terminate(100), 100.0)
    assert {rank.appointments.sparing for rank in job.ranks} == {NOBODY}
    job.settle()
    assert {rank.appointments.sparing for rank in job.ranks} == {Sparing((2,), NO_LIMIT)}
    saved = job.ranks[0].step
    job.emergency.offered(saved)
    job.do(job.emergency.staged(saved, 1000, 4.0, job.now))
    job.now = 50.0
    job.notice(0, _REBALANCE, None)
    job.settle()
    assert job.ranks[0].step > saved
    assert {rank.appointments.sparing.ranks for rank in job.ranks} == {(2,)}
    assert [said.fields["spared"] for said in job.said if said.event == "emergency"] == [[2], [2]]


def test_nobody_is_spared_for_a_rebalance() -> None:
    job = Job(2)
    _able(job, 1.0)
    job.notice(0, _REBALANCE, None)
    job.settle()
    assert job.ranks[0].appointments.sparing == NOBODY


@pytest.mark.parametrize(("left", "spared"), [(9.0, ()), (12.0, ()), (14.5, (1,))])
def test_another_layout_takes_time_that_must_be_there(left: float, spared: tuple[int, ...]) -> None:
    """4 s as it is, 6.0 s with the safety; 8 s and 2 s of planning, 13.5 s with it, where one of two sends all."""
    job = Job(2)
    _able(job, 1.0)
    job.emergency.measures.staged(1000, 4.0)
    job.emergency.spares.go({1})
    job.notice(1, terminate(left), left)
    job.settle()
    assert [save for _, save in job.ranks[0].acted] == [True]
    assert {rank.appointments.sparing.ranks for rank in job.ranks} == {spared}


def test_a_rank_that_has_given_the_step_up_comes_to_the_same_slices_later() -> None:
    appointments = Appointments(wait_seconds_max=0.05)
    appointments.heard(Word.PROPOSED, 3, 1, {})
    assert appointments.reach(3) is None  # it has waited, and gone on
    terms = Terms(True, "there is time", terminate(100), sparing=Sparing((1,), 5000))
    appointments.heard(Word.APPOINTED, 3, 1, terms.to_json())
    assert appointments.reach(4) is None
    assert appointments.sparing == Sparing((1,), 5000)
