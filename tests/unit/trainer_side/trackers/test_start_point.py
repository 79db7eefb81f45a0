"""The marks at the start of an attempt."""

from __future__ import annotations

from trainer_side.trackers.tracker import Mark, StartPoint


def test_a_start_point_says_its_attempt_and_how_many_steps_are_trained_again() -> None:
    start = StartPoint(30, 2, {"wandb": "a"}, "attempt 2 resumed from step 29 of attempt 1")
    attempt = Mark("attempt", 30, 2, "attempt 2 resumed from step 29 of attempt 1")
    assert start.marks(37) == [attempt, Mark("lost_steps", 30, 8)]
    assert start.marks(29) == [attempt, Mark("lost_steps", 30, 0)]
    assert start.marks(25) == [attempt, Mark("lost_steps", 30, 0)], "the tracker itself has lost some"
    assert start.marks(-1) == [attempt], "the tracker does not know"


def test_a_new_run_has_lost_nothing() -> None:
    assert StartPoint(0, 1).marks(-1) == [Mark("attempt", 0, 1)]
    assert StartPoint(0, 1).marks(5) == [Mark("attempt", 0, 1)]
    assert Mark("attempt", 0, 1).title == "holdfast/attempt"
