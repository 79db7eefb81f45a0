"""The governor changes the interval in both directions, soon enough, and not while figures only fluctuate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.cost import Cost
from holdfast.policy.governor import Governor
from holdfast.policy.hazard import Hazard


def cost(durable: float, *, iteration: float = 1.0, stall: float = 0.01) -> Cost:
    return Cost(iteration, stall, 0.5 * durable, durable)


def governor(**settings: float) -> Governor:
    return Governor(Hazard(0.0), **{"overhead_max": 0.03, "every_seconds_max": 3600.0, **settings})


def run(judge: Governor, current: int | None, *durable: float) -> list[int | None]:
    """The interval after each checkpoint."""
    found = []
    for seconds in durable:
        change = judge.consider(cost(seconds), current)
        current = current if change is None else change.advice.every
        found.append(current)
    return found


def test_the_interval_grows_after_two_and_shrinks_after_three() -> None:
    assert run(governor(), None, 20.0, 80.0, 80.0, 20.0, 20.0, 20.0) == [20, 20, 78, 78, 78, 20]


def test_an_accidentally_slow_checkpoint_changes_nothing() -> None:
    assert set(run(governor(), None, *([40.0] * 3 + [400.0]) * 5)) == {39}
    assert set(run(governor(), None, *([40.0] * 3 + [4.0, 4.0]) * 5)) == {39}


def test_the_interval_stays_where_rounding_makes_the_difference() -> None:
    """16.3 and 19.8 steps differ by less than a quarter, 16 and 20 do not."""
    assert set(run(governor(), None, *(18 * waver for waver in (0.90625, *[1.1] * 4)))) == {16}
    exact = [seconds / 10 for seconds in range(90, 500)]
    for first, then in ((0.9, 1.1), (1.1, 0.9)):
        flaps = [of for of in exact if len({*run(governor(), None, first * of, *[then * of] * 4)}) > 1]
        assert flaps == []


@given(st.floats(1.0, 500.0), st.lists(st.floats(0.9, 1.1), min_size=2, max_size=60))
def test_the_interval_does_not_flap_where_figures_waver_by_a_tenth(
    durable: float, wavers: list[float]
) -> None:
    intervals = run(governor(), None, *(durable * waver for waver in wavers))
    if min(wavers) * durable > 8:  # below, a whole step is more than a quarter
        assert len(set(intervals)) == 1


@given(
    st.floats(50.0, 500.0), st.sampled_from([0.2, 0.5, 2.0, 10.0]), st.lists(st.floats(0.9, 1.1), min_size=12)
)
def test_the_interval_follows_a_lasting_change_and_stays(
    durable: float, factor: float, wavers: list[float]
) -> None:
    judge = governor()
    run(judge, None, durable)
    before = run(governor(), None, durable)[-1]
    after = run(judge, before, *(durable * factor * waver for waver in wavers))
    assert len({*after[3:]}) == 1
    wanted = run(governor(), None, durable * factor)[-1]
    assert wanted is not None
    assert after[-1] is not None
    assert 0.7 * wanted <= after[-1] <= 1.35 * wanted


def test_the_interval_that_holds_keeps_the_bound() -> None:
    change = governor().consider(cost(10.0, stall=1.19), None)
    assert change is not None
    assert change.advice.every == 40
    assert change.advice.overhead <= 0.03
    assert change.describe() == "every 40 steps: 3.0 % stall, expected loss 26 s per preemption"


def test_the_interval_with_losses_is_the_one_that_loses_least() -> None:
    judge = Governor(Hazard.from_mtbf(2.0, 12.0), overhead_max=0.03, every_seconds_max=3600.0)
    change = judge.consider(Cost(0.5, 0.2, 3.0, 9.0), None)
    assert change is not None
    assert change.describe() == "every 107 steps: 0.4 % stall, expected loss 30 s or $0.10 per preemption"


def test_a_bound_that_cannot_be_kept_is_said_and_the_longest_interval_taken() -> None:
    judge = governor(every_seconds_max=60.0)
    change = judge.consider(cost(1.0, stall=10.0), None)
    assert change is not None
    assert change.advice.every == 60
    assert "an overhead of at most 3.00%: not possible within 60 iterations" in change.describe()
    assert "Possible: 16.67% every 60 iterations, or 3.00% every 334" in change.describe()
    assert judge.consider(cost(1.0, stall=10.0), 60) is None, "it is said once"


def test_where_an_iteration_is_longer_than_the_longest_interval_every_one_is_saved() -> None:
    change = governor(every_seconds_max=5.0).consider(cost(1.0, iteration=60.0), None)
    assert change is not None
    assert change.advice.every == 1
