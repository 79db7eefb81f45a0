"""Retention: which checkpoints may be removed, and which never."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flusher.retention import RetentionPolicy, StoredStep, to_remove
from holdfast.checkpoints.branches import Branches, Rewind
from holdfast.image.best_rule import BestMode, BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import State, step_file_name


def checkpoint(
    step: int,
    state: State = State.VERIFIED,
    attempt: int = 1,
    hour: float | None = None,
    nonfinite: int | None = None,
) -> StoredStep:
    created = None if hour is None else hour * 3600
    name = step_file_name(step, attempt=attempt)
    return StoredStep(attempt, step, name, state, write_id="", created_unix=created, nonfinite=nonfinite)


def drifted(step: int, state: State = State.DURABLE) -> StoredStep:
    return StoredStep(1, step, step_file_name(step), state, write_id="", is_drifted=True)


def steps(several: list[StoredStep]) -> list[int]:
    return [one.step for one in several]


runs = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 3), st.sampled_from(State), st.booleans()),
    max_size=25,
    unique_by=lambda t: t[:2],
).map(
    lambda rows: [
        replace(checkpoint(step, state, attempt), is_drifted=drifts and state is State.DURABLE)
        for step, attempt, state, drifts in rows
    ]
)


def test_the_newest_stay() -> None:
    assert steps(to_remove([checkpoint(step) for step in (30, 10, 50, 20, 40)], RetentionPolicy(2, 0))) == [
        10,
        20,
        30,
    ]


def test_the_newest_that_cannot_be_doubted_stays() -> None:
    """All checkpoints that were copied during training may become doubtful at the same time."""
    proven = [checkpoint(step) for step in (1, 2)]
    behind = [replace(checkpoint(step), is_proven=False) for step in range(3, 40)]
    assert steps(to_remove(proven + behind, RetentionPolicy(2))) == [1, *range(3, 38)]
    doubtful = [replace(one, is_doubtful=True, state=State.DURABLE) for one in behind]
    assert 2 not in steps(to_remove(proven + doubtful, RetentionPolicy(2)))
    unread = replace(checkpoint(50, State.DURABLE), is_proven=True)
    assert 2 not in steps(to_remove([*proven, *behind, unread], RetentionPolicy(1))), (
        "50 is not read back yet"
    )


def test_multiples_stay() -> None:
    run = [checkpoint(step) for step in range(0, 60, 10)]
    assert steps(to_remove(run, RetentionPolicy(1, 20))) == [10, 30]


def test_zero_keeps_all() -> None:
    run = [checkpoint(1, State.BAD), checkpoint(2), checkpoint(3)]
    assert to_remove(run, RetentionPolicy(0, 0)) == []


def test_the_newest_verified_one_stays_behind_many_that_are_only_durable() -> None:
    run = [checkpoint(1), checkpoint(2), *(checkpoint(step, State.DURABLE) for step in range(3, 9))]
    assert steps(to_remove(run, RetentionPolicy(2, 0))) == [1, 3, 4, 5, 6]


def test_bad_ones_do_not_count_as_kept_and_go_when_a_good_one_is_newer() -> None:
    run = [checkpoint(1), checkpoint(2), checkpoint(3, State.BAD), checkpoint(4), checkpoint(5, State.BAD)]
    assert steps(to_remove(run, RetentionPolicy(2, 0))) == [1, 3]


def test_bad_ones_alone_stay_as_evidence() -> None:
    assert to_remove([checkpoint(1, State.BAD), checkpoint(2, State.BAD)], RetentionPolicy(1, 0)) == []


def test_a_later_attempt_is_newer_however_low_its_step() -> None:
    run = [checkpoint(100, attempt=1), checkpoint(5, attempt=2)]
    assert steps(to_remove(run, RetentionPolicy(1, 0))) == [100]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(-1, 0), (1, -1)])
def test_negative_numbers_are_refused(keep_last: int, keep_every: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        to_remove([], RetentionPolicy(keep_last, keep_every))


@pytest.mark.parametrize("state", [State.VERIFIED, State.DURABLE])
def test_the_newest_whose_replicas_did_not_drift_stays(state: State) -> None:
    """Restore prefers this one, however many have drifted since, even before its read-back."""
    run = [checkpoint(1, state), checkpoint(2, state), *map(drifted, range(3, 9))]
    assert steps(to_remove(run, RetentionPolicy(2))) == [1, 3, 4, 5, 6]


@given(runs, st.integers(0, 6), st.integers(0, 7))
def test_removal_keeps_good_checkpoints_and_is_idempotent(
    run: list[StoredStep], keep_last: int, keep_every: int
) -> None:
    removed = to_remove(run, RetentionPolicy(keep_last, keep_every))
    left = [one for one in run if one not in removed]
    good = sorted((m for m in run if m.state is not State.BAD), key=lambda m: m.order, reverse=True)

    assert all(one in run for one in removed)
    assert [m.order for m in removed] == sorted(m.order for m in removed)
    assert all(m in left for m in good[:keep_last])
    assert len(removed) == 0 or keep_last > 0
    verified = [m for m in good if m.state is State.VERIFIED]
    assert all(m in left for m in verified[:1])
    if keep_every:
        assert all(m in left for m in good if m.step % keep_every == 0)
    if good:
        assert all(m in left for m in run if m.order > good[0].order)
        assert any(m in left for m in good)
    else:
        assert removed == []
    agreed = [m for m in good if not m.is_drifted]
    assert all(m in left for m in agreed[:1])
    # Retention removes all the rest except evidence: a full store would stop the run.
    assert sum(m.state is not State.BAD for m in left) <= max(
        keep_last, len(good) * (keep_last == 0)
    ) + 2 + sum(bool(keep_every) and m.step % keep_every == 0 for m in good)
    # A second call finds nothing more to remove, and the listing's order does not matter.
    assert to_remove(left, RetentionPolicy(keep_last, keep_every)) == []
    assert to_remove(run[::-1], RetentionPolicy(keep_last, keep_every)) == removed


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def test_a_training_that_goes_on_with_nan_never_removes_the_newest_finite_one() -> None:
    run = [checkpoint(1, nonfinite=0), checkpoint(2, nonfinite=0)]
    for step in range(3, 30):
        run.append(checkpoint(step, nonfinite=1000 + step))
        run = [one for one in run if one not in to_remove(run, RetentionPolicy(3))]
    assert steps(run) == [2, 27, 28, 29]


def test_a_mask_that_is_in_every_checkpoint_does_not_make_them_all_broken() -> None:
    run = [checkpoint(1, nonfinite=9), checkpoint(2, nonfinite=9)]
    run += [checkpoint(step, nonfinite=500) for step in (3, 4)]
    assert steps(to_remove(run, RetentionPolicy(1))) == [1, 3]


def test_a_checkpoint_without_a_count_passes_for_finite() -> None:
    run = [checkpoint(1), checkpoint(2, nonfinite=7), checkpoint(3, nonfinite=7)]
    assert steps(to_remove(run, RetentionPolicy(1))) == [2]


def test_checkpoints_refused_for_their_numbers_do_not_fill_the_store() -> None:
    run = [checkpoint(1, nonfinite=0)]
    run += [checkpoint(step, State.BAD, nonfinite=5) for step in range(2, 9)]
    assert steps(to_remove(run, RetentionPolicy(2))) == [2, 3, 4, 5, 6]
    alone = run[1:]
    assert steps(to_remove(alone, RetentionPolicy(2))) == [2, 3, 4, 5, 6]


# -- the ladder --------------------------------------------------------------------------------------------------------


def grown(hours: list[float], keep: RetentionPolicy, nonfinite_from: int | None = None) -> list[StoredStep]:
    """Return the checkpoints left of a run that publishes at these times, and prunes after each."""
    run: list[StoredStep] = []
    for step, hour in enumerate(hours):
        broken = nonfinite_from is not None and step >= nonfinite_from
        run.append(checkpoint(step, hour=hour, nonfinite=100 if broken else 0))
        run = [one for one in run if one not in to_remove(run, keep)]
    return run


def test_the_ladder_of_a_week() -> None:
    hours = [quarter / 4 for quarter in range(4 * 24 * 10)]  # ten days, every 15 minutes
    left = grown(hours, RetentionPolicy(3, hourly=24, daily=7))
    times = [hours[one.step] for one in left]
    assert times[-3:] == hours[-3:]
    hourly = [at for at in times if at >= 9 * 24 and at == int(at)]
    assert hourly == [float(hour) for hour in range(9 * 24, 10 * 24)]
    assert [at for at in times if at < 9 * 24] == [24.0 * day for day in range(3, 9)]
    assert len(left) <= 3 + 24 + 7


def test_a_training_that_goes_on_with_nan_for_a_week_leaves_the_ladder_before_it() -> None:
    keep, hours = RetentionPolicy(3, hourly=24, daily=7), [float(hour) for hour in range(24 * 12)]
    before = grown(hours[: 24 * 4], keep)
    after = grown(hours, keep, nonfinite_from=24 * 4)
    ladder = [one.step for one in before]
    assert [one.step for one in after if one.step < 24 * 4] == ladder
    assert [one.step for one in after][-3:] == [24 * 12 - 3, 24 * 12 - 2, 24 * 12 - 1]


def test_a_pause_of_a_month_removes_no_rung() -> None:
    keep = RetentionPolicy(1, hourly=3, daily=2)
    left = grown([0.0, 1.0, 2.0, 3.0, 30 * 24.0], keep)
    assert steps(left) == [0, 2, 3, 4]


def test_without_rungs_is_the_rule_of_before() -> None:
    assert RetentionPolicy(3, 10, hourly=24, daily=7).without_rungs() == RetentionPolicy(3, 10)


ladders = st.builds(
    RetentionPolicy, st.integers(1, 4), st.integers(0, 5), st.integers(0, 6), st.integers(0, 4)
)
counted = st.lists(
    st.tuples(st.sampled_from(State), st.floats(0, 400), st.none() | st.sampled_from([0, 3, 90])), max_size=30
)


def run_of(told: list[tuple[State, float, int | None]]) -> list[StoredStep]:
    # A checkpoint that is only durable was not read back, so its numbers were not counted.
    return [
        checkpoint(step, state, hour=hour, nonfinite=None if state is State.DURABLE else nonfinite)
        for step, (state, hour, nonfinite) in enumerate(told)
    ]


@given(counted, ladders)
def test_invariants_of_ladder_and_finite_ones(
    told: list[tuple[State, float, int | None]], keep: RetentionPolicy
) -> None:
    """The invariants hold for any clocks."""
    run = run_of(told)
    removed = to_remove(run, keep)
    left = [one for one in run if one not in removed]
    assert set(removed) <= set(to_remove(run, keep.without_rungs()))
    good = [one for one in run[::-1] if one.state is not State.BAD]
    assert all(one in left for one in good[: keep.last])
    verified = [one for one in good if one.state is State.VERIFIED]
    fewest = min((one.nonfinite for one in verified if one.nonfinite is not None), default=0)
    finite = [one for one in verified if one.nonfinite is None or one.nonfinite == fewest]
    assert all(one in left for one in finite[:1])
    assert all(one in left for one in verified[:1])
    every = sum(bool(keep.every) and one.step % keep.every == 0 for one in good)
    assert sum(one in left for one in good) <= keep.last + every + keep.hourly + keep.daily + 3


@given(counted, ladders)
@example(
    [
        (State.VERIFIED, 0.0, None),
        (State.VERIFIED, 0.0, 0),
        (State.VERIFIED, 24.0, None),
        (State.VERIFIED, 48.0, 3),
    ],
    RetentionPolicy(1, daily=2),
)
def test_asking_again_removes_no_more_while_the_clock_goes_forward(
    told: list[tuple[State, float, int | None]], keep: RetentionPolicy
) -> None:
    hours = sorted(hour for _, hour, _ in told)
    run = run_of([(state, hour, count) for (state, _, count), hour in zip(told, hours, strict=True)])
    left = [one for one in run if one not in to_remove(run, keep)]
    assert to_remove(left, keep) == []
    assert to_remove(run[::-1], keep) == to_remove(run, keep)


def test_a_set_aside_checkpoint_stays_as_evidence_and_counts_for_nothing() -> None:
    run = [checkpoint(step) for step in (1, 3, 5)]
    assert steps(to_remove(run, RetentionPolicy(1))) == [1, 3]
    assert steps(to_remove(run, RetentionPolicy(1), [CheckpointId(1, 5)])) == [1], (
        "step 3 is what the run goes back to"
    )
    later = [*run, *(checkpoint(step, attempt=4) for step in (5, 7, 9))]
    removed = to_remove(later, RetentionPolicy(2), [CheckpointId(1, 5)])
    assert [one.order for one in removed] == [(1, 1), (1, 3), (4, 5)]


def test_the_last_set_aside_checkpoints_stay_and_older_ones_go() -> None:
    run = [checkpoint(step) for step in range(10)]
    assert steps(to_remove(run, RetentionPolicy(1), [CheckpointId(1, step) for step in (2, 8, 6, 4)])) == [
        0,
        1,
        2,
        3,
        5,
        7,
    ]


@given(
    runs,
    st.integers(1, 4),
    st.lists(st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 40)), max_size=3),
)
def test_set_aside_checkpoints_change_nothing_for_the_others(
    run: list[StoredStep], keep_last: int, set_aside: list[CheckpointId]
) -> None:
    removed = to_remove(run, RetentionPolicy(keep_last), set_aside)
    assert not {one.order for one in removed} & set(set_aside)
    assert removed == to_remove(
        [one for one in run if one.order not in set_aside], RetentionPolicy(keep_last)
    )


# -- the best ----------------------------------------------------------------------------------------------------------

LOSS = BestRule(metric="loss", mode="min")


def rated(values: dict[int, float | None], state: State = State.VERIFIED) -> list[StoredStep]:
    """Return a checkpoint for each of these steps, with this loss; None: without a loss."""
    return [
        replace(checkpoint(step, state), metrics={} if value is None else {"loss": value})
        for step, value in values.items()
    ]


@pytest.mark.parametrize(("mode", "removed"), [("min", [2, 3, 5]), ("max", [1, 2, 4])])
def test_the_best_by_a_metric_stay(mode: BestMode, removed: list[int]) -> None:
    run = rated({1: 0.2, 2: None, 3: 0.9, 4: 0.1, 5: 0.5, 6: 0.3})
    assert (
        steps(to_remove(run, RetentionPolicy(1, best=2, rule=BestRule(metric="loss", mode=mode)))) == removed
    )
    assert steps(to_remove(run, RetentionPolicy(1, rule=LOSS))) == [1, 2, 3, 4, 5], "none is asked for"


def test_the_first_of_equal_values_stays() -> None:
    assert steps(
        to_remove(rated({1: 0.5, 2: 0.5, 3: 0.5, 4: 0.6}), RetentionPolicy(1, best=1, rule=LOSS))
    ) == [2, 3]


def test_a_bad_one_is_never_best_and_a_doubtful_one_only_for_want_of_others() -> None:
    bad, good = rated({1: 0.0}, State.BAD), rated({3: 0.5, 4: 0.4, 5: None})
    doubtful = [replace(one, is_doubtful=True, state=State.DURABLE) for one in rated({2: 0.1})]
    run = [*bad, *doubtful, *good]
    assert steps(to_remove(run, RetentionPolicy(1, best=2, rule=LOSS))) == [1, 2]
    assert steps(to_remove(run, RetentionPolicy(1, best=3, rule=LOSS))) == [1]


def test_a_better_one_that_may_turn_out_bad_or_doubtful_does_not_replace_a_sure_one() -> None:
    unread = rated({3: 0.1, 4: 0.2}, State.DURABLE)
    run = [*rated({1: 0.5, 2: 0.6}), *unread, *rated({5: None})]
    assert to_remove(run, RetentionPolicy(1, best=2, rule=LOSS)) == []
    behind = [replace(one, is_proven=False) for one in rated({2: 0.1})]
    run = [*rated({1: 0.5}), *behind, *rated({3: None})]
    assert to_remove(run, RetentionPolicy(1, best=1, rule=LOSS)) == []


def test_a_store_without_room_keeps_the_best() -> None:
    keep = RetentionPolicy(1, hourly=24, daily=7, best=1, rule=LOSS).without_rungs()
    assert steps(to_remove(rated({1: 0.5, 2: 0.1, 3: 0.5, 4: 0.5}), keep)) == [1, 3]


ratings = st.lists(
    st.tuples(st.sampled_from(State), st.none() | st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
    max_size=20,
)


@given(ratings, st.integers(1, 4), st.integers(0, 4))
def test_removal_keeps_the_best_good_ones_and_not_many_more(
    told: list[tuple[State, float | None, bool]], last: int, best: int
) -> None:
    run = [
        replace(checkpoint(step, state), metrics={} if value is None else {"loss": value}, is_proven=proven)
        for step, (state, value, proven) in enumerate(told)
    ]
    keep = RetentionPolicy(last, best=best, rule=LOSS)
    removed = to_remove(run, keep)
    left = [one for one in run if one not in removed]
    good = [one for one in run if one.state is not State.BAD and "loss" in one.metrics]
    assert all(one in left for one in sorted(good, key=lambda one: (one.metrics["loss"], one.step))[:best])
    without = to_remove(run, RetentionPolicy(last))
    assert {one.step for one in removed} <= {one.step for one in without}
    assert len(without) - len(removed) <= 2 * best + 1
    assert to_remove(left, keep) == []


def test_an_older_branch_neither_takes_a_place_nor_loses_one() -> None:
    """A rewind alone removes nothing, and the new branch has all places for itself."""
    old = [checkpoint(step) for step in (10, 20, 30, 40)]
    made = Rewind(attempt=2, write_id="", to=(1, 20), newest=(1, 40))
    branches = Branches([made])
    assert to_remove(old, RetentionPolicy(2), branches=branches) == [], (
        "10 and 20 are the line, 30 and 40 the older branch"
    )
    new = [checkpoint(step, attempt=3) for step in (21, 22, 23)]
    removed = to_remove(old + new, RetentionPolicy(2), branches=branches)
    assert [(one.attempt, one.step) for one in removed] == [(1, 10), (3, 21)], "20 is where the branch began"
    late = [*old, checkpoint(50), *new]
    assert (1, 30) in [
        (one.attempt, one.step) for one in to_remove(late, RetentionPolicy(2), branches=branches)
    ]
    back = Branches([made, Rewind(attempt=4, write_id="", to=(1, 40), newest=(3, 23))])
    assert steps(to_remove(old + new, RetentionPolicy(1), branches=back)) == [10, 30, 21, 22]
