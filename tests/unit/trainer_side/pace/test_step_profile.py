"""The profile, from given times: medians, without save iterations and the first checkpoint."""

from __future__ import annotations

import pytest

from trainer_side.pace.step_profile import StepProfile


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def profile(clock: Clock) -> StepProfile:
    return StepProfile(clock)


def train(profile: StepProfile, clock: Clock, *took: float) -> None:
    for seconds in took:
        clock.now += seconds
        profile.begin_iteration()


def checkpoint(
    profile: StepProfile, clock: Clock, step: int, *, added: float, stall: float, durable: float
) -> None:
    """One that is on its way for a single iteration."""
    profile.record_save(step)
    profile.record_copy(step, 1000, 0.5, stall)
    train(profile, clock, 1.0 + added)
    profile.record_staged(step, durable / 2)
    profile.record_durable(step, durable)


def test_a_cost_is_the_median_without_saves_and_without_the_first_checkpoint(
    profile: StepProfile, clock: Clock
) -> None:
    train(
        profile, clock, 30.0, *[1.0] * 6, 9.0
    )  # from start-up to the first step; a page that was swapped in
    checkpoint(profile, clock, 7, added=20.0, stall=20.0, durable=60.0)
    assert not profile.has_cost
    train(profile, clock, 1.0)
    checkpoint(profile, clock, 9, added=0.5, stall=0.25, durable=4.0)
    cost = profile.cost()
    assert cost.iteration_seconds == 1.0
    assert cost.stall_seconds == pytest.approx(0.5), "that of another rank, which this one waited for"
    assert (cost.staged_seconds, cost.durable_seconds, cost.in_flight_max) == (2.0, 4.0, 1)


@pytest.mark.parametrize("heard", ["before", "after"])
def test_a_wait_for_room_is_no_stall(heard: str, profile: StepProfile, clock: Clock) -> None:
    """A longer interval has room: as a stall, the wait would ask for an interval many times too long."""
    train(profile, clock, *[1.0] * 8)
    checkpoint(profile, clock, 0, added=0.0, stall=0.1, durable=1.0)
    profile.record_save(1)
    if heard == "before":
        profile.record_copy(1, 1000, 0.5, 6.25, 6.0)
    train(profile, clock, 1.0 + 6.5)
    if heard == "after":
        profile.record_copy(1, 1000, 0.5, 6.25, 6.0)
    profile.record_staged(1, 7.0)
    profile.record_durable(1, 8.0)
    cost = profile.cost()
    assert cost.stall_seconds == pytest.approx(0.5)
    assert cost.durable_seconds == 8.0


@pytest.mark.parametrize(("in_flight_max", "durable"), [(1, 3.0), (2, 7.0)])
def test_a_queue_before_the_store_is_no_part_of_a_write(
    in_flight_max: int, durable: float, profile: StepProfile, clock: Clock
) -> None:
    """Saved each second, written one after the other in three seconds: the third is durable after seven."""
    profile.in_flight_max = in_flight_max
    train(profile, clock, *[1.0] * 8)
    for step in range(4):
        profile.record_save(step)
        profile.record_copy(step, 1000, 0.5, 0.1)
        train(profile, clock, 1.0)
    train(profile, clock, *[1.0] * 8)
    for step, seconds in enumerate((3.0, 5.0, 7.0, 9.0)):
        profile.record_staged(step, seconds)
        profile.record_durable(step, seconds)
    cost = profile.cost()
    assert cost.durable_seconds == pytest.approx(durable)
    assert cost.staged_seconds <= cost.durable_seconds


def test_an_accidentally_slow_checkpoint_does_not_count(profile: StepProfile, clock: Clock) -> None:
    train(profile, clock, *[1.0] * 8)
    for step, durable in enumerate((1.0, 4.0, 90.0, 5.0)):
        checkpoint(profile, clock, step, added=0.0, stall=0.1, durable=durable)
    assert profile.cost().durable_seconds == 5.0
    checkpoint(profile, clock, 5, added=0.0, stall=0.1, durable=80.0)
    assert profile.cost().durable_seconds == 80.0, "two of three are no accident"


def test_a_checkpoint_under_way_counts_with_its_time_so_far(profile: StepProfile, clock: Clock) -> None:
    train(profile, clock, *[1.0] * 8)
    checkpoint(profile, clock, 0, added=0.0, stall=0.1, durable=1.0)
    checkpoint(profile, clock, 1, added=0.0, stall=0.1, durable=2.0)
    profile.record_save(2)
    train(profile, clock, *[1.0] * 30)
    assert profile.has_in_flight
    assert profile.cost().durable_seconds == 30.0
    profile.record_end(2)
    assert profile.cost().durable_seconds == 2.0


def test_a_profile_without_measurements_has_no_cost(profile: StepProfile, clock: Clock) -> None:
    assert not profile.has_cost
    train(profile, clock, 1.0)
    profile.record_decline()
    train(profile, clock, 1.0)
    assert not profile._iterations, "an iteration in which a save was declined has its stall as well"


def test_the_table_has_every_figure(profile: StepProfile, clock: Clock) -> None:
    profile.image_bytes, profile.slice_bytes = 3 << 20, 1 << 20
    train(profile, clock, *[0.04] * 8)
    profile.record_update(0.002)
    checkpoint(profile, clock, 0, added=0.0, stall=0.1, durable=1.0)
    checkpoint(profile, clock, 1, added=0.0, stall=0.012, durable=2.0)
    text = profile.table(5 << 20)
    lines = [line.split()[:3] for line in text.splitlines()]
    assert lines == [
        ["iteration", "40.0", "ms"],
        ["update", "2.0", "ms"],
        ["stall", "960.0", "ms"],
        ["copy", "0.00", "GB/s"],
        ["staged", "1.00", "s"],
        ["durable", "2.00", "s"],
        ["image", "3.0", "MiB"],
        ["host", "memory", "5.0"],
    ]
    assert profile.fields(1)["copy_bytes_per_second"] == 2000.0
