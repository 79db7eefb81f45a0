"""Agreement on a step after a notice: decisions, deadlines, repeated saves.

The agreement itself: test_step_agreement.py.
"""

from __future__ import annotations

from holdfast.notices.notice import Notice, NoticeKind
from holdfast.notices.should_save import InFlight
from tests.unit.trainer_side.agreeing import NoticeJob, terminate

_REBALANCE = Notice(NoticeKind.REBALANCE, None, "aws")


def test_a_rank_that_was_not_there_yet_is_asked_again_while_there_is_time() -> None:
    job = NoticeJob(2)
    job.notice(0, terminate(35), 35.0)
    for now in (11.0, 15.0, 22.0):  # unanswered; too early to repeat; repeated
        job.tick(now)
        assert job.emergency.open == (now == 22.0)
    job.settle()
    assert [len(rank.acted) for rank in job.ranks] == [1, 1]
    silent = NoticeJob(1)
    silent.notice(0, terminate(15), 15.0)
    for now in (11.0, 22.0, 33.0):
        silent.tick(now)
    assert silent.events() == [
        "notice",
        "emergency_failed",
    ]  # the deadline has passed: no rank gets a useless request
    assert not silent.emergency.open


def test_a_declined_emergency_save_is_tried_at_a_later_step() -> None:
    job = NoticeJob(2)
    job.notice(0, terminate(100), 100.0)
    job.settle()
    saved = job.ranks[0].acted[-1][0]
    job.emergency.on_offered(saved)
    job.do(job.emergency.on_ended(saved, "busy", job.now))
    job.settle()
    again = job.ranks[1].acted[-1][0]
    assert again > saved
    assert [rank.acted for rank in job.ranks] == [[(saved, True), (again, True)]] * 2
    job.emergency.on_offered(again)
    job.now = 7.0
    job.do(job.emergency.on_staged(again, 1000, 1.0, job.now))
    assert job.events()[-1] == "emergency_staged"
    assert "93.0 s before the deadline" in job.said[-1].text
    assert not job.emergency.open


def test_the_emergency_gives_up_after_some_saves() -> None:
    job = NoticeJob(1)
    job.notice(0, _REBALANCE, None)
    for _ in range(20):
        job.settle()
        if not job.emergency.open:
            break
        saved = job.ranks[0].acted[-1][0]
        job.emergency.on_offered(saved)
        job.do(job.emergency.on_ended(saved, "busy", job.now))
    assert len(job.ranks[0].acted) == 6
    assert job.events()[-1] == "emergency_failed"


def test_a_lost_rank_ends_it_and_a_later_notice_says_why() -> None:
    job = NoticeJob(2)
    job.notice(1, terminate(100), 100.0)
    job.do(job.emergency.on_rank_left(1, "rank 1 is dead", job.now))
    assert job.said[-1].event == "emergency_failed"
    assert "rank 1 is dead" in job.said[-1].text
    job.notice(0, terminate(100), 100.0)
    assert "rank 1 is dead" in job.said[-1].text
    job.settle()
    assert job.ranks[0].acted == []


def test_a_rank_that_dies_in_mid_send_is_not_saved_for_again() -> None:
    job = NoticeJob(2)
    job.notice(1, terminate(100), 100.0)
    job.settle()
    saved = job.ranks[0].acted[-1][0]
    job.emergency.on_offered(saved)
    job.do(job.emergency.on_rank_left(1, "rank 1 is dead", job.now))
    assert job.emergency.open  # the stager may have sent all messages
    job.do(job.emergency.on_ended(saved, "rank 1 is dead", job.now))
    assert job.events()[-1] == "emergency_failed"
    assert not job.emergency.open


def test_too_late_is_said_and_nobody_saves() -> None:
    job = NoticeJob(2)
    job.emergency.staging_times.add(1000, 60.0)
    job.notice(0, terminate(5), 5.0)
    job.settle()
    assert [rank.acted for rank in job.ranks] == [[(job.ranks[0].step, False)]] * 2
    assert job.said[-1].is_error
    assert "a new one needs" in job.said[-1].text


def test_a_step_in_flight_is_finished_and_no_new_one_is_begun() -> None:
    job = NoticeJob(2, [InFlight(3, 0.5, 4.0)])
    job.emergency.staging_times.add(1000, 8.0)
    job.notice(0, terminate(6), 6.0)
    job.settle()
    assert not any(save for rank in job.ranks for _, save in rank.acted)
    assert "step 3 is finished" in job.said[-1].text
    assert not job.said[-1].is_error


