"""The shortest interval of simulated peers, whose true one is known."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from benchmarks.cluster import Cluster
from benchmarks.experiments.makespan import Part, Series, common, overheads, shortest
from benchmarks.shortest_interval import ShortestInterval, next_interval, shortest_interval

ITERATION_SECONDS, WRITE_SECONDS = 0.2, 3.4
OVERHEAD_MAX = 0.05
# Iterations at which the overhead is 5 %. A write of 3.4 s stalls a synchronous peer each time, and an asynchronous one
# until earlier writes are done: two in flight only delay the first stall.
TRUE = {"synchronous": 340, "one in flight": 17, "two in flight": 17, "for nothing": 1}
IN_FLIGHT = {"one in flight": 1, "two in flight": 2}


class MadeUp:
    """Replaces a cluster by trainings on a simulated clock."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.trained: list[tuple[str, int]] = []

    def progress(self, text: str) -> None:
        """Ignore messages."""

    def save(self, peer: str, *, compute_seconds: float) -> dict[str, float]:
        """Save like `Cluster.save`."""
        self.clock += compute_seconds
        return {"done_seconds": 0.0 if peer == "for nothing" else WRITE_SECONDS}

    def train(
        self, peer: str, *, iterations: int, every: int, compute: str, compute_seconds: float
    ) -> dict[str, Any]:
        """Train like `Cluster.train`, with one disk that writes one checkpoint at a time."""
        assert compute == "device"
        begun, ends, lasted = self.clock, list[float](), list[float]()
        for iteration in range(iterations):
            before = self.clock
            self.clock += compute_seconds
            if peer == "synchronous" and iteration % every == 0:
                self.clock += WRITE_SECONDS
            elif peer in IN_FLIGHT and iteration % every == 0:
                if len(ends) >= IN_FLIGHT[peer]:
                    self.clock = max(self.clock, ends[-IN_FLIGHT[peer]])
                ends.append(max((self.clock, *ends[-1:])) + WRITE_SECONDS)
            lasted.append(self.clock - before)
        self.trained.append((peer, every))
        saves = 0 if peer == "none" else -(-iterations // every)
        return {
            "makespan_seconds": self.clock - begun,
            "durable_seconds": max((self.clock, *ends[-1:])) - begun,
            "iteration_seconds": lasted,
            "saves": saves,
            "cpu_seconds": 1.0,
        }


def measured(
    peer: str, *, search_end: float = math.inf, rounds_end: float = math.inf
) -> tuple[Series, MadeUp]:
    """Return a series with one peer, run as in the experiment."""
    cluster = MadeUp()
    part = Part({peer: {2: 16, 10: 4}}, rounds_end=rounds_end, search_end=search_end)
    series = Series(cast("Cluster", cluster), ITERATION_SECONDS, lambda: cluster.clock)
    series.take_rounds(part.saves, 3, part)
    series.search([peer], part)
    return series, cluster


@pytest.mark.parametrize("peer", TRUE)
def test_the_interval_is_between_the_two_measured_ones_around_the_true_one(peer: str) -> None:
    series, _ = measured(peer)
    found = shortest(series.runs, peer)
    assert found.beyond < TRUE[peer]
    assert found.within is None or found.within >= TRUE[peer]
    assert (
        found
        == {
            "synchronous": ShortestInterval(80, None),
            "one in flight": ShortestInterval(15, 20),
            "two in flight": ShortestInterval(15, 20),
            "for nothing": ShortestInterval(0, 2),
        }[peer]
    )


@pytest.mark.parametrize("peer", ["synchronous", "one in flight", "two in flight"])
def test_no_interval_is_computed_beyond_the_longest_that_was_measured(peer: str) -> None:
    """Extrapolating the cost at every 10 would give 340, 140 and 140."""
    found = shortest(measured(peer, search_end=0.0)[0].runs, peer)
    assert (found, found.text()) == (ShortestInterval(10, None), "not reached at 10")


def test_an_asynchronous_peer_is_measured_twice_more_until_its_interval_is_known() -> None:
    _, cluster = measured("one in flight")
    searched = [every for peer, every in cluster.trained if peer != "none"]
    assert searched == [2, 10] * 3 + [20] * 3 + [15] * 3


@pytest.mark.parametrize(("every", "iterations"), [(2, 17), (10, 17), (15, 17), (20, 20)])
def test_the_overhead_contains_what_two_buffers_hide_for_a_while(every: int, iterations: int) -> None:
    """A write takes 17 iterations, so no shorter interval can be sustained."""
    series, _ = measured("two in flight")
    overhead = overheads(series.runs, "two in flight", every)
    assert overhead is not None
    assert overhead.median == pytest.approx(iterations / every - 1)


def test_no_round_and_no_search_begins_once_the_time_is_used_up() -> None:
    whole, _ = measured("one in flight")
    cut, _ = measured("one in flight", rounds_end=0.0, search_end=60.0)
    assert {run["round"] for run in whole.runs} == {0, 1, 2}
    assert {run["round"] for run in cut.runs} == {0}
    assert {run["every"] for run in cut.runs} == {2, 10}


def test_an_interval_counts_only_where_all_longer_ones_are_within_the_limit_too() -> None:
    assert shortest_interval({2: 0.0, 3: 9.0, 5: 0.0, 10: 0.0}, OVERHEAD_MAX) == ShortestInterval(3, 5)
    assert shortest_interval({2: 0.0, 3: 0.0}, OVERHEAD_MAX).text() == "at most 2"


def test_a_search_halves_what_is_left() -> None:
    candidates = (2, 3, 5, 10, 15, 20, 40, 80)
    assert next_interval({10: 1.0}, OVERHEAD_MAX, candidates) == 20
    assert next_interval({10: 1.0, 20: 1.0}, OVERHEAD_MAX, candidates) == 40
    assert next_interval({10: 0.0}, OVERHEAD_MAX, candidates) == 3
    assert next_interval({10: 1.0, 15: 1.0, 20: 0.0}, OVERHEAD_MAX, candidates) is None
    assert next_interval({80: 1.0}, OVERHEAD_MAX, candidates) is None


def test_the_picture_shows_the_longest_interval_that_all_peers_have() -> None:
    rows = [{"peer": peer, "every": every} for peer, every in (("a", 2), ("a", 10), ("b", 10), ("b", 20))]
    assert common(rows) == 10
