"""Prediction against reality, without a real run: on made-up ones of which everything is known, both say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experiments.reality import (
    came_to,
    error,
    predicted,
    profile_of,
    written,
)
from benchmarks.supervised import Attempt

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


def test_time_without_training_at_the_end_counts_from_the_resumed_step() -> None:
    attempts = _run([21.3], 60.0)
    useful, redone, training = came_to(attempts, [21.3], 25.0)
    assert useful == attempts[1].first_step
    assert useful + redone == len(attempts[0].ends)
    assert training == pytest.approx(21.3)
