"""Whether a checkpoint is worth starting before a deadline: rules for any numbers, and named cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.notices.should_save import Choice, InFlight, Outlook, StagingTimes, should_save

_SECONDS = st.floats(0, 1e5, allow_nan=False)
_OUTLOOKS = st.builds(
    Outlook,
    seconds_left=st.one_of(st.none(), st.floats(-100, 1e5)),
    staged_seconds=st.one_of(st.none(), _SECONDS),
    in_flight=st.lists(
        st.builds(InFlight, step=st.integers(0, 50), fraction=st.floats(0, 1), elapsed_seconds=_SECONDS),
        max_size=3,
    ),
    step_seconds=st.one_of(st.none(), _SECONDS),
    next_step=st.integers(51, 100),
    staged_step=st.integers(-1, 50),
)


@given(_OUTLOOKS)
def test_a_save_known_to_come_too_late_is_not_begun(outlook: Outlook) -> None:
    decision = should_save(outlook)
    assert decision.reason
    if outlook.seconds_left is None:
        assert decision.choice is Choice.TAKE
    elif decision.choice is Choice.TAKE:
        assert outlook.seconds_left > 0
        assert decision.wait_seconds < outlook.seconds_left
        known = outlook.staged_seconds or 0.0
        assert (
            known + (outlook.step_seconds or 0.0) * (outlook.staged_seconds is not None)
            < outlook.seconds_left
        )
    elif decision.choice is Choice.FINISH:
        assert outlook.in_flight
    else:
        assert not outlook.in_flight


@given(_OUTLOOKS, _SECONDS)
def test_more_time_never_takes_a_checkpoint_away(outlook: Outlook, more: float) -> None:
    if outlook.seconds_left is not None and should_save(outlook).choice is Choice.TAKE:
        later = replace(outlook, seconds_left=outlook.seconds_left + more)
        assert should_save(later).choice is Choice.TAKE


@given(_OUTLOOKS, _SECONDS)
def test_a_slower_way_never_brings_one_back(outlook: Outlook, more: float) -> None:
    if outlook.staged_seconds is not None and should_save(outlook).choice is not Choice.TAKE:
        slower = replace(outlook, staged_seconds=outlook.staged_seconds + more)
        assert should_save(slower).choice is not Choice.TAKE


_OUTLOOK = Outlook(seconds_left=120.0, staged_seconds=10.0, step_seconds=1.0, next_step=41, staged_step=30)


@pytest.mark.parametrize(
    ("changes", "choice", "said"),
    [
        ({}, Choice.TAKE, "120.0 s are left, 14.8 s are needed"),
        ({"seconds_left": 15.0}, Choice.TAKE, "15.0 s"),
        ({"seconds_left": 14.0}, Choice.SKIP, "step 30 is staged, 10 steps are lost"),
        ({"seconds_left": 14.0, "staged_step": -1}, Choice.SKIP, "nothing is staged, 41 steps are lost"),
        ({"seconds_left": -1.0}, Choice.SKIP, "passed 1.0 s ago"),
        ({"seconds_left": 0.5, "staged_seconds": None}, Choice.TAKE, "no checkpoint was staged yet"),
        ({"seconds_left": 0.0, "staged_seconds": None}, Choice.SKIP, "passed"),
        (
            {"in_flight": (InFlight(40, 0.5, 5.0),), "seconds_left": 19.0},
            Choice.FINISH,
            "step 40 is finished",
        ),
        ({"in_flight": (InFlight(40, 0.5, 5.0),), "seconds_left": 22.0}, Choice.TAKE, "21.0 s are needed"),
        ({"seconds_left": None}, Choice.TAKE, "no deadline"),
    ],
)
def test_the_cases(changes: dict[str, object], choice: Choice, said: str) -> None:
    decision = should_save(replace(_OUTLOOK, **changes))  # type: ignore[arg-type]
    assert decision.choice is choice, decision
    assert said in decision.reason


def test_steps_in_flight_go_first_at_their_own_speed() -> None:
    fast = should_save(replace(_OUTLOOK, in_flight=(InFlight(40, 0.8, 4.0),)))
    assert fast.wait_seconds == pytest.approx(1.0)  # a fifth is left of what took 4 s
    stuck = should_save(replace(_OUTLOOK, in_flight=(InFlight(40, 0.1, 100.0),)))
    assert stuck.wait_seconds == pytest.approx(9.0)  # as long as others took for nine tenths


def test_measures_take_the_slowest_of_the_last_few_by_bytes() -> None:
    measures = StagingTimes()
    assert measures.staged_seconds() is None
    for seconds in (100.0, 2.0, 3.0, 2.0):
        measures.add(1000, seconds)
    assert measures.staged_seconds() == 100.0
    measures.add(1000, 2.0)
    assert measures.staged_seconds() == 3.0
    measures.add(4000, 2.0)
    assert measures.staged_seconds() == 12.0, "in proportion"
