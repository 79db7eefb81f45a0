"""How often training is interrupted, as set or as estimated from the run, and the price of its machines.

    prior:    1 failure in 3 h      ─┐
    observed: n failures in T hours ─┴─► (1 + n) / (3 h + T) failures per hour

Model: failures are a Poisson process, with a Gamma prior over its rate. The posterior is a Gamma, too, and this is its
mean. The prior weighs as much as one failure: the run's own failures soon outweigh it, and so does a day without any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.wire.failure_count import FailureCount

PRIOR_MTBF_HOURS = 3.0  # spot traces in the papers range from some minutes to a day
_PRIOR_FAILURES = 1.0
_HOUR_SECONDS, _MINUTE_SECONDS = 3600.0, 60.0
_TENTHS_BELOW = 9.95  # `5.2 h`, `27 h`


@dataclass(frozen=True, slots=True)
class Hazard:
    """How often training is interrupted, and the price of its machines."""

    per_hour: float  # interruptions of the whole job
    dollars_per_hour: float | None = None  # price of all machines; None: not known
    description: str = ""  # where the rate comes from, as a line for people

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour < math.inf:
            raise ConfigError(f"interruptions per hour: expected 0 or more, got {self.per_hour}")
        if self.dollars_per_hour is not None and not 0 <= self.dollars_per_hour < math.inf:
            raise ConfigError(f"dollars per hour: expected 0 or more, got {self.dollars_per_hour}")

    @classmethod
    def from_mtbf(cls, mtbf_hours: float, dollars_per_hour: float | None = None) -> Hazard:
        """Build from the mean time between two interruptions. Raises `ConfigError`: `mtbf_hours` is not more than 0."""
        if not mtbf_hours > 0:
            raise ConfigError(
                f"mean time between interruptions: expected more than 0 hours, got {mtbf_hours}"
            )
        description = f"failures: one in {_format_hours(mtbf_hours)}, as set (mtbf_hours)"
        return cls(1 / mtbf_hours, dollars_per_hour, description)

    @classmethod
    def from_observed(cls, observed: FailureCount, dollars_per_hour: float | None = None) -> Hazard:
        """Build from the posterior mean given `observed`."""
        hours = observed.seconds / _HOUR_SECONDS
        per_hour = (_PRIOR_FAILURES + observed.failures) / (_PRIOR_FAILURES * PRIOR_MTBF_HOURS + hours)
        description = (
            f"failures: {observed.failures} in {_format_hours(hours)} observed, "
            f"prior 1 in {_format_hours(PRIOR_MTBF_HOURS)} → one in {_format_hours(1 / per_hour)}"
        )
        return cls(per_hour, dollars_per_hour, description)


def _format_hours(hours: float) -> str:
    """Format as `40 s`, `12 min`, `5.2 h`, `27 h`."""
    seconds = hours * _HOUR_SECONDS
    if seconds < 2 * _MINUTE_SECONDS:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{seconds / _MINUTE_SECONDS:.0f} min"
    return f"{hours:.1f}".removesuffix(".0") + " h" if hours < _TENTHS_BELOW else f"{hours:.0f} h"
