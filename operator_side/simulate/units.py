"""Seconds to whole microseconds: sums and quotients are then exact, whoever computes them in whatever order."""

from __future__ import annotations

__all__ = ["HOUR_US", "SECOND_US", "microseconds"]

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


def microseconds(seconds: float) -> int:
    """The nearest whole number of them."""
    return round(seconds * SECOND_US)
