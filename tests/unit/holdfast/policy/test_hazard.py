"""The hazard: between prior and observations, closer to these the more there are; and its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.hazard import PRIOR_MTBF_HOURS, Hazard
from holdfast.wire.failure_count import FailureCount

_HOUR_SECONDS = 3600.0
_counts = st.builds(FailureCount, st.integers(0, 10_000), st.floats(0, 1e7))


def test_the_line_says_what_was_seen_and_what_follows() -> None:
    hazard = Hazard.from_observed(FailureCount(3, 5.2 * _HOUR_SECONDS))
    assert hazard.per_hour == pytest.approx(4 / 8.2)
    assert hazard.description == "failures: 3 in 5.2 h observed, prior 1 in 3 h → one in 2 h"
    many = Hazard.from_observed(FailureCount(299, 600.0))
    assert many.description == "failures: 299 in 10 min observed, prior 1 in 3 h → one in 38 s"
    assert (
        Hazard.from_observed(FailureCount()).description
        == "failures: 0 in 0 s observed, prior 1 in 3 h → one in 3 h"
    )
    assert Hazard.from_mtbf(8.0).description == "failures: one in 8 h, as set (mtbf_hours)"


@given(_counts)
def test_the_estimate_lies_between_the_prior_and_what_was_seen(seen: FailureCount) -> None:
    per_hour = Hazard.from_observed(seen).per_hour
    rates = [1 / PRIOR_MTBF_HOURS]
    if seen.seconds > 0:
        rates.append(seen.failures * _HOUR_SECONDS / seen.seconds)
        assert min(rates) * (1 - 1e-9) <= per_hour <= max(rates) * (1 + 1e-9)
    else:
        assert per_hour == pytest.approx((1 + seen.failures) / PRIOR_MTBF_HOURS)


@given(_counts, st.floats(1, 1e6))
def test_a_failure_raises_it_and_time_without_one_lowers_it(seen: FailureCount, seconds: float) -> None:
    before = Hazard.from_observed(seen).per_hour
    assert Hazard.from_observed(seen.with_attempt(0.0, failed=True)).per_hour > before
    assert Hazard.from_observed(seen.with_attempt(seconds, failed=False)).per_hour < before


@given(st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), max_size=20))
def test_the_order_of_the_attempts_does_not_matter(attempts: list[tuple[float, bool]]) -> None:
    there, back = FailureCount(), FailureCount()
    for seconds, failed in attempts:
        there = there.with_attempt(seconds, failed=failed)
    for seconds, failed in reversed(attempts):
        back = back.with_attempt(seconds, failed=failed)
    assert there.failures == back.failures == sum(failed for _, failed in attempts)
    assert Hazard.from_observed(there).per_hour == pytest.approx(Hazard.from_observed(back).per_hour)


@given(st.floats(0.05, 50))
def test_much_that_was_seen_decides_alone(mtbf_hours: float) -> None:
    seen = FailureCount(10_000, 10_000 * mtbf_hours * _HOUR_SECONDS)
    assert Hazard.from_observed(seen).per_hour == pytest.approx(1 / mtbf_hours, rel=0.01)
    assert Hazard.from_observed(FailureCount()).per_hour == pytest.approx(1 / PRIOR_MTBF_HOURS)
