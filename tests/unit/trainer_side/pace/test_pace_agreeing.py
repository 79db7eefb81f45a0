"""Agreement on a step for a new interval: paces, refusals, and ranks that may have received different ones.

The agreement itself: tests/unit/trainer_side/notice/test_step_agreement.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.errors import ProtocolError
from holdfast.notices.messages import Announcement, Effect
from holdfast.wire.pace import PaceRequest
from tests.unit.trainer_side.agreeing import APPOINTED, PROPOSED, IntervalJob, IntervalRank
from trainer_side.pace.schedule import Schedule, SchedulePhase

_AHEAD_MAX = 8  # training keeps the ranks within a few steps


def play(job: IntervalJob, moves: Sequence[tuple[str, int, int]]) -> None:
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


def go_wrong(job: IntervalJob, move: str, index: int) -> None:
    rank, effects = job.ranks[index], list[Effect]()
    match move:
        case "give up":
            rank.give_up()
        case "silent":
            effects = job.interval.on_doubt(f"rank {index} is silent")
        case "late":
            job.now += 11
            effects = job.interval.tick(job.now)
        case "lose" if not rank.cut:
            rank.lose()
            effects = job.interval.on_rank_left(f"rank {index} is lost", lost=True)
    if not job.dead:
        job.do(effects)


def test_a_notice_shortens_it_for_a_while() -> None:
    schedule = Schedule(auto=True, wait_seconds_max=1)
    schedule.handle(Announcement(PROPOSED, 5, 1))
    schedule.handle(Announcement(APPOINTED, 5, 1, {"first": 8, "every": 8}))
    saved = [step for step in range(21) if schedule.reach(step)]
    saved += [step for step in range(21, 40) if schedule.reach(step, lambda n: n // 4)]
    saved += [step for step in range(40, 60) if schedule.reach(step)]
    assert saved == [8, 16, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 48, 56]
    schedule.end()
    saved = [step + 1 for step in range(63, 200) if schedule.reach(step, lambda n: max(1, n // 3))]
    assert set(range(64, 200, 8)) <= set(saved)  # a shorter interval keeps all the usual steps


def test_a_rank_with_another_interval_refuses_and_all_stay_as_they_are() -> None:
    job = IntervalJob(3)
    job.ranks[1] = IntervalRank(auto=False)
    job.abreast(20)
    job.wish(10)
    job.settle()
    assert job.events() == ["interval_kept"]
    assert job.said[0].is_error
    assert "rank 1: it saves at its own steps" in job.said[0].text
    assert job.ranks[0].schedule.phase is SchedulePhase.STARTING
    job.wish(20)
    assert not job.interval.open


def test_a_rank_that_has_waited_in_vain_says_so_and_all_go_on_at_steps_in_common() -> None:
    job = IntervalJob(2)
    job.abreast(20)
    job.wish(10)
    job.deliver()
    for index, rank in enumerate(job.ranks):
        rank.hear()
        job.answer(index)
    kept, given_up = job.ranks
    kept.hear()
    while not kept.acted:
        kept.train()
    while not given_up.waits:
        given_up.train()
    given_up.give_up()
    job.settle()
    job.abreast(64)
    assert job.events() == ["interval", "interval_loose"]
    assert "rank 1: no agreement came at step" in job.said[-1].text
    assert (kept.schedule.phase, kept.schedule.every) == (SchedulePhase.LOOSE, 16)
    assert given_up.schedule.phase is SchedulePhase.STARTING


def test_a_good_bye_is_no_reason_to_go_other_ways() -> None:
    job = IntervalJob(2)
    job.wish(10)
    job.settle()
    job.do(job.interval.on_rank_left("rank 1 has left", lost=False))
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
        Schedule(auto=True, wait_seconds_max=1).handle(Announcement(APPOINTED, 3, 1, body))


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
        PaceRequest.from_json(body)
