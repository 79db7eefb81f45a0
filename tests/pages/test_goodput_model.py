"""The model behind the goodput page: it reproduces published figures from their profile, and its shares add up to 1."""

from __future__ import annotations

import pytest

from benchmarks.experiments.goodput import PUBLISHED, TENTH, effective
from operator_side.simulate.profiles import load_profile, measured_profile
from tests.pages.test_simulated_makespan import simulated

# Iterations per second by interval, from PCcheck's artifact (fig8_vgg16.csv).
THROUGHPUTS = {
    "CheckFreq": {10: 2.938627628113705, 25: 7.042363043171207, 50: 12.18658951925483},
    "GPM": {10: 6.651017406282624, 25: 10.387977578704326, 50: 12.998492611136836},
    "PCcheck": {10: 6.3503108341382175, 25: 14.2728865888275, 50: 15.52581113138962},
}
# A stall and a write time fit three intervals.
TOLERANCE = 0.05


@pytest.mark.parametrize("way", THROUGHPUTS)
def test_the_published_profile_gives_the_published_throughput(way: str) -> None:
    profile = load_profile(PUBLISHED)
    for every, published in THROUGHPUTS[way].items():
        assert simulated(profile, way, every) == pytest.approx(1 / published, rel=TOLERANCE), every


@pytest.mark.parametrize("mtbf_hours", [1 / 6, 3.0])
def test_effective_time_and_its_losses_are_the_whole_time(mtbf_hours: float) -> None:
    for of in effective(measured_profile(), mtbf_hours, samples=8):
        parts = [of[part] for part in ("effective", "saving", "redone", "restart", "waiting")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(1.0, abs=1e-3), of["strategy"]


def test_the_interval_of_holdfast_is_ten_times_its_staging() -> None:
    profile = measured_profile()
    staged = profile.strategies["holdfast"].staged_seconds
    assert staged is not None
    (ours,) = (of for of in effective(profile, 1.0, samples=8) if of["strategy"] == TENTH)
    assert ours["every"] * profile.iteration_seconds == pytest.approx(
        10 * staged, abs=profile.iteration_seconds
    )
