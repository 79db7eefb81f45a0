"""Computes the interval, in iterations: the shortest within an overhead bound, and the one with the smallest loss.

**Bound.** PCcheck (ASPLOS 2025, section 3.4): with q = 1 + bound, a checkpoint every f* = ceil(T_w / (N q t))
iterations of t seconds never waits for a place longer than the bound allows. CheckFreq (FAST 2021): the stall,
spread over the interval, stays under the bound. Both are one condition on `Cost.overhead`, which decreases as the
interval grows.

**Loss.** Daly (FGCS 22, 2006): with random losses, M seconds apart on average, work takes
M e^(R/M) (e^((τ+δ)/M) − 1) / τ times as long, where τ is the work between two checkpoints and δ the cost of one. Young
(CACM 17, 1974) and Daly's series are its approximations. R does not depend on τ and so does not move the minimum: this
covers relaunch, restore, and the time until a checkpoint is safe, which each loss costs for any τ. Time to durable
counts if it makes the cycle longer than work and stall.
"""

from __future__ import annotations

import math

from holdfast.errors import ConfigError
from holdfast.policy.cost import Cost

_BISECTIONS = 200  # more than a double has bits


def least_interval(cost: Cost, overhead_max: float, *, every_max: int) -> int:
    """Return the shortest interval, in iterations, whose overhead is at most `overhead_max`; 0.03 means 3 %.
    ConfigError: no interval up to `every_max` keeps the bound; says which bound can be kept, and which interval would
    be needed.
    """
    if not 0 < overhead_max < math.inf:
        raise ConfigError(f"overhead_max: expected more than 0, such as 0.03 for 3 %, got {overhead_max}")
    iteration = cost.iteration_seconds
    needed = max(
        cost.stall_seconds / (overhead_max * iteration),
        cost.durable_seconds / (cost.in_flight_max * (1 + overhead_max) * iteration),
        1.0,
    )
    if needed > every_max + 1:
        raise _unreachable_bound_error(cost, overhead_max, every_max, needed)
    every = math.ceil(needed)
    # The quotient was rounded, perhaps across a whole number, so check the overhead itself.
    while every > 1 and cost.overhead(every - 1) <= overhead_max:
        every -= 1
    while cost.overhead(every) > overhead_max:
        every += 1
    if every > every_max:
        raise _unreachable_bound_error(cost, overhead_max, every_max, every)
    return every


def _unreachable_bound_error(cost: Cost, overhead_max: float, every_max: int, needed: float) -> ConfigError:
    reachable = cost.overhead(every_max)
    return ConfigError(
        f"an overhead of at most {overhead_max:.2%}: not possible within {every_max} iterations of "
        f"{cost.iteration_seconds:g} s, since a checkpoint stalls for {cost.stall_seconds:g} s and is durable after "
        f"{cost.durable_seconds:g} s, {cost.in_flight_max} at once. Possible: {reachable:.2%} every {every_max} "
        f"iterations, or {overhead_max:.2%} every {math.ceil(needed)}; allow one of the two"
    )


def slowdown(cost: Cost, every: int, mtbf_seconds: float) -> float:
    """Return the factor by which checkpoints and losses lengthen the work. Restarts are not included."""
    work = every * cost.iteration_seconds
    try:
        return mtbf_seconds * math.expm1(cost.cycle_seconds(every) / mtbf_seconds) / work
    except OverflowError:  # a cycle of hundreds of MTBFs never completes
        return math.inf


def best_interval(cost: Cost, mtbf_seconds: float, *, at_least: int = 1, every_max: int) -> int:
    """Return the interval from `at_least` to `every_max` iterations with the smallest `slowdown`.

    This is the exact minimum of Daly's complete model, not of its approximations, over whole iterations.
    """
    iteration = cost.iteration_seconds
    # The slowdown is the maximum of a decreasing function (waiting for a place) and one with a single minimum, so it
    # has a single minimum: next to their crossing, next to that minimum, or at a bound.
    crossing = (cost.durable_seconds / cost.in_flight_max - cost.stall_seconds) / iteration
    free = _optimum_seconds(cost.stall_seconds, mtbf_seconds) / iteration
    near = {math.floor(place) + more for place in (crossing, free) for more in (0, 1)}
    candidates = sorted({min(max(every, at_least), every_max) for every in near})
    return min(candidates, key=lambda every: slowdown(cost, every, mtbf_seconds))


def _optimum_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Find the zero of the derivative of Daly's complete model: the root of e^(x + δ/M) (1 − x) = 1, with x = τ/M."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        x = (low + high) / 2
        if x + stall_seconds / mtbf_seconds + math.log1p(-x) > 0:
            low = x
        else:
            high = x
        if not low < (low + high) / 2 < high:
            break
    return low * mtbf_seconds
