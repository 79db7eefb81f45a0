"""The stager's retiming and the ranks' schedules, in every order in which messages, steps and deaths may come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.notices.decider import Said
from holdfast.wire.pace import Announce, Pace, PaceWord, Wish
from stager.retiming import Retiming, Saying
from trainer_side.link.schedule import Reply, Schedule, SchedulePhase

WHY = "every n steps: because"


class Rank:
    def __init__(self, *, auto: bool = True) -> None:
        self.schedule = Schedule(auto=auto, wait_seconds_max=0.0)
        self.inbox: deque[Announce] = deque()
        self.answers: deque[tuple[int, Reply]] = deque()
        self.step = -1
        self.saved: list[int] = []
        self.cut = False

    def hear(self) -> None:
        said = self.inbox.popleft()
        if self.cut:
            return
        reply = self.schedule.heard(said.word, said.step, said.number, said.body)
        if reply is not None:
            self.answers.append((said.number, reply))

    def lose(self) -> None:
        """Its link gives the stager up."""
        self.cut = True
        self.inbox.clear()
        self.answers.clear()
        self.schedule.end()

    @property
    def waits(self) -> bool:
        """Whether training would stand still in its next `reach`; the test has one thread."""
        promise = self.schedule._promise
        return promise is not None and self.step + 1 >= promise.step

    def train(self, *, gives_up: bool = False) -> None:
        if self.waits and not gives_up:
            return
        self.step += 1
        if self.schedule.reach(self.step):
            self.saved.append(self.step)


class Job:
    """Ranks and a stager whose messages are delivered when the test says so."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self.retiming = Retiming(ranks, answer_seconds_max=10.0)
        self.said: list[Said] = []
        self.now = 0.0
        self.dead = False
        self.dies_after: int | None = None  # so many more messages leave the stager, then it is dead

    def do(self, calls: Sequence[Saying]) -> None:
        for call in calls:
            if isinstance(call, Said):
                self.said.append(call)
                continue
            for rank in self.ranks:
                if self.dies_after is not None:
                    self.dead = self.dead or self.dies_after == 0
                    self.dies_after = max(0, self.dies_after - 1)
                if not self.dead:
                    rank.inbox.append(call)

    def wish(self, every: int) -> None:
        if not self.dead:
            self.do(self.retiming.wished(Wish(every, self.ranks[0].step, WHY), self.now))

    def answer(self, index: int) -> None:
        number, reply = self.ranks[index].answers.popleft()
        if self.dead:
            return
        if reply.refusal:
            self.do(self.retiming.refused(index, number, reply.refusal))
        else:
            self.do(self.retiming.here(index, number, reply.next_step, 0.1, self.now))

    def settle(self) -> None:
        """Deliver all that is on its way, until every rank has come to what is appointed."""
        for _ in range(10_000):
            for index, rank in enumerate(self.ranks):
                while rank.inbox:
                    rank.hear()
                while rank.answers:
                    self.answer(index)
            if self.dead:
                for rank in self.ranks:
                    if not rank.cut:
                        rank.lose()
            due = [rank for rank in self.ranks if rank.schedule._promise or rank.schedule._appointed]
            if not due and not any(rank.inbox or rank.answers for rank in self.ranks):
                return
            for rank in due:
                rank.train()
        raise AssertionError("the ranks come to no end")

    def abreast(self, steps: int) -> int:
        """Train on until all are at the same step, `steps` above the first one; returns the step they began at."""
        begin = max(rank.step for rank in self.ranks)
        for rank in self.ranks:
            while rank.step < begin + steps:
                rank.train()
        return begin

    def events(self) -> list[str]:
        return [said.event for said in self.said]


_USUAL = ("hear", "hear", "answer", "answer", "train", "train", "wish")
_WRONG = ("give up", "silent", "late", "lose")
_AHEAD_MAX = 8  # the ranks of a training meet in each step, or nearly so


def moves_of(seed: int, *, wrong: float = 0.0) -> list[tuple[str, int, int]]:
    """What happens, to which rank, and a number: some hundred moves, `wrong` of them of the bad kind."""
    chance = random.Random(seed)
    return [
        (
            chance.choice(_WRONG if chance.random() < wrong else _USUAL),
            chance.randrange(4),
            chance.randint(1, 90),
        )
        for _ in range(chance.randint(20, 400))
    ]


