"""The checked options of `holdfast simulate`, and the results of one trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import ConfigError
from holdfast.policy.advice import Advice, advise
from holdfast.policy.hazard import Hazard
from operator_side.simulate.profiles import TrainingProfile
from operator_side.simulate.replay import TrainingJob
from operator_side.simulate.strategy import HOUR_US, Strategy, microseconds
from operator_side.simulate.study import (
    Prices,
    StrategyGoodput,
    Total,
    goodput,
    make_lanes,
    on_demand_dollars,
    total_times,
)
from operator_side.simulate.trace_windows import cut_windows
from operator_side.simulate.traces import Trace


@dataclass(frozen=True)
class TraceResult:
    trace: Trace
    job: TrainingJob
    window_hours: float
    rows: list[StrategyGoodput]
    event_steps: int  # see `ReplayOutcome`
    on_demand_dollars: float | None  # price of an iteration on demand; None without prices
    advice: list[tuple[str, Advice | ConfigError]]  # of each strategy, or why its bound cannot be kept

    def best(self) -> list[StrategyGoodput]:
        """Return the best interval of each strategy; of equal ones the longest, which costs least."""
        found: dict[str, StrategyGoodput] = {}
        for row in self.rows:
            before = found.get(row.strategy.name)
            if before is None or row.share.median >= before.share.median:
                found[row.strategy.name] = row
        return list(found.values())


@dataclass(frozen=True)
class StudyPlan:
    """The options of `holdfast simulate`, whose help explains each."""

    profile: TrainingProfile
    leads_seconds: Sequence[float]
    intervals: Sequence[int]
    nodes: int | None  # None: the largest number in the trace
    nodes_min: int
    offsets: int  # number of windows of a trace, or of random traces
    seed: int
    overhead_max: float
    window_hours: float | None = None  # None: half of the trace
    prices: Prices | None = None
    stager_mtbf_hours: float | None = None  # None: the stager is never lost
    mtbf_hours: Sequence[float] = ()
    iterations: int | None = None
    provision_seconds: float = 0.0

    @property
    def strategies(self) -> list[Strategy]:
        """Strategies to compare, the ideal last."""
        return self.profile.lanes(self.leads_seconds)

    def replay(self, trace: Trace) -> TraceResult:
        """Replay a trace. Raises `ConfigError`: the plan does not fit it."""
        nodes = self.nodes or trace.count_max
        if not nodes:
            raise ConfigError(f"{trace.name}: expected a trace with at least one machine, got none")
        job = self._job(nodes)
        length_us = trace.end_us // 2 if self.window_hours is None else round(self.window_hours * HOUR_US)
        windows = cut_windows(
            trace,
            length_us=length_us,
            offsets=self.offsets,
            rng=np.random.default_rng(self.seed),
            stager_mtbf_us=self._stager_mtbf_us,
        )
        rows, outcome = goodput(job, self.strategies, self.intervals, windows, self.prices)
        dollars = None if self.prices is None else on_demand_dollars(job, self.prices)
        return TraceResult(
            trace, job, length_us / HOUR_US, rows, outcome.event_steps, dollars, self._advice(trace, job)
        )

    def totals(self) -> list[Total]:
        """Return each strategy's best interval at each MTBF. Raises `ConfigError`: no job size, or too many losses."""
        found: list[Total] = []
        for mtbf in self.mtbf_hours:
            if self.nodes is None or self.iterations is None:
                raise ConfigError(
                    "--mtbf-hours: expected --nodes and --iterations, too, for the size of the training"
                )
            rows = total_times(
                self._job(self.nodes, self.iterations),
                make_lanes(self.strategies, self.intervals),
                mtbf_hours=mtbf,
                samples=self.offsets,
                seed=self.seed,
                provision_us=microseconds(self.provision_seconds),
                stager_mtbf_us=self._stager_mtbf_us,
            )
            for name in dict.fromkeys(row.strategy.name for row in rows):
                theirs = [row for row in rows if row.strategy.name == name]
                found.append(min(theirs, key=lambda row: math.inf if row.hours is None else row.hours.median))
        return found

    @property
    def _stager_mtbf_us(self) -> int | None:
        hours = self.stager_mtbf_hours
        return None if hours is None else max(1, round(hours * HOUR_US))

    def _job(self, nodes: int, target: int | None = None) -> TrainingJob:
        iteration_us = microseconds(self.profile.iteration_seconds)
        restart_us = microseconds(self.profile.restart_seconds)
        return TrainingJob(nodes, self.nodes_min, iteration_us, restart_us, target)

    def _advice(self, trace: Trace, job: TrainingJob) -> list[tuple[str, Advice | ConfigError]]:
        found: list[tuple[str, Advice | ConfigError]] = []
        for name, measured in self.profile.strategies.items():
            strategy = measured.strategy(name)
            price = None
            if self.prices is not None:
                price = job.nodes * self.prices.spot + self.prices.stager * strategy.stager
            hazard = Hazard(trace.losses_per_hour, price)
            try:
                advice = advise(strategy.cost(job.iteration_us), hazard, overhead_max=self.overhead_max)
                found.append((name, advice))
            except ConfigError as error:  # other strategies may still keep it
                found.append((name, error))
        return found
