"""The interval: against brute force over every interval, and against a numeric minimum for Young and Daly."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.policy.cost import Cost, best_in_flight
from holdfast.policy.interval import best_interval, least_interval, slowdown

_EVERY_MAX = 400


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    staged = draw(st.floats(0, 20))
    return Cost(
        iteration_seconds=draw(st.floats(0.01, 10)),
        stall_seconds=draw(st.floats(0, 5)),
        staged_seconds=staged,
        durable_seconds=staged + draw(st.floats(0, 30)),
        in_flight_max=draw(st.integers(1, 4)),
    )


@given(costs(), st.floats(0.001, 1))
def test_the_least_interval_is_the_least_that_keeps_the_bound(cost: Cost, bound: float) -> None:
    kept = [every for every in range(1, _EVERY_MAX + 1) if cost.overhead(every) <= bound]
    if kept:
        assert least_interval(cost, bound, every_max=_EVERY_MAX) == kept[0]
    else:
        with pytest.raises(ConfigError, match="Possible"):
            least_interval(cost, bound, every_max=_EVERY_MAX)


@pytest.mark.parametrize(
    ("durable", "places", "bound", "every"),
    [(10.2, 1, 0.03, 10), (102.9, 1, 0.03, 100), (10.4, 1, 0.03, 11), (10.4, 2, 0.03, 6), (0.0, 1, 0.03, 1)],
)
def test_without_a_stall_it_is_pcchecks_formula(
    durable: float, places: int, bound: float, every: int
) -> None:
    cost = Cost(1.0, 0.0, 0.0, durable, places)
    assert least_interval(cost, bound, every_max=100) == every
    assert every == max(1, math.ceil(durable / (places * (1 + bound) * 1.0)))


def test_a_bound_that_cannot_be_kept_says_what_can_be() -> None:
    cost = Cost(0.2, 4.4, 4.4, 4.4)
    with pytest.raises(ConfigError, match=r"Possible: 22\.00% every 100 iterations, or 3\.00% every 734"):
        least_interval(cost, 0.03, every_max=100)
    assert least_interval(cost, 0.03, every_max=734) == 734
    assert least_interval(cost, 0.22, every_max=100) == 100


@given(costs(), st.floats(1, 1e5), st.integers(1, 50))
def test_the_best_interval_is_the_best_of_all(cost: Cost, mtbf_seconds: float, at_least: int) -> None:
    found = best_interval(cost, mtbf_seconds, at_least=at_least, every_max=_EVERY_MAX)
    assert at_least <= found <= _EVERY_MAX
    least = min(slowdown(cost, every, mtbf_seconds) for every in range(at_least, _EVERY_MAX + 1))
    assume(math.isfinite(least))
    assert slowdown(cost, found, mtbf_seconds) <= least * (1 + 1e-9)


@given(st.floats(0.001, 10), st.floats(500, 1e6))
def test_the_best_interval_is_near_the_numeric_minimum(stall_seconds: float, mtbf_seconds: float) -> None:
    assume(stall_seconds < mtbf_seconds / 200)
    times = [10 ** (power / 500) for power in range(-1500, 3500)]

    def slowed(work: float) -> float:
        over = (work + stall_seconds) / mtbf_seconds
        return mtbf_seconds * math.expm1(over) / work if over < 500 else math.inf

    best = min(times, key=slowed)
    cost = Cost(best / 1000, stall_seconds, 0.0, 0.0)
    assert math.isclose(best_interval(cost, mtbf_seconds, every_max=10_000) * best / 1000, best, rel_tol=0.02)


@given(costs(), st.floats(10, 1e5), st.floats(1, 10))
def test_more_losses_never_make_the_interval_longer(cost: Cost, mtbf_seconds: float, times: float) -> None:
    often = best_interval(cost, mtbf_seconds, every_max=10_000)
    rarely = best_interval(cost, mtbf_seconds * times, every_max=10_000)
    assert often <= rarely or math.isclose(
        slowdown(cost, often, mtbf_seconds), slowdown(cost, rarely, mtbf_seconds), rel_tol=1e-9
    )


def test_the_number_in_flight_is_the_one_with_the_least_time_for_each() -> None:
    measured = {1: 10.0, 2: 12.0, 3: 17.0, 4: 28.0}
    assert best_in_flight(measured, places_max=4) == 3
    assert best_in_flight(measured, places_max=2) == 2
    assert best_in_flight({1: 5.0, 2: 10.0}, places_max=8) == 1, "no gain, no memory for it"
    with pytest.raises(ConfigError, match="expected a time measured for 1 to 2"):
        best_in_flight({3: 1.0}, places_max=2)
    with pytest.raises(ConfigError, match="0 for 1 at once"):
        best_in_flight({1: 0.0}, places_max=2)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"iteration_seconds": 0.0}, "was an iteration measured"),
        ({"iteration_seconds": math.nan}, "iteration_seconds"),
        ({"stall_seconds": -1.0}, "stall_seconds"),
        ({"durable_seconds": math.inf}, "durable_seconds"),
        ({"staged_seconds": 3.0}, "at most durable_seconds"),
        ({"in_flight_max": 0}, "in_flight_max"),
    ],
)
def test_impossible_measurements_are_refused(wrong: dict[str, float], what: str) -> None:
    right = {"iteration_seconds": 1.0, "stall_seconds": 0.1, "staged_seconds": 1.0, "durable_seconds": 2.0}
    Cost(**right)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=what):
        Cost(**{**right, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [0.0, -0.1, math.nan, math.inf])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="overhead_max"):
        least_interval(Cost(1.0, 0.1, 0.0, 0.0), bound, every_max=10)
