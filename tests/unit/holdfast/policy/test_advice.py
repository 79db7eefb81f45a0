"""The advice: the bound first, then the least loss, and one line with the reason."""

from __future__ import annotations

import math

import pytest

from holdfast.errors import ConfigError
from holdfast.policy.advice import advise
from holdfast.policy.cost import Cost
from holdfast.policy.hazard import Hazard

_COST = Cost(iteration_seconds=0.5, stall_seconds=0.2, staged_seconds=3.0, durable_seconds=9.0)


def test_the_line_says_interval_stall_and_loss() -> None:
    advice = advise(_COST, Hazard.from_mtbf(2.0, dollars_per_hour=12.0))
    assert advice.every == 107  # Daly's minimum is at sqrt(2 × 0.2 × 7200) s of work, less a little
    assert advice.lost_seconds == pytest.approx((107 * 0.5 + 0.2) / 2 + 3.0)
    assert advice.describe() == "every 107 steps: 0.4 % stall, expected loss 30 s or $0.10 per preemption"
    assert advise(_COST, Hazard(0.5)).describe().endswith("expected loss 30 s per preemption")


def test_where_losses_are_frequent_the_bound_and_the_place_decide() -> None:
    advice = advise(_COST, Hazard.from_mtbf(0.01))
    assert advice.every == 18, "durable takes 9 s, so 18 iterations of 0.5 s less the 3 % that it may wait"
    assert advice.overhead <= 0.03
    assert advise(_COST, Hazard.from_mtbf(0.01), overhead_max=0.5).every == 18, (
        "sooner would only wait for the place"
    )
    assert advise(_COST, Hazard.from_mtbf(0.01), overhead_max=0.0021).every == 191, "0.2 s of stall in 95 s"


def test_without_any_loss_the_least_that_keeps_the_bound_is_taken() -> None:
    assert advise(_COST, Hazard(0.0)).every == advise(_COST, Hazard.from_mtbf(0.001)).every


def test_every_step_reads_as_such() -> None:
    assert advise(Cost(1.0, 0.0, 0.1, 0.1), Hazard(0.0)).describe() == (
        "every step: 0.0 % stall, expected loss 0.6 s per preemption"
    )


@pytest.mark.parametrize(
    ("per_hour", "dollars"), [(-1.0, None), (math.inf, None), (1.0, -1.0), (1.0, math.nan)]
)
def test_a_hazard_that_is_none_is_refused(per_hour: float, dollars: float | None) -> None:
    with pytest.raises(ConfigError, match="expected 0 or more"):
        Hazard(per_hour, dollars)


def test_no_mean_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 0 hours"):
        Hazard.from_mtbf(0.0)
