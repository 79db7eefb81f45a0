"""Waiting jobs run in the order of their times, once each, and can be hurried."""

from __future__ import annotations

from flusher.retry_queue import RetryQueue
from holdfast.image.checkpoint_id import CheckpointId

ONE, OTHER = CheckpointId(1, 1), CheckpointId(1, 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[RetryQueue, Clock, list[str]]:
    clock, done = Clock(), list[str]()
    later = RetryQueue(clock)
    for name, key, seconds in (("c", ONE, 3.0), ("a", ONE, 1.0), ("b", OTHER, 1.0), ("d", OTHER, 4.0)):
        later.put(key, seconds, lambda name=name: done.append(name))  # type: ignore[misc]
    return later, clock, done


def test_retries_are_done_when_due_and_not_before() -> None:
    later, clock, done = made()
    assert later.wait_seconds == 1.0
    later.run_due()
    assert not done
    clock.now += 1.0
    assert later.wait_seconds == 0.0
    later.run_due()
    assert done == ["a", "b"]
    clock.now += 10.0
    later.run_due()
    assert done == ["a", "b", "c", "d"]
    assert not later
    assert later.wait_seconds is None


def test_retries_of_a_checkpoint_or_of_all_can_be_hurried() -> None:
    later, _, done = made()
    later.make_due(OTHER)
    later.run_due()
    assert done == ["b", "d"]
    later.make_due()
    later.run_due()
    assert done == ["b", "d", "c", "a"]  # in the order of insertion


def test_a_retry_may_queue_another() -> None:
    later, _, done = made()
    later.put(ONE, 0.0, lambda: later.put(ONE, 0.0, lambda: done.append("again")))
    later.run_due()
    assert done == ["again"]
