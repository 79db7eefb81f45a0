"""Prediction against reality, without a real run: on made-up ones of which everything is known, both say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experiments.reality import (
    TRACE_VARIABLE,
    came_to,
    error,
    losses_of,
    predicted,
    profile_of,
    written,
)
from benchmarks.supervised import Attempt, lines
from tests.unit.operator_side.simulate.test_traces import NODES

_ITERATION, _STALL, _EVERY = 0.1, 0.04, 25
_RELAUNCH, _RESTORE, _STAGED, _DURABLE = 8.0, 0.5, 0.3, 0.6


def _attempt(first_step: int, begun: float, until: float) -> Attempt:
    """As a machine without any jitter would run it: the stall comes after the step that is saved."""
    ends: list[float] = []
    now, step = begun, first_step
    while True:
        now += _ITERATION + (_STALL if ends and step % _EVERY == 0 else 0)
        if now > until:
            return Attempt(first_step, begun, _RESTORE, tuple(ends))
        ends.append(now)
        step += 1


def _run(kills: list[float], end: float, *, begin: float = 0.0) -> list[Attempt]:
    attempts: list[Attempt] = []
    step, begun = 0, begin
    for until in [*kills, end]:
        attempt = _attempt(step, begun, until)
        attempts.append(attempt)
        saved = [
            step + number + 1
            for number, at in enumerate(attempt.ends)
            if (step + number + 1) % _EVERY == 0 and at + _STAGED <= until
        ]
        step, begun = max(saved, default=step), until + _RELAUNCH + _RESTORE
    return attempts


def test_a_run_without_jitter_is_predicted_to_the_iteration(tmp_path: Path) -> None:
    before, after = _run([13.0], 40.0)
    profile = profile_of(
        before,
        after,
        every=_EVERY,
        killed=13.0,
        pause_seconds=0.0,
        staged_seconds=_STAGED,
        durable_seconds=_DURABLE,
    )
    holdfast = profile.strategies["holdfast"]
    assert profile.iteration_seconds == pytest.approx(_ITERATION)
    assert holdfast.stall_seconds == pytest.approx(_STALL)
    assert profile.restart_seconds + holdfast.restore_seconds == pytest.approx(_RELAUNCH + _RESTORE)
    losses = [21.3, 47.9, 95.05]
    attempts = _run(losses, 120.0)
    useful, redone, training = came_to(attempts, losses, 120.0)
    trace = written(losses, profile.restart_seconds, 120.0, tmp_path / "trace.csv")
    foreseen = predicted(profile, trace, _EVERY)
    assert foreseen["interruptions"] == 3
    assert abs(foreseen["useful"] - useful) <= 1
    assert abs(foreseen["redone"] - redone) <= 1
    assert foreseen["training_seconds"] == pytest.approx(training, abs=0.01)
    assert abs(error({"real": {"useful": useful}, "predicted": foreseen})) < 0.002


def test_a_pause_that_was_drawn_is_left_out() -> None:
    before, after = _run([13.0], 40.0)
    seconds = [
        profile_of(
            before, after, every=_EVERY, killed=13.0, pause_seconds=pause, staged_seconds=0, durable_seconds=0
        ).restart_seconds
        for pause in (0.0, 2.0)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(2.0)


def test_time_without_training_at_the_end_counts_from_the_resumed_step() -> None:
    attempts = _run([21.3], 60.0)
    useful, redone, training = came_to(attempts, [21.3], 25.0)
    assert useful == attempts[1].first_step
    assert useful + redone == len(attempts[0].ends)
    assert training == pytest.approx(21.3)


def test_a_kill_while_nothing_trains_takes_nothing() -> None:
    attempts = _run([21.3], 60.0)
    assert came_to(attempts, [21.3, 24.0], 60.0) == came_to(attempts, [21.3], 60.0)


def test_losses_are_seeded_or_those_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    assert losses_of(120, 30, 0) == losses_of(120, 30, 0) != losses_of(120, 30, 1)
    path = tmp_path / "nodes.csv"
    path.write_text(NODES)
    monkeypatch.setenv(TRACE_VARIABLE, str(path))
    for number in range(5):
        losses = losses_of(1e6, 30, number)
        assert losses == sorted(losses)
        assert losses, "a window as long as the whole trace has its losses"
        assert all(0 < at < 1e6 for at in losses)


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1.jsonl"
    assert lines(path) == []
    path.write_text('{"step": 1}\n{"step": ')
    assert lines(path) == [{"step": 1}]