def test_a_rebalance_shortens_the_interval_for_a_while_at_the_same_steps_on_all() -> None:
    job = NoticeJob(2)
    job.notice(0, _REBALANCE, None)
    job.settle()
    at = job.ranks[0].acted[0][0]
    for rank in job.ranks:
        assert rank.agreed_steps.current_interval(100, at + 1) == 25
        assert rank.agreed_steps.current_interval(2, at + 1) == 1
        assert rank.agreed_steps.current_interval(0, at + 1) == 0
        assert rank.agreed_steps.current_interval(100, 10**9) == 100
        assert rank.agreed_steps.notice is not None
        assert rank.agreed_steps.notice.kind is NoticeKind.REBALANCE
    assert job.ranks[0].acted == job.ranks[1].acted == [(at, True)]


def test_a_graver_notice_takes_over_one_that_is_open() -> None:
    job = NoticeJob(2)
    job.notice(0, _REBALANCE, None)
    job.notice(1, terminate(50), 50.0)
    job.settle()
    assert [rank.acted for rank in job.ranks] == [[(job.ranks[0].step, True)]] * 2
    notice = job.ranks[0].agreed_steps.notice
    assert notice is not None
    assert (notice.kind, notice.rank) == (NoticeKind.TERMINATE, 1)
    assert job.events() == ["notice", "notice", "emergency"]


def test_a_deadline_that_is_heard_of_while_a_step_is_proposed_is_planned_for() -> None:
    job = NoticeJob(1)
    job.emergency.staging_times.add(1000, 60.0)
    job.notice(0, _REBALANCE, None)
    job.ranks[0].hear()
    job.answer(0)  # makes the decision, and proposes a step
    job.notice(0, terminate(5), 5.0)
    job.settle()
    assert [save for _, save in job.ranks[0].acted] == [False]
    assert job.events() == ["notice", "notice", "emergency"]


def test_a_second_notice_joins_the_first_until_its_step_is_staged() -> None:
    job = NoticeJob(2)
    job.notice(0, terminate(5), 5.0)
    job.notice(1, terminate(100), 100.0)
    job.settle()
    (emergency,) = [said for said in job.said if said.event == "emergency"]
    assert emergency.fields["seconds_left"] == 5.0  # the earlier deadline applies
    job.notice(1, terminate(90), 90.0)
    job.settle()
    saved = job.ranks[0].step
    assert [rank.acted for rank in job.ranks] == [[(saved, True)]] * 2
    job.emergency.on_offered(saved)
    job.do(job.emergency.on_staged(saved, 1000, 1.0, job.now))
    assert job.events() == ["notice", "notice", "emergency", "notice", "emergency_staged"]
    job.now = 9.0
    job.notice(1, terminate(80), 80.0)
    job.notice(0, _REBALANCE, None)
    job.settle()
    assert len(job.ranks[0].acted) == 1
    assert f"step {saved}, staged 9.0 s ago, serves this notice, too" in job.said[-1].text
    job.now = 11.0
    job.notice(1, terminate(70), 70.0)
    job.settle()
    assert len(job.ranks[0].acted) == 2


def test_the_end_after_a_rebalance_gets_a_step_of_its_own() -> None:
    job = NoticeJob(2)
    for number, notice in enumerate((_REBALANCE, terminate(100)), 1):
        job.notice(0, notice, notice.seconds_left())
        job.settle()
        saved = job.ranks[0].step
        job.emergency.on_offered(saved)
        job.do(job.emergency.on_staged(saved, 1000, 1.0, job.now))
        assert [len(rank.acted) for rank in job.ranks] == [number, number]


def test_checkpoints_of_the_usual_interval_are_not_taken_for_the_one_that_was_meant() -> None:
    job = NoticeJob(1)
    job.notice(0, terminate(100), 100.0)
    job.settle()
    saved = job.ranks[0].step
    job.emergency.on_offered(saved - 1)
    job.do(job.emergency.on_staged(saved - 1, 1000, 1.0, job.now))
    job.do(job.emergency.on_ended(saved - 1, "busy", job.now))
    assert job.emergency.open
    assert job.events() == ["notice", "emergency"]
    job.emergency.on_offered(saved)
    job.do(job.emergency.on_staged(saved, 1000, 1.0, job.now))
    assert not job.emergency.open


def test_a_step_that_no_rank_comes_to_is_given_up_after_the_deadline() -> None:
    job = NoticeJob(1)
    job.notice(0, terminate(20), 20.0)
    job.settle()
    job.now = 29.0
    assert job.emergency.tick(job.now) == []
    job.tick(31.0)
    assert job.events()[-1] == "emergency_failed"
    assert not job.emergency.open
