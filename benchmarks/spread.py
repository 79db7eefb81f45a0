"""Turns samples into figures: medians, ratios within one round, and their spread.

A ratio says how many times longer one thing takes than another. Each round gives one ratio; the figure is the median of
these ratios with the smallest and the largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Spread", "columns", "percentile", "ratios", "round_figures", "spread"]


@dataclass(frozen=True)
class Spread:
    """Median over rounds, with minimum and maximum."""

    median: float
    least: float
    greatest: float

    def text(self, digits: int = 2, *, times: float = 1.0) -> str:
        """Return text such as `1.50 (1.00–2.00)`, each number multiplied by `times`."""
        median, least, greatest = (f"{times * value:.{digits}f}" for value in asdict(self).values())
        return f"{median} ({least}–{greatest})"


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum of `values`.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no rounds were measured")
    return Spread(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the spread of `over[i] / under[i]`, so that figures are only compared within a round.

    Raises:
        ValueError: The lengths differ, or a divisor is 0.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} rounds cannot be compared with {len(under)}")
    if 0 in under:
        raise ValueError("a round of the divisor took no time at all")
    return spread([a / b for a, b in zip(over, under, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def columns(rounds: Sequence[Mapping[str, Mapping[str, float]]], peer: str, name: str) -> list[float]:
    """Return one figure of one peer from each round that has it."""
    return [of[peer][name] for of in rounds if peer in of and name in of[peer]]


def round_figures(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the ranks' samples of one checkpoint.

    The job's stall is that of its most-stalled rank. A checkpoint begins with the first rank, and reaches a mark when
    the last rank does.

    Returns:
        `stall_seconds`, with `first_update_seconds` and `stall_cpu_seconds` of the same rank; `done_seconds`; and
        `<mark>_seconds` for each mark that all ranks have.
    """
    start = min(sample["start"] for sample in samples)
    figures = {
        "stall_seconds": max(sample["stall_seconds"] for sample in samples),
        "first_update_seconds": max(sample.get("first_update_seconds", 0.0) for sample in samples),
        "stall_cpu_seconds": max(sample.get("stall_cpu_seconds", 0.0) for sample in samples),
        "done_seconds": max(sample["end"] for sample in samples) - start,
    }
    shared = set.intersection(*(set(sample.get("marks", {})) for sample in samples))
    for mark in sorted(shared):
        figures[f"{mark}_seconds"] = max(sample["marks"][mark] for sample in samples) - start
    return figures
