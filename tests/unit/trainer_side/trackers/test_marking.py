"""Marks about checkpoints on their way to trackers: from events, past a tracker that raises, and a hanging one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from trainer_side.trackers import marking
from trainer_side.trackers.marking import MarkSender
from trainer_side.trackers.tracker import Mark, NullTracker, Tracker

TURN_SECONDS = 0.01


class Shown(Tracker):
    kind = "shown"

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.flushed = self.ended = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def mark(self, marks: Sequence[Mark]) -> None:
        self.marks += marks

    def flush(self) -> None:
        self.flushed += 1

    def end(self) -> None:
        self.ended += 1


class Failing(Shown):
    kind = "failing"

    def mark(self, marks: Sequence[Mark]) -> None:
        super().mark(marks)
        if marks:
            raise OSError("the server is gone")


class Hanging(Shown):
    kind = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def mark(self, marks: Sequence[Mark]) -> None:
        self.go_on.wait()


def _save(to: MarkSender, step: int) -> None:
    to.handle_event("save", {"cst_seconds": 0.5, "copy_seconds": 3.0}, step)
    to.handle_event("staged", {"cst_seconds": 0.5, "staged_seconds": 2.0}, step)
    to.handle_event("durable", {"staged_seconds": 2.0, "durable_seconds": 4.0}, step)


def test_marking_makes_marks_of_events_at_their_own_steps() -> None:
    shown, to = Shown(), MarkSender(turn_seconds=TURN_SECONDS)
    to.add(shown, [Mark("attempt", 30, 2, "resumed")])
    _save(to, 39)
    to.handle_event("layout", {"image_bytes": 5}, None)
    to.handle_event("declined", {"cause": "busy"}, 49)
    to.close()
    assert shown.marks == [
        Mark("attempt", 30, 2, "resumed"),
        Mark("stall_seconds", 39, 0.5),
        Mark("staged_seconds", 39, 2.0),
        Mark("durable_seconds", 39, 4.0),
    ]
    assert shown.flushed == 1, "what was logged before the save is to be safe"
    assert shown.ended == 1


def test_marking_shows_a_step_that_local_tiers_keep_once() -> None:
    now = iter([10.0, 12.5])
    shown, to = Shown(), MarkSender(turn_seconds=TURN_SECONDS, clock=lambda: next(now))
    to.add(shown)
    to.handle_event("save", {"cst_seconds": 0.5}, 9)
    to.handle_event("complete", {"tier": "memory", "why": ""}, 9)
    to.handle_event("complete", {"tier": "file", "why": ""}, 9)
    to.close()
    assert shown.marks[1:] == [Mark("kept_seconds", 9, 2.5)]


def test_marking_gives_a_later_tracker_its_own_marks_alone() -> None:
    first, second, to = Shown(), Shown(), MarkSender(turn_seconds=TURN_SECONDS)
    to.add(first, [Mark("attempt", 0, 1)])
    to.add(second, [Mark("attempt", 0, 1)])
    to.close()
    assert first.marks == second.marks == [Mark("attempt", 0, 1)]


def test_marking_drops_a_tracker_that_raises_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    failing, shown, to = Failing(), Shown(), MarkSender(turn_seconds=TURN_SECONDS)
    to.add(failing)
    to.add(shown)
    for step in range(3):
        _save(to, step)
    to.close()
    assert len(shown.marks) == 9
    assert failing.ended == 0
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert said == [
        "the experiment tracker failing gets no more marks about checkpoints: OSError: the server is gone"
    ]


def test_marking_does_not_wait_for_a_tracker_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marking, "_END_SECONDS_MAX", 0.05)
    monkeypatch.setattr(marking, "_QUEUED_MAX", 5)
    hanging, to = Hanging(), MarkSender(turn_seconds=TURN_SECONDS)
    to.add(hanging)
    try:
        for step in range(20):
            _save(to, step)
        to.close()
    finally:
        hanging.go_on.set()
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 2, said
    assert "has not answered since 5 marks" in said[0]
    assert "does not answer" in said[1]


def test_marking_without_a_tracker_ends_at_once() -> None:
    MarkSender().close()


def test_no_tracker_does_nothing() -> None:
    none = NullTracker()
    none.log({"loss": 1.0}, 3)
    none.mark([Mark("attempt", 0, 1)])
    none.end()
    assert (none.run, none.last_step) == (None, -1)
