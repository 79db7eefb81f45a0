from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from operator_side.drill.kill_plan import GiveNotice, Kill, KillSequence, KillTarget, SendKill, plan_kills
from tests.support.seeds import each_seed

CHECKPOINTS = [4, 9, 14, 19, 24, 29]
NOTICE_SECONDS = 30.0


@each_seed(20)
def test_each_kill_has_a_checkpoint_of_its_own_behind_it(seed: int) -> None:
    kills = plan_kills(seed, 4, "both", ranks=2, checkpoints=CHECKPOINTS)
    gaps = [max(step for step in CHECKPOINTS if step <= kill.after_step) for kill in kills]
    assert gaps == sorted(set(gaps))
    assert CHECKPOINTS[-1] not in gaps
    assert all(0 <= kill.rank < 2 and 0 <= kill.delay_fraction < 1 for kill in kills)
    assert [kill.notice for kill in kills].count(True) == 2
    assert kills == plan_kills(seed, 4, "both", ranks=2, checkpoints=CHECKPOINTS)


def test_another_seed_draws_other_kills() -> None:
    drawn = {tuple(plan_kills(seed, 3, "none", ranks=2, checkpoints=CHECKPOINTS)) for seed in range(10)}
    assert len(drawn) == 10


def test_each_kind_comes_once_before_one_comes_again() -> None:
    kills = plan_kills(7, 4, "none", ranks=2, checkpoints=CHECKPOINTS)
    assert {kill.target for kill in kills} == set(KillTarget) - {KillTarget.WRAPPER}
    assert not any(kill.notice for kill in kills)


def test_wrappers_are_killed_where_that_is_asked_for() -> None:
    kills = plan_kills(7, 3, "wrapper", ranks=2, checkpoints=CHECKPOINTS)
    assert {(kill.target, kill.notice) for kill in kills} == {(KillTarget.WRAPPER, False)}
    assert {kill.description for kill in kills} <= {"the wrapper of rank 0", "the wrapper of rank 1"}


def test_a_run_with_too_few_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a run with 7 checkpoints or more, got 6"):
        plan_kills(0, 6, "none", ranks=2, checkpoints=CHECKPOINTS)


def test_a_kill_waits_for_its_step_and_for_all_ranks() -> None:
    kill = Kill(1, KillTarget.RANKS, notice=False, rank=0, after_step=5, delay_fraction=0.5)
    sequence = KillSequence([kill], notice_seconds=NOTICE_SECONDS, comparable=CHECKPOINTS)
    sequence.record_staged(4)
    sequence.record_step(4, 10.0, 1)
    sequence.record_step(5, 12.0, 1)
    assert sequence.tick(20.0) is None, "not every rank has begun"
    sequence.record_training()
    assert sequence.tick(12.9) is None, "half a step is one second"
    assert sequence.tick(13.0) == SendKill(kill)
    assert sequence.tick(14.0) is None
    assert not sequence._remaining


@pytest.mark.parametrize("answered", [True, False])
def test_after_a_notice_the_kill_waits_for_its_answer_or_its_time(answered: bool) -> None:
    kill = Kill(1, KillTarget.RANK, notice=True, rank=1, after_step=5, delay_fraction=0.0)
    sequence = KillSequence([kill], notice_seconds=NOTICE_SECONDS, comparable=CHECKPOINTS)
    sequence.record_staged(4)
    sequence.record_training()
    sequence.record_answer()  # of an earlier notice
    sequence.record_step(5, 12.0, 1)
    assert sequence.tick(12.0) == GiveNotice(kill)
    assert sequence.tick(13.0) is None
    if answered:
        sequence.record_answer()
        assert sequence.tick(13.0) == SendKill(kill)
    assert answered or sequence.tick(12.0 + NOTICE_SECONDS) == SendKill(kill)


def test_the_next_kill_waits_until_training_resumes_and_a_step_of_the_reference_is_staged() -> None:
    kills = [
        Kill(n, KillTarget.STAGER, notice=False, rank=0, after_step=5 * n, delay_fraction=0.0) for n in (1, 2)
    ]
    sequence = KillSequence(kills, notice_seconds=NOTICE_SECONDS, comparable=CHECKPOINTS)
    sequence.record_staged(9)
    sequence.record_training()
    sequence.record_step(11, 1.0, 1)
    assert sequence.tick(1.0) == SendKill(kills[0])
    assert sequence.tick(2.0) is None
    sequence.record_staged(14)  # by the attempt that was killed; it resumes from there
    sequence.record_training()
    assert sequence.tick(3.0) is None, "no step of the new attempt is known"
    sequence.record_step(15, 3.0, 2)
    assert sequence.tick(4.0) is None, "the reference's step 14 is older than the resume"
    sequence.record_staged(17)
    assert sequence.tick(5.0) is None, "the reference has no step 17"
    sequence.record_staged(19)
    assert sequence.tick(6.0) == SendKill(kills[1])


@pytest.mark.parametrize("notice", [True, False])
def test_no_kill_and_no_notice_comes_before_a_checkpoint_was_staged(notice: bool) -> None:
    kill = Kill(1, KillTarget.RANKS, notice=notice, rank=0, after_step=5, delay_fraction=0.0)
    sequence = KillSequence([kill], notice_seconds=NOTICE_SECONDS, comparable=CHECKPOINTS)
    sequence.record_training()
    sequence.record_step(9, 12.0, 1)
    assert sequence.tick(1000.0) is None
    sequence.record_staged(4)
    assert sequence.tick(1000.0) == (GiveNotice(kill) if notice else SendKill(kill))
