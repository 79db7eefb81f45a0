"""Results of replays: against the policy's own expectation, a month of a thousand machines, money, total time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.policy.advice import advise
from holdfast.policy.hazard import Hazard
from operator_side.simulate.profiles import (
    MEASURED,
    MeasuredCosts,
    TrainingProfile,
    load_profile,
    measured_profile,
)
from operator_side.simulate.replay import StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import HOUR_US, IDEAL, SECOND_US, Strategy
from operator_side.simulate.study import Prices, goodput, make_lanes, on_demand_dollars, total_times
from operator_side.simulate.trace_windows import Column, poisson_windows, stack

_JOB = TrainingJob(nodes=8, nodes_min=1, iteration_us=SECOND_US, restart_us=20 * SECOND_US)
_STRATEGY = Strategy(
    "some",
    stall_us=SECOND_US // 5,
    safe_us=3 * SECOND_US,
    durable_us=9 * SECOND_US,
    restore_near_us=5 * SECOND_US,
    restore_store_us=12 * SECOND_US,
    stager=True,
)


def random_losses(mtbf_seconds: int, hours: int, samples: int, seed: int = 7) -> Any:
    return poisson_windows(
        nodes=8,
        mtbf_us=mtbf_seconds * SECOND_US,
        provision_us=0,
        length_us=hours * HOUR_US,
        samples=samples,
        rng=np.random.default_rng(seed),
    )


@pytest.mark.parametrize("every", [10, 40, 200])
def test_the_loss_that_the_policy_expects_is_the_loss_in_the_replay(every: int) -> None:
    got = replay(_JOB, [StrategyLane(_STRATEGY, every)], random_losses(3600, 200, 20))
    cost = _STRATEGY.cost(_JOB.iteration_us)
    cycle = cost.cycle_seconds(every)
    expected_seconds = cycle / 2 + cost.staged_seconds
    # Lost wall time in iterations. Only whole ones are lost, so half an iteration less on average, and none during a
    # relaunch.
    expected = expected_seconds * every * cost.iteration_seconds / cycle
    redone = got.redone.sum() / got.interruptions.sum()
    assert got.interruptions.sum() > 3000
    assert redone == pytest.approx(expected - 0.5, rel=0.03)


def test_the_interval_that_the_policy_chooses_is_the_best_in_the_replay() -> None:
    cost = _STRATEGY.cost(_JOB.iteration_us)
    chosen = advise(cost, Hazard.from_mtbf(1.0), overhead_max=0.1).every
    intervals = [chosen // 4, chosen // 2, chosen, 2 * chosen, 4 * chosen]
    rows, _ = goodput(_JOB, [_STRATEGY], intervals, random_losses(3600, 200, 20))
    shares = [row.share.median for row in rows[:-1]]
    assert shares[2] > max(shares[0], shares[4])
    assert shares[2] == pytest.approx(max(shares), rel=0.002), "flat about its top"
    assert rows[-1].share.least == rows[-1].share.greatest == 1.0, "the ideal, once"


def test_a_month_of_a_thousand_machines_takes_a_step_for_each_loss_not_for_each_iteration() -> None:
    # A loss in a tenth of a month's minutes; 2.6 million iterations in each of 280 lanes.
    minutes = np.sort(np.random.default_rng(5).choice(30 * 24 * 60, size=4000, replace=False)).astype(
        np.int64
    )
    times = np.repeat(minutes * 60 * SECOND_US, 2) + np.tile([0, 30 * SECOND_US], 4000)
    lost = np.tile([10, 0], 4000)
    column = Column(1000, times, lost, 1000 - lost, np.zeros(8000, dtype=np.int64))
    windows = stack([column] * 4, 30 * 24 * HOUR_US)
    strategies = [_STRATEGY.with_lead(lead * SECOND_US) for lead in (0, 30, 120)]
    got = replay(
        TrainingJob(1000, 900, SECOND_US, 20 * SECOND_US),
        [StrategyLane(strategy, every) for strategy in strategies for every in (1, 10, 100, 1000)],
        windows,
    )
    assert got.event_steps == 8000
    assert (got.interruptions == 4000).all()
    assert got.useful.max() > 2_000_000


def test_dollars_are_what_is_held_and_the_stager_over_what_counts() -> None:
    windows = stack([Column(8, *(np.zeros(0, dtype=np.int64) for _ in range(4)))], HOUR_US)
    prices = Prices(spot=1.0, on_demand=3.0, stager=2.0)
    rows, outcome = goodput(_JOB, [_STRATEGY], [100], windows, prices)
    assert rows[0].dollars is not None
    assert rows[0].dollars.median == pytest.approx((8 * 1.0 + 2.0) / outcome.useful[0, 0])
    assert rows[1].dollars is not None
    assert rows[1].dollars.median == pytest.approx(8 * 1.0 / outcome.useful[1, 0]), "the ideal has no stager"
    assert on_demand_dollars(_JOB, prices) == pytest.approx(8 * 3.0 / 3600)
    with pytest.raises(ConfigError, match="price of spot"):
        Prices(-1.0, 3.0)


def test_total_time_grows_as_losses_come_more_often_and_never_below_the_work() -> None:
    job = TrainingJob(8, 8, SECOND_US, 20 * SECOND_US, target=20_000)
    medians = []
    for mtbf_hours in (0.5, 2.0, 1000.0):
        some, ideal = total_times(
            job, make_lanes([_STRATEGY], [50]), mtbf_hours=mtbf_hours, samples=20, seed=1
        )
        assert some.hours is not None
        assert ideal.hours is not None
        assert ideal.strategy == IDEAL
        assert ideal.hours.least >= 20_020 / 3600
        assert some.hours.median > ideal.hours.median
        medians.append(some.hours.median)
    assert medians == sorted(medians, reverse=True)


def test_never_saving_has_no_end_where_losses_come_before_the_first_checkpoint() -> None:
    job = TrainingJob(8, 8, SECOND_US, 20 * SECOND_US, target=2000)
    never, ideal = total_times(job, make_lanes([_STRATEGY], [2000]), mtbf_hours=0.05, samples=2, seed=1)
    assert never.hours is None
    assert ideal.hours is not None


def test_total_time_needs_an_end_and_a_mean() -> None:
    with pytest.raises(ConfigError, match="--iterations"):
        total_times(_JOB, make_lanes([_STRATEGY], [50]), mtbf_hours=1.0, samples=1, seed=1)
    job = TrainingJob(8, 8, SECOND_US, 0, target=10)
    with pytest.raises(ConfigError, match="more than 0 hours"):
        total_times(job, make_lanes([_STRATEGY], [50]), mtbf_hours=0.0, samples=1, seed=1)


# -- profiles -----------------------------------------------------------------------------------------------------


def test_measured_profile_reads_the_published_makespan() -> None:
    profile = measured_profile()
    assert {name for name, way in profile.strategies.items() if way.stager} == {"holdfast", "mlc-base"}
    assert "python -m benchmarks" in profile.source
    names = [strategy.name for strategy in profile.lanes([0, 30])]
    assert names[-3:] == ["holdfast", "holdfast, 30 s notice", "ideal"]


@pytest.mark.parametrize(
    ("alone_seconds", "stall_seconds"), [(0.1, 0.05), (0.02, 0.02)], ids=["in a run", "alone"]
)
def test_measured_profile_takes_the_lesser_of_two_stalls(
    tmp_path: Path, alone_seconds: float, stall_seconds: float
) -> None:
    run = json.loads((MEASURED / "makespan.json").read_text())
    run["saves"] = [{**of, "stall_seconds": alone_seconds} for of in run["saves"]]
    plain = {"every": 0, "iterations": 10, "makespan_seconds": 2.0, "durable_seconds": 2.0, "saves": 0}
    runs = [
        {
            "every": every,
            "iterations": 40,
            "makespan_seconds": 8.0 + lost,
            "durable_seconds": 8.0,
            "saves": saves,
        }
        for every, lost, saves in (
            (10, 4.0, 4),
            (20, 0.1, 2),
        )  # every 10: each checkpoint waits for the previous one
    ]
    run["runs"] = [{"peer": "none", **plain}, *({"peer": "holdfast", **of} for of in runs)]
    (tmp_path / "makespan.json").write_text(json.dumps(run))
    assert measured_profile(tmp_path).strategies["holdfast"].stall_seconds == pytest.approx(stall_seconds)


def test_where_nothing_was_measured_a_file_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile FILE"):
        measured_profile(tmp_path)
    (tmp_path / "makespan.json").write_text("{}")
    with pytest.raises(ConfigError, match="--profile FILE"):
        measured_profile(tmp_path)


def test_a_profile_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(measured_profile().model_dump_json())
    assert load_profile(path) == measured_profile()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"iteration_seconds": 0}, "iteration_seconds: expected"),
        ({"source": ""}, "source: expected"),
        ({"strategies": {}}, "strategies: expected"),
        ({"surprise": 1}, "surprise: expected"),
        (
            {"strategies": {"a": {"stall_seconds": -1, "durable_seconds": 1, "restore_seconds": 1}}},
            "a.stall_seconds",
        ),
        (
            {
                "strategies": {
                    "a": {"stall_seconds": 1, "durable_seconds": 1, "restore_seconds": 1, "stager": True}
                }
            },
            "strategies.a: expected with a stager, staged_seconds",
        ),
    ],
)
def test_a_profile_that_is_wrong_is_named(tmp_path: Path, wrong: dict[str, Any], what: str) -> None:
    right = {
        "source": "here",
        "iteration_seconds": 1,
        "restart_seconds": 1,
        "strategies": {"a": {"stall_seconds": 1, "durable_seconds": 1, "restore_seconds": 1}},
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(right))
    assert isinstance(load_profile(path), TrainingProfile)
    path.write_text(json.dumps({**right, **wrong}))
    with pytest.raises(ConfigError, match=what):
        load_profile(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(path)


def test_without_a_stager_only_what_is_durable_is_safe() -> None:
    way = MeasuredCosts(
        stall_seconds=1, staged_seconds=2, durable_seconds=3, restore_seconds=4, restore_staged_seconds=1
    )
    strategy = way.strategy("a")
    assert (strategy.safe_us, strategy.restore_near_us) == (3 * SECOND_US, 4 * SECOND_US)
    with_one = way.model_copy(update={"stager": True}).strategy("a")
    assert (with_one.safe_us, with_one.restore_near_us) == (2 * SECOND_US, SECOND_US)
