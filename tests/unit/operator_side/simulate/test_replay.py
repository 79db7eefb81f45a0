"""The replay against an exact walk by iterations; invariants for any trace; cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from operator_side.simulate.replay import ReplayOutcome, StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import IDEAL, Strategy
from operator_side.simulate.trace_windows import Column, TraceWindows, stack
from tests.unit.operator_side.simulate.reference import walk

_LENGTH = 1500
_NODES = 6


@st.composite
def ways(draw: st.DrawFn) -> Strategy:
    durable = draw(st.integers(0, 120))
    stager = draw(st.booleans())
    store = draw(st.integers(0, 60))
    return Strategy(
        "some",
        stall_us=draw(st.integers(0, 30)),
        safe_us=draw(st.integers(0, durable)) if stager else durable,
        durable_us=durable,
        restore_near_us=draw(st.integers(0, 60)) if stager else store,
        restore_store_us=store,
        in_flight_max=draw(st.integers(1, 4)),
        stager=stager,
        lead_us=draw(st.sampled_from([0, 0, 1, 40, 200])),
        every_iteration=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def columns(draw: st.DrawFn, *, stager_losses: bool = True) -> Column:
    first = count = draw(st.integers(0, _NODES + 2))
    times = sorted(draw(st.lists(st.integers(0, _LENGTH), max_size=12)))
    lost, counts, stager_lost = [], [], []
    for _ in times:
        gone = draw(st.integers(0, count))
        count += draw(st.integers(0, 3)) - gone
        lost.append(gone)
        counts.append(count)
        stager_lost.append(int(stager_losses and draw(st.integers(0, 4)) == 0))
    arrays = (np.array(values, dtype=np.int64) for values in (times, lost, counts, stager_lost))
    return Column(first, *arrays)


@st.composite
def jobs(draw: st.DrawFn) -> TrainingJob:
    return TrainingJob(
        nodes=_NODES,
        nodes_min=draw(st.integers(1, _NODES)),
        iteration_us=draw(st.integers(1, 25)),
        restart_us=draw(st.integers(0, 80)),
        target=draw(st.one_of(st.none(), st.integers(1, 60))),
    )


_LANES = st.lists(st.builds(StrategyLane, ways(), st.integers(1, 7)), min_size=1, max_size=4)


@given(jobs(), _LANES, st.lists(columns(), min_size=1, max_size=3))
def test_the_replay_agrees_with_a_walk_from_iteration_to_iteration(
    job: TrainingJob, lanes: list[StrategyLane], events: list[Column]
) -> None:
    # A replay that has reached every target stops looking; what it says of the rest is then not asked.
    got = replay(job, lanes, stack(events, _LENGTH))
    stopped = job.target is not None and bool((got.finished_us >= 0).all())
    for row, lane in enumerate(lanes):
        for place, column in enumerate(events):
            seen = walk(job, lane, column, _LENGTH)
            assert got.finished_us[row, place] == seen.finished
            if not stopped:
                assert got.useful[row, place] == seen.useful
                assert got.redone[row, place] == seen.redone
                assert got.interruptions[row, place] == seen.interruptions
                assert got.training_us[row, place] == seen.training


def useful(job: TrainingJob, strategy: Strategy, every: int, events: Column) -> int:
    return int(
        replay(replace(job, target=None), [StrategyLane(strategy, every)], stack([events], _LENGTH)).useful[
            0, 0
        ]
    )


@given(jobs(), ways(), st.integers(1, 7), columns(stager_losses=False))
def test_no_strategy_is_better_than_the_ideal(
    job: TrainingJob, strategy: Strategy, every: int, events: Column
) -> None:
    # The ideal has no stager to lose, and so no relaunch for it, which may find more machines than there were before.
    assert useful(job, strategy, every, events) <= useful(job, IDEAL, every, events)


@given(jobs(), ways(), st.integers(1, 7), columns(), st.integers(0, 100))
def test_sooner_durable_is_never_worse_at_the_same_stall(
    job: TrainingJob, strategy: Strategy, every: int, events: Column, more_us: int
) -> None:
    # With a notice a later boundary may be the one that is not safe in time, so this is about losses without one.
    sooner = replace(strategy, lead_us=0)
    later = replace(sooner, durable_us=sooner.durable_us + more_us)
    if not strategy.stager:
        later = replace(later, safe_us=later.durable_us)
    assert useful(job, later, every, events) <= useful(job, sooner, every, events)


@given(jobs(), ways(), st.integers(1, 7), columns(stager_losses=False))
def test_a_notice_never_makes_it_worse(
    job: TrainingJob, strategy: Strategy, every: int, events: Column
) -> None:
    # Where the stager is read more slowly than the store, the iteration that a notice keeps may be worth less.
    strategy = replace(strategy, restore_near_us=min(strategy.restore_near_us, strategy.restore_store_us))
    assert useful(job, replace(strategy, lead_us=0), every, events) <= useful(job, strategy, every, events)


def _stager_follows(events: Column, within_us: int) -> bool:
    """Whether the stager is lost so soon after a machine."""
    machines = np.flatnonzero(events.lost)
    stagers = np.flatnonzero(events.stager_lost)
    later_us = events.time_us[stagers] - events.time_us[machines][:, None]
    return bool(((stagers > machines[:, None]) & (later_us <= within_us)).any())


@given(jobs(), ways(), st.integers(1, 7), columns())
def test_a_faster_restore_is_never_worse(
    job: TrainingJob, strategy: Strategy, every: int, events: Column
) -> None:
    # Of several that a lost job has on their way to the store the replay goes on with the newest alone (rule 2). Who
    # begins one a moment sooner than another has an older one in the store if the stager is lost before it is there.
    assume(not _stager_follows(events, strategy.durable_us))
    fast = replace(strategy, restore_near_us=0, restore_store_us=0, lead_us=0)
    assert useful(job, replace(strategy, lead_us=0), every, events) <= useful(job, fast, every, events)


@given(jobs(), _LANES, st.lists(columns(), min_size=1, max_size=3))
def test_the_work_is_one_step_for_each_event_whatever_the_lanes(
    job: TrainingJob, lanes: list[StrategyLane], events: list[Column]
) -> None:
    windows = stack(events, _LENGTH)
    got = replay(replace(job, target=None), lanes, windows)
    assert got.event_steps == max(len(column.time_us) for column in events)
    assert replay(replace(job, target=None), lanes * 5, windows).event_steps == got.event_steps


# -- by hand ------------------------------------------------------------------------------------------------------

_JOB = TrainingJob(nodes=4, nodes_min=4, iteration_us=10, restart_us=100)
_PLAIN = Strategy("plain", 5, 30, 30, 20, 20)


def losses(*events: tuple[int, int, int, int], first: int = 4) -> TraceWindows:
    rows = np.array(events, dtype=np.int64).reshape(-1, 4)
    return stack([Column(first, rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3])], 1000)


def one(strategy: Strategy, every: int, windows: TraceWindows, job: TrainingJob = _JOB) -> dict[str, int]:
    got: ReplayOutcome = replay(job, [StrategyLane(strategy, every)], windows)
    names = ("useful", "redone", "interruptions", "training_us", "finished_us")
    return {name: int(getattr(got, name)[0, 0]) for name in names}


def test_without_a_loss_a_cycle_is_work_and_stall() -> None:
    # Starts at 100; cycles of 10 iterations and 5 µs of stall: 8 of them end at 940, and 6 iterations fit after them.
    got = one(_PLAIN, 10, losses())
    assert got == {"useful": 86, "redone": 0, "interruptions": 0, "training_us": 900, "finished_us": -1}


def test_a_step_in_flight_is_lost_and_work_since_then_is_redone() -> None:
    # Saves begin at 200, 305, 410 and are safe 30 later. Lost at 430 with 31 iterations done: the second one is kept.
    got = one(_PLAIN, 10, losses((430, 1, 4, 0)))
    assert (got["redone"], got["interruptions"]) == (31 - 20, 1)
    # Training again from 430 + 100 + 20 = 550 on: 450 µs are 4 cycles of 105 and 3 iterations.
    assert got["useful"] == 20 + 43


def test_a_job_waits_until_there_are_machines_enough() -> None:
    without = one(_PLAIN, 10, losses((430, 2, 2, 0), (600, 0, 3, 0)))
    assert (without["useful"], without["training_us"]) == (20, 330)
    back = one(_PLAIN, 10, losses((430, 2, 2, 0), (600, 0, 4, 0)))
    assert back["useful"] == 20 + (1000 - 720) // 105 * 10 + 7
    fewer = one(_PLAIN, 10, losses((430, 2, 2, 0)), replace(_JOB, nodes_min=2))
    assert fewer["useful"] == 20 + 20 + 2, "two machines: an iteration takes 20"


def test_the_stager_keeps_what_is_staged_until_it_is_lost_itself() -> None:
    kept = replace(_PLAIN, safe_us=10, durable_us=90, restore_near_us=5, stager=True)
    # Saves at 200, 305, 410; at 430 the third is staged, the first durable (290), the second too (395).
    assert one(kept, 10, losses((430, 1, 4, 0)))["redone"] == 1
    assert one(kept, 10, losses((430, 0, 4, 1)))["redone"] == 11
    # Lost after the third has gone into the store, during the relaunch: nothing more is lost with it.
    assert one(kept, 10, losses((430, 1, 4, 0), (500, 0, 4, 1)))["redone"] == 1
    assert one(kept, 10, losses((430, 1, 4, 0), (499, 0, 4, 1)))["redone"] == 1 + 10
    assert one(_PLAIN, 10, losses((430, 0, 4, 1)))["interruptions"] == 0, "who has no stager loses none"


def test_a_notice_makes_a_checkpoint_if_it_is_safe_in_time() -> None:
    # At 430 31 iterations are done, the last at 425. 45 µs before, the next to end is the 28th, at 390; free at 335.
    assert one(replace(_PLAIN, lead_us=45), 10, losses((430, 1, 4, 0)))["redone"] == 3
    assert one(replace(_PLAIN, lead_us=40), 10, losses((430, 1, 4, 0)))["redone"] == 3, "at 390 itself"
    assert one(replace(_PLAIN, lead_us=29), 10, losses((430, 1, 4, 0)))["redone"] == 11, "it would need 30"


def test_a_notice_waits_for_a_place_as_any_save_does() -> None:
    # Saves at 200, 305, 410, 515, each for 100. Told at 430, the next iteration ends at 435; a place is free at 510.
    slow = replace(_PLAIN, safe_us=100, durable_us=100, lead_us=150)
    assert one(slow, 10, losses((580, 1, 4, 0)))["redone"] == 46 - 30
    assert one(replace(slow, in_flight_max=2), 10, losses((580, 1, 4, 0)))["redone"] == 46 - 32


def test_a_save_without_a_place_waits() -> None:
    slow = replace(_PLAIN, safe_us=400, durable_us=400)
    assert one(slow, 10, losses())["useful"] == 30, (
        "saves at 200, 600, 1000: the third is begun in the last moment"
    )
    assert one(replace(slow, in_flight_max=2), 10, losses())["useful"] == 50, "at 200, 305, 600, 705, 1000"


def test_the_moment_at_which_the_target_is_reached() -> None:
    job = replace(_JOB, target=25)
    assert one(_PLAIN, 10, losses(), job)["finished_us"] == 100 + 250 + 2 * 5
    assert one(_PLAIN, 10, losses((300, 1, 4, 0)), job)["finished_us"] == 420 + 150 + 5
    assert one(_PLAIN, 10, losses((300, 1, 0, 0)), job)["finished_us"] == -1


@pytest.mark.parametrize("wrong", [{"nodes_min": 0}, {"nodes_min": 5}])
def test_a_job_that_is_none_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        replace(_JOB, **wrong)


def test_a_number_that_would_not_fit_is_refused_and_not_wrapped() -> None:
    with pytest.raises(ConfigError, match="35 years"):
        one(_PLAIN, 1 << 50, losses())
    with pytest.raises(ConfigError, match="at least one strategy"):
        replay(_JOB, [], losses())


def test_work_kept_by_a_notice_may_be_worth_less_than_a_slow_restore() -> None:
    way = replace(_PLAIN, stall_us=0, restore_near_us=100, restore_store_us=0, stager=True)
    # Begins at 100, lost at 150. Without a notice nothing is kept; from 250 on, 75 iterations of 10 µs.
    assert one(way, 10, losses((150, 1, 4, 0)))["useful"] == 75
    # Noticed at 110, an iteration is kept, safe at 140; it is read until 350, and 65 come after it.
    assert one(replace(way, lead_us=40), 10, losses((150, 1, 4, 0)))["useful"] == 1 + 65
