"""The loss from a kill at this moment, from hand-made times of one run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_side.status.loss import Loss, LossInputs, SavedPoint, loss_with_node, loss_with_trainers

STAGED, DURABLE = SavedPoint(1, 40, 1040.0), SavedPoint(1, 20, 1020.0)


def known(**more: object) -> LossInputs:
    fields: dict[str, object] = {
        "now_unix": 1050.0,
        "running_since_unix": 1000.0,
        "staged": STAGED,
        "durable": DURABLE,
        "newest": STAGED,
        "step_seconds": 1.0,
        **more,
    }
    return LossInputs(**fields)  # type: ignore[arg-type]


def test_trainers_go_back_to_what_is_staged_and_the_node_to_what_is_durable() -> None:
    assert loss_with_trainers(known()) == Loss(10, True, 10.0, None, 40)
    assert loss_with_node(known()) == Loss(30, True, 30.0, None, 20)


def test_money_is_time() -> None:
    assert loss_with_node(known(dollars_per_hour=120.0)).dollars == pytest.approx(1.0)


def test_steps_are_reckoned_from_the_newest_save_that_a_rank_has_told() -> None:
    assert loss_with_trainers(known(newest=SavedPoint(1, 45, 1045.0))).steps == 10
    assert loss_with_trainers(known(step_seconds=None)).steps is None  # the length of a step is still unknown
    assert loss_with_trainers(known(newest=None, staged=None, durable=None)) == Loss(
        None, True, 50.0, None, None
    )


def test_before_the_first_checkpoint_all_of_the_job_is_lost() -> None:
    assert loss_with_trainers(known(staged=None, durable=None, newest=SavedPoint(1, 9, 1049.0))) == Loss(
        11, True, 50.0, None, None
    )


def test_a_job_that_has_just_begun_has_little_to_lose_however_old_its_checkpoint_is() -> None:
    later = known(running_since_unix=9000.0, now_unix=9004.0, durable=STAGED)
    assert loss_with_trainers(later) == Loss(4, True, 4.0, None, 40)
    assert loss_with_node(later) == loss_with_trainers(later)


def test_an_earlier_jobs_staged_step_is_lost_with_the_node_until_durable() -> None:
    later = known(running_since_unix=9000.0, now_unix=9004.0)
    assert loss_with_trainers(later).seconds == 4.0
    assert loss_with_node(later) == Loss(24, True, 24.0, None, 20)


def test_when_no_job_runs_only_what_the_ring_alone_has_can_be_lost() -> None:
    over = known(running_since_unix=None)
    assert loss_with_trainers(over) == Loss(0, False, 0.0, None, 40)
    assert loss_with_node(over) == Loss(20, False, 20.0, None, 20)
    assert loss_with_node(known(running_since_unix=None, durable=STAGED)).seconds == 0.0
    nothing = LossInputs(1050.0, None)
    assert loss_with_node(nothing) == Loss(0, False, 0.0, None, None)


TIMES = st.floats(0, 2e9)
POINTS = st.none() | st.builds(SavedPoint, st.integers(1, 3), st.integers(0, 1000), TIMES)


@given(TIMES, st.none() | TIMES, POINTS, POINTS, POINTS, st.none() | st.floats(1e-3, 1e3))
def test_losses_are_never_negative_whatever_the_clocks_say(
    now: float,
    since: float | None,
    staged: SavedPoint | None,
    durable: SavedPoint | None,
    newest: SavedPoint | None,
    step_seconds: float | None,
) -> None:
    run = LossInputs(now, since, staged, durable, newest, step_seconds, 1.0)
    for lost in (loss_with_trainers(run), loss_with_node(run)):
        assert lost.seconds >= 0
        assert (lost.steps or 0) >= 0
        assert (lost.dollars or 0.0) >= 0
