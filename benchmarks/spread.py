"""From samples to figures: medians, ratios made within one round, and their spread.

A ratio says how many times longer the one takes than the other. It is made in every round by itself; what is
stated is the median of these ratios with the least and the greatest.
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
    """Median of some rounds, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    def text(self, digits: int = 2, *, times: float = 1.0) -> str:
        """Such as `1.50 (1.00–2.00)`, each multiplied by `times`."""
        median, least, greatest = (f"{times * value:.{digits}f}" for value in asdict(self).values())
        return f"{median} ({least}–{greatest})"


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of `values`.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no rounds were measured")
    return Spread(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Spread of `over[i] / under[i]`: rounds are compared with themselves, never with another one.

    Raises:
        ValueError: The two have different numbers of rounds, or a divisor is 0.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} rounds cannot be compared with {len(under)}")
    if 0 in under:
        raise ValueError("a round of the divisor took no time at all")
    return spread([a / b for a, b in zip(over, under, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the others do not exceed (nearest rank).

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def columns(rounds: Sequence[Mapping[str, Mapping[str, float]]], peer: str, name: str) -> list[float]:
    """One figure of one peer over the rounds that have it."""
    return [of[peer][name] for of in rounds if peer in of and name in of[peer]]


def round_figures(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One checkpoint's figures from what its ranks saw.

    The job stalls as long as its most-stalled rank; it began when the first rank began, and a moment is
    reached when the last rank has reached it.

    Returns:
        `stall_seconds`, `first_update_seconds` and `stall_cpu_seconds` of it, `done_seconds`, and `<mark>_seconds` for
        each mark that all ranks have.
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
