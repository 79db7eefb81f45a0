"""Results of the replays: goodput by interval, total time by MTBF, and money.

Goodput (PCcheck, figs. 2 and 9) is useful iterations in a window of a trace, as a share of the ideal's in the same
window. Total time (LightCheck, fig. 9 and table II) is the time until all iterations are done, under random losses.
Each figure has its spread over windows: median, least, greatest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from operator_side.simulate.replay import ReplayOutcome, StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import HOUR_US, IDEAL, Strategy
from operator_side.simulate.trace_windows import TraceWindows, poisson_windows

_HORIZON_FIRST = 4  # times the ideal's own time
_HORIZON_LAST = 256  # a strategy that needs more counts as unfinished


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Spread:
        return cls(float(np.median(values)), float(values.min()), float(values.max()))


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per hour of one machine. `stager` is on demand, and paid only for strategies with a stager."""

    spot: float
    on_demand: float
    stager: float = 0.0

    def __post_init__(self) -> None:
        for name in ("spot", "on_demand", "stager"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"price of {name}: expected 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class StrategyGoodput:
    """One strategy at one interval over all windows."""

    strategy: Strategy
    every: int
    share: Spread
    useful_per_hour: Spread
    redone: Spread
    interruptions: Spread
    training: Spread  # share of the wall time; the rest are restarts, restores and waits for machines
    dollars: Spread | None  # per useful iteration on spot machines; None without prices or useful iterations


def goodput(
    job: TrainingJob,
    strategies: Sequence[Strategy],
    intervals: Sequence[int],
    windows: TraceWindows,
    prices: Prices | None = None,
) -> tuple[list[StrategyGoodput], ReplayOutcome]:
    """Replay every strategy at every interval, and the ideal once. Return the rows and the replay itself."""
    lanes = make_lanes(strategies, intervals)
    outcome = replay(job, lanes, windows)
    ideal = np.maximum(outcome.useful[-1], 1)
    node_hours = windows.node_microseconds(job.nodes) / HOUR_US
    hours = windows.length_us / HOUR_US
    rows = []
    for number, lane in enumerate(lanes):
        useful = outcome.useful[number]
        dollars = None
        if prices is not None and useful.min() > 0:
            paid = node_hours * prices.spot + hours * prices.stager * lane.strategy.stager
            dollars = Spread.of(paid / useful)
        rows.append(
            StrategyGoodput(
                lane.strategy,
                lane.every,
                Spread.of(useful / ideal),
                Spread.of(useful / hours),
                Spread.of(outcome.redone[number] / np.maximum(outcome.interruptions[number], 1)),
                Spread.of(outcome.interruptions[number].astype(np.float64)),
                Spread.of(outcome.training_us[number] / windows.length_us),
                dollars,
            )
        )
    return rows, outcome


def make_lanes(strategies: Sequence[Strategy], intervals: Sequence[int]) -> list[StrategyLane]:
    """Return every strategy at every interval, then the ideal once."""
    some = [strategy for strategy in strategies if strategy != IDEAL]
    return [StrategyLane(one, every) for one in some for every in intervals] + [StrategyLane(IDEAL, 1)]


def on_demand_dollars(job: TrainingJob, prices: Prices) -> float:
    """Return the price of an iteration on machines that are never lost: no checkpoint, no stager."""
    return job.nodes * prices.on_demand * job.iteration_us / HOUR_US


@dataclass(frozen=True, slots=True)
class Total:
    """One strategy at one interval and one MTBF."""

    strategy: Strategy
    every: int
    mtbf_hours: float
    hours: Spread | None  # until all iterations are done; None: a sample took over 256 times the ideal's


def total_times(
    job: TrainingJob,
    lanes: Sequence[StrategyLane],
    *,
    mtbf_hours: float,
    samples: int,
    seed: int,
    provision_us: int = 0,
    stager_mtbf_us: int | None = None,
) -> list[Total]:
    """Return the time until `job.target` is reached under random losses, for every lane."""
    if job.target is None:
        raise ConfigError("total training time: expected a number of iterations; give --iterations")
    if not 0 < mtbf_hours < math.inf:
        raise ConfigError(f"mean time between losses: expected more than 0 hours, got {mtbf_hours:g}")
    alone_us = job.restart_us + job.target * job.iteration_us
    times = _HORIZON_FIRST
    while True:
        windows = poisson_windows(
            nodes=job.nodes,
            mtbf_us=max(1, round(mtbf_hours * HOUR_US)),
            provision_us=provision_us,
            length_us=times * alone_us,
            samples=samples,
            rng=np.random.default_rng([seed, times]),
            stager_mtbf_us=stager_mtbf_us,
        )
        finished = replay(job, lanes, windows).finished_us
        if (finished >= 0).all() or times >= _HORIZON_LAST:
            break
        times *= _HORIZON_FIRST
    return [
        Total(lane.strategy, lane.every, mtbf_hours, Spread.of(of / HOUR_US) if (of >= 0).all() else None)
        for lane, of in zip(lanes, finished, strict=True)
    ]
