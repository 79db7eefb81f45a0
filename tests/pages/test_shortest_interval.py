"""The shortest interval of made-up peers, of which the true one is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.experiments.makespan import shortest
from benchmarks.shortest_interval import ShortestInterval

ITERATION_SECONDS, WRITE_SECONDS, SAVES = 0.2, 3.4, 12
LONG = (2, 3, 5, 10, 15, 20, 40, 80, 400)


def synchronous(every: int) -> float:
    """Seconds that training waits in all: for each write, whatever the interval."""
    return SAVES * WRITE_SECONDS


def asynchronous(in_flight: int) -> Callable[[int], float]:
    """Training waits where `in_flight` checkpoints are being written already, one after the other."""

    def waited(every: int) -> float:
        clock, trained, ends = 0.0, 0.0, list[float]()
        for _ in range(SAVES):
            clock, trained = clock + every * ITERATION_SECONDS, trained + every * ITERATION_SECONDS
            if len(ends) >= in_flight:
                clock = max(clock, ends[-in_flight])
            ends.append(max(clock, ends[-1] if ends else 0.0) + WRITE_SECONDS)
        return clock - trained

    return waited


def runs(waited: Callable[[int], float], intervals: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rows as the experiment writes them."""
    rows = []
    for every in intervals:
        plain = every * SAVES * ITERATION_SECONDS
        for peer, seconds in (("none", plain), ("made-up", plain + waited(every))):
            rows.append(
                {"peer": peer, "every": every, "round": 0, "saves": SAVES, "makespan_seconds": seconds}
            )
    return rows


@pytest.mark.parametrize(
    ("waited", "beyond", "within"),
    [(synchronous, 80, 400), (asynchronous(1), 15, 20), (asynchronous(2), 10, 15)],
    ids=["synchronous", "one in flight", "two in flight"],
)
def test_the_interval_is_between_the_two_measured_ones_around_it(
    waited: Callable[[int], float], beyond: int, within: int
) -> None:
    """3.4 s are 17 iterations: a synchronous peer reaches 5 % at 340."""
    assert shortest(runs(waited, LONG), "made-up") == ShortestInterval(beyond, within)


@pytest.mark.parametrize("waited", [synchronous, asynchronous(1), asynchronous(2)])
def test_no_interval_is_computed_beyond_the_longest_that_was_measured(
    waited: Callable[[int], float],
) -> None:
    found = shortest(runs(waited, (2, 3, 5, 10)), "made-up")
    assert (found, found.text()) == (ShortestInterval(10, None), "more than 10")


def test_an_interval_counts_only_where_all_longer_ones_are_within_the_limit_too() -> None:
    waits = {2: 0.0, 3: 9.0, 5: 0.0, 10: 0.0}
    assert shortest(runs(waits.__getitem__, (2, 3, 5, 10)), "made-up") == ShortestInterval(3, 5)
    assert shortest(runs(lambda _: 0.0, (2, 3)), "made-up").text() == "at most 2"
