"""The pure parts of the benchmarks: figures are only worth something if their arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.spread import Spread, percentile, ratios, round_figures, spread

pytest.importorskip("psutil")


def test_spread_is_median_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).median == 1.5
    assert Spread(0.015, 0.01, 0.02).text(1, times=100) == "1.5 (1.0–2.0)"


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        spread([])


def test_ratios_compare_a_round_with_itself() -> None:
    # The machine is ten times slower in the second round, for both: the ratio does not see it.
    assert ratios([2.0, 20.0], [1.0, 10.0]) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(("over", "under"), [([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_ratios_refuse_what_cannot_be_compared(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be compared|no time"):
        ratios(over, under)


def test_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([7.0], 1) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_round_is_as_slow_as_its_slowest_rank() -> None:
    figures = round_figures(
        [
            {"start": 10.0, "end": 12.0, "stall_seconds": 0.5, "marks": {"staged": 11.0, "mine": 1.0}},
            {
                "start": 10.5,
                "end": 11.0,
                "stall_seconds": 0.1,
                "stall_cpu_seconds": 0.05,
                "marks": {"staged": 11.5},
            },
        ]
    )
    assert figures == {
        "stall_seconds": 0.5,
        "first_update_seconds": 0.0,
        "stall_cpu_seconds": 0.05,
        "done_seconds": 2.0,
        "staged_seconds": 1.5,
    }


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    document = {
        "rounds": [{"a": {"b": 1.23456789}}, {}],
        "spread": Spread(1.0, 0.5, 2.0),
        "long": ["x" * 60] * 3,
    }
    results.write(tmp_path / "results" / "x.json", document)
    read = results.read("x", tmp_path / "results")
    assert read == {
        "rounds": [{"a": {"b": 1.23457}}, {}],
        "spread": {"median": 1.0, "least": 0.5, "greatest": 2.0},
        "long": ["x" * 60] * 3,
    }
    assert results.read("y", tmp_path / "results") is None