def play(job: Job, moves: Sequence[tuple[str, int, int]]) -> None:
    for move, who, much in moves:
        index = who % len(job.ranks)
        rank = job.ranks[index]
        match move:
            case "hear" if rank.inbox:
                rank.hear()
            case "answer" if rank.answers:
                job.answer(index)
            case "train":
                slowest = min(other.step for other in job.ranks)
                for _ in range(much if much < _AHEAD_MAX else 1):
                    if rank.step < slowest + _AHEAD_MAX:
                        rank.train()
            case "wish":
                job.wish(much)
            case _:
                go_wrong(job, move, index)


def go_wrong(job: Job, move: str, index: int) -> None:
    rank, calls = job.ranks[index], list[Saying]()
    match move:
        case "give up":
            rank.train(gives_up=True)
        case "silent":
            calls = job.retiming.doubtful(f"rank {index} is silent")
        case "late":
            job.now += 11
            calls = job.retiming.tick(job.now)
        case "lose" if not rank.cut:
            rank.lose()
            calls = job.retiming.left(f"rank {index} is lost", lost=True)
    if not job.dead:
        job.do(calls)


@settings(max_examples=200, deadline=None)
@given(ranks=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_all_ranks_save_the_same_steps_whatever_comes_first(ranks: int, seed: int) -> None:
    """As long as nobody is lost: not one step differs, at any moment."""
    job = Job(ranks)
    moves = moves_of(seed)
    play(job, moves)
    job.settle()
    job.abreast(200)
    first = job.ranks[0]
    for rank in job.ranks:
        assert rank.saved == first.saved
        assert (rank.schedule.phase, rank.schedule.every) == (first.schedule.phase, first.schedule.every)
    if any(move == "wish" for move, _, _ in moves) and "interval_kept" not in job.events():
        assert first.schedule.phase is SchedulePhase.PACED


@settings(max_examples=400, deadline=None)
@given(
    ranks=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    wrong=st.sampled_from([0.0, 0.01, 0.05]),
    dies_after=st.none() | st.integers(0, 60),
)
def test_whoever_is_lost_the_ranks_save_steps_in_common(
    ranks: int, seed: int, wrong: float, dies_after: int | None
) -> None:
    """A stager that dies between two messages, links that end, promises that are given up: they end up at multiples
    of powers of two, or all at the same pace, so there are always steps that all of them save.
    """
    job = Job(ranks)
    job.dies_after = dies_after
    with patch("trainer_side.link.schedule._START_EVERY_MAX", 128):
        play(job, moves_of(seed, wrong=wrong))
        if job.retiming.open:
            play(job, [("late", 0, 0)])
        job.settle()
        begin = job.abreast(4 * 128)
    saved = [{step for step in rank.saved if step > begin} for rank in job.ranks]
    if all(rank.schedule.phase is SchedulePhase.PACED for rank in job.ranks):
        assert all(steps == saved[0] for steps in saved)
    else:
        assert not any(rank.schedule.phase is SchedulePhase.PACED for rank in job.ranks)
    common = set.intersection(*saved)
    if not all(rank.schedule.phase is SchedulePhase.PACED for rank in job.ranks):
        # Intervals up to 90 become 128 at most, and who was never paced comes to 128 by itself.
        assert common >= {step for step in range(begin + 256, begin + 512) if (step + 1) % 128 == 0}
    assert common


def test_the_first_checkpoints_need_no_word() -> None:
    job = Job(2)
    job.abreast(4100)
    for rank in job.ranks:
        assert [step + 1 for step in rank.saved] == [16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


def test_a_job_that_goes_on_begins_there() -> None:
    schedule = Schedule(auto=True, wait_seconds_max=1)
    saved = [step + 1 for step in range(1000, 3000) if schedule.reach(step)]
    assert saved == [1024, 1056, 1088, 1152, 1280, 1536, 2048]


def test_a_wish_holds_from_one_step_on_and_counts_from_the_last_save() -> None:
    job = Job(2)
    job.abreast(20)
    job.wish(41)
    job.settle()
    (said,) = job.said
    at = said.fields["at_step"]
    assert said.text == f"from step {at} on {WHY}"
    assert job.ranks[0].schedule._pace == Pace(19 + 41, 41)
    job.abreast(200)
    assert job.ranks[0].saved == job.ranks[1].saved == [15, 60, 101, 142, 183, 224]


def test_a_shorter_one_that_is_overdue_begins_at_its_step() -> None:
    job = Job(1)
    job.abreast(700)
    job.wish(3)
    job.settle()
    first = job.said[0].fields["first_step"]
    assert first == job.said[0].fields["at_step"]
    job.abreast(10)
    assert job.ranks[0].saved[-4:] == [first, first + 3, first + 6, first + 9]


def test_the_last_of_several_wishes_holds() -> None:
    job = Job(2)
    job.abreast(5)
    for every in (10, 20, 30):
        job.wish(every)
    job.settle()
    assert [rank.schedule.every for rank in job.ranks] == [30, 30]
    assert job.events() == ["interval"]
    job.wish(30)
    assert not job.retiming.open


def test_another_interval_that_follows_before_the_first_is_reached_loses_none() -> None:
    job = Job(2)
    job.abreast(20)
    job.wish(10)
    for _ in range(2):
        for index, rank in enumerate(job.ranks):
            rank.hear()
            job.answer(index)
    job.wish(30)  # appointed is the other one, and no rank has come to its step
    job.settle()
    first, second = job.said
    assert first.fields["every"] == 10
    assert second.fields["at_step"] > first.fields["at_step"]
    assert [rank.schedule.every for rank in job.ranks] == [30, 30]
    assert job.ranks[0].saved == job.ranks[1].saved


def test_a_notice_shortens_it_for_a_while() -> None:
    schedule = Schedule(auto=True, wait_seconds_max=1)
    schedule.heard(PaceWord.PROPOSED, 5, 1, {})
    schedule.heard(PaceWord.APPOINTED, 5, 1, {"first": 8, "every": 8})
    saved = [step for step in range(21) if schedule.reach(step)]
    saved += [step for step in range(21, 40) if schedule.reach(step, lambda n: n // 4)]
    saved += [step for step in range(40, 60) if schedule.reach(step)]
    assert saved == [8, 16, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 48, 56]
    schedule.end()
    saved = [step + 1 for step in range(63, 200) if schedule.reach(step, lambda n: max(1, n // 3))]
    assert set(range(64, 200, 8)) <= set(saved)  # what is shorter leaves none of the usual ones out


def test_a_rank_with_another_interval_refuses_and_all_stay_as_they_are() -> None:
    job = Job(3)
    job.ranks[1] = Rank(auto=False)
    job.abreast(20)
    job.wish(10)
    job.settle()
    assert job.events() == ["interval_kept"]
    assert job.said[0].loud
    assert "rank 1: it saves at its own steps" in job.said[0].text
    assert job.ranks[0].schedule.phase is SchedulePhase.STARTING
    job.wish(20)
    assert not job.retiming.open


def test_ranks_that_race_past_every_step_are_given_up() -> None:
    job = Job(2)
    job.wish(10)
    for _ in range(30):
        for index, rank in enumerate(job.ranks):
            while rank.inbox:
                if rank.inbox[0].word is PaceWord.PROPOSED:
                    for _ in range(3000):  # before it hears of the step
                        rank.train()
                rank.hear()
            while rank.answers:
                job.answer(index)
    assert job.events() == ["interval_kept"]
    assert not job.retiming.open


def test_who_does_not_answer_ends_the_try_and_the_next_wish_begins_anew() -> None:
    job = Job(2)
    job.wish(10)
    job.ranks[0].hear()
    job.answer(0)
    job.now = 10.5
    job.do(job.retiming.tick(job.now))
    assert "rank 1 did not answer within 10 s" in job.said[0].text
    job.settle()
    job.wish(12)
    job.settle()
    assert job.events() == ["interval_kept", "interval"]
    assert [rank.schedule.every for rank in job.ranks] == [12, 12]


def test_a_good_bye_is_no_reason_to_go_other_ways() -> None:
    job = Job(2)
    job.wish(10)
    job.settle()
    job.do(job.retiming.left("rank 1 has left", lost=False))
    job.settle()
    assert job.events() == ["interval"]
    assert job.ranks[0].schedule.phase is SchedulePhase.PACED


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"first": 1},
        {"first": -1, "every": 2},
        {"first": 1, "every": 0},
        {"first": 1, "every": True},
        {"first": 2**62, "every": 1},
        {"first": "1", "every": 1},
        {"first": 1, "every": 10**7},
    ],
)
def test_a_body_that_is_none_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="SAVE_EVERY"):
        Schedule(auto=True, wait_seconds_max=1).heard(PaceWord.APPOINTED, 3, 1, body)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"every": 0, "after": 1, "why": ""},
        {"every": 1, "after": -2, "why": ""},
        {"every": 1, "after": 1, "why": 7},
        {"every": 1, "after": 1, "why": "x" * 2000},
    ],
)
def test_a_wish_that_is_none_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="WISH"):
        Wish.from_json(body)
