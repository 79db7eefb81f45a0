"""The shares of a killed run's time, measured and predicted: they add up to the whole time and include the kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experiments.effective import PARTS, predicted, split
from benchmarks.experiments.reality import written
from operator_side.simulate.profiles import MeasuredCosts, TrainingProfile

_PROFILE = TrainingProfile(
    source="made up",
    iteration_seconds=0.1,
    restart_seconds=5.0,
    strategies={
        "torch.save+fsync": MeasuredCosts(stall_seconds=0.5, durable_seconds=0.5, restore_seconds=1.0)
    },
)


def test_measured_shares_add_up_to_the_whole_time() -> None:
    found = split(60.0, 5.0, 70.0, 100.0, waited=10.0)
    assert found == pytest.approx(
        {"effective": 0.6, "saving": 0.05, "redone": 0.05, "restart": 0.2, "waiting": 0.1}
    )
    assert set(found) == set(PARTS)


def test_the_prediction_of_one_kill_is_the_whole_time_without_the_first_launch(tmp_path: Path) -> None:
    # Trains from second 5; 10 iterations take 1.5 s. Killed after 20.2 s; save 13 began after 19 s.
    trace = written([20.2], 5.0, 40.0, tmp_path / "trace.csv")
    found = predicted(_PROFILE, "torch.save+fsync", 10, trace)
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["restart"] == pytest.approx(6.0 / 40)
    assert found["redone"] == pytest.approx(0.7 / 40)
    assert found["waiting"] == pytest.approx(0.0, abs=1e-9)
