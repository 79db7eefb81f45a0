"""Cost of one checkpoint for a training, and the overhead of an interval.

k iterations          stall                 with N places, each taken for `durable_seconds`, N checkpoints
├────────────────────┼──────┤               need at least that time: a faster loop waits
└── cycle: max(k × iteration + stall, durable / N) ──┘
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cost:
    """Measured costs of training and of its checkpoints."""

    iteration_seconds: float  # of one without a checkpoint
    stall_seconds: float  # of the training thread by one checkpoint (CST)
    staged_seconds: float  # from `save()` until it survives the loss of the training's machines (PGT-1)
    durable_seconds: float  # from `save()` until it is in the store (PGT-2); it is in flight until then
    in_flight_max: int = 1  # checkpoints that may be in flight

    def __post_init__(self) -> None:
        if not (math.isfinite(self.iteration_seconds) and self.iteration_seconds > 0):
            raise ConfigError(
                f"iteration_seconds: expected more than 0, got {self.iteration_seconds}; "
                "was an iteration measured? Train a few without a checkpoint first"
            )
        for name in ("stall_seconds", "staged_seconds", "durable_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: expected 0 or more, got {value}; measure it with `make bench`")
        if self.staged_seconds > self.durable_seconds:
            raise ConfigError(
                f"staged_seconds {self.staged_seconds}: expected at most durable_seconds {self.durable_seconds}; "
                "a checkpoint in the store also survives the loss of the training's machines"
            )
        if self.in_flight_max < 1:
            raise ConfigError(f"in_flight_max: expected at least 1, got {self.in_flight_max}")

    def cycle_seconds(self, every: int) -> float:
        """Return the time from the start of one checkpoint to that of the next, `every` iterations apart."""
        busy = every * self.iteration_seconds + self.stall_seconds
        return max(busy, self.durable_seconds / self.in_flight_max)

    def overhead(self, every: int) -> float:
        """Return how much longer training takes with a checkpoint every `every` iterations; 0.03 means 3 %."""
        return self.cycle_seconds(every) / (every * self.iteration_seconds) - 1


def best_in_flight(durable_seconds: Mapping[int, float], *, places_max: int) -> int:
    """Return the number of checkpoints to have in flight: the N with the smallest `T_w(N) / N` (PCcheck, section 3.4).
    `durable_seconds`: N → T_w, measured with N checkpoints in flight; T_w grows with N because they share one device.
    Among equals the smallest N wins. ConfigError: no N up to `places_max` was measured, or a time is not more than 0.
    """
    room = {places: seconds for places, seconds in durable_seconds.items() if 1 <= places <= places_max}
    if not room:
        raise ConfigError(
            f"in_flight_max: expected a time measured for 1 to {places_max} at once, "
            f"got times for {sorted(durable_seconds) or 'none'}"
        )
    wrong = [f"{seconds} for {places}" for places, seconds in room.items() if not 0 < seconds < math.inf]
    if wrong:
        raise ConfigError(f"durable_seconds: expected more than 0, got {', '.join(wrong)} at once")
    return min(sorted(room), key=lambda places: room[places] / places)
