"""Retention: what may go, and what must never."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flusher.retention import StoredStep, to_remove
from holdfast.image.manifest import State, step_file_name


def checkpoint(step: int, state: State = State.VERIFIED, attempt: int = 1) -> StoredStep:
    return StoredStep(attempt, step, step_file_name(step, attempt=attempt), state, write_id="")


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
    assert steps(
        to_remove([checkpoint(step) for step in (30, 10, 50, 20, 40)], keep_last=2, keep_every=0)
    ) == [10, 20, 30]


def test_multiples_stay() -> None:
    run = [checkpoint(step) for step in range(0, 60, 10)]
    assert steps(to_remove(run, keep_last=1, keep_every=20)) == [10, 30]


def test_zero_keeps_all() -> None:
    run = [checkpoint(1, State.BAD), checkpoint(2), checkpoint(3)]
    assert to_remove(run, keep_last=0, keep_every=0) == []


def test_the_newest_verified_one_stays_behind_many_that_are_only_durable() -> None:
    run = [checkpoint(1), checkpoint(2), *(checkpoint(step, State.DURABLE) for step in range(3, 9))]
    assert steps(to_remove(run, keep_last=2, keep_every=0)) == [1, 3, 4, 5, 6]


def test_bad_ones_do_not_count_as_kept_and_go_when_a_good_one_is_newer() -> None:
    run = [checkpoint(1), checkpoint(2), checkpoint(3, State.BAD), checkpoint(4), checkpoint(5, State.BAD)]
    assert steps(to_remove(run, keep_last=2, keep_every=0)) == [1, 3]


def test_bad_ones_alone_stay_as_evidence() -> None:
    assert to_remove([checkpoint(1, State.BAD), checkpoint(2, State.BAD)], keep_last=1, keep_every=0) == []


def test_a_later_attempt_is_newer_however_low_its_step() -> None:
    run = [checkpoint(100, attempt=1), checkpoint(5, attempt=2)]
    assert steps(to_remove(run, keep_last=1, keep_every=0)) == [100]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(-1, 0), (1, -1)])
def test_negative_numbers_are_refused(keep_last: int, keep_every: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        to_remove([], keep_last=keep_last, keep_every=keep_every)


@pytest.mark.parametrize("state", [State.VERIFIED, State.DURABLE])
def test_the_newest_whose_replicas_did_not_drift_stays(state: State) -> None:
    """Restore prefers it, however many have drifted since; without read-back, too."""
    run = [checkpoint(1, state), checkpoint(2, state), *map(drifted, range(3, 9))]
    assert steps(to_remove(run, keep_last=2, keep_every=0)) == [1, 3, 4, 5, 6]


@given(runs, st.integers(0, 6), st.integers(0, 7))
def test_invariants(run: list[StoredStep], keep_last: int, keep_every: int) -> None:
    removed = to_remove(run, keep_last=keep_last, keep_every=keep_every)
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
    # Whatever is neither named above nor evidence goes: a full store would stop the run.
    assert sum(m.state is not State.BAD for m in left) <= max(
        keep_last, len(good) * (keep_last == 0)
    ) + 2 + sum(bool(keep_every) and m.step % keep_every == 0 for m in good)
    # Asking again finds nothing more to do, and the order of listing plays no part.
    assert to_remove(left, keep_last=keep_last, keep_every=keep_every) == []
    assert to_remove(run[::-1], keep_last=keep_last, keep_every=keep_every) == removed
