"""The replay: all strategies and intervals × all windows of a trace at the same time, event by event.

    launched ──(restart + restore)──► training ──loss──► newest checkpoint that survives ──► enough machines? ─┐
       ▲                                                                                                       │
       └───────────────────────── at once, or when enough have come ───────────────────────────────────────────┘

Nothing is decided between two events, so a stretch is one formula (`_Timeline`); the loop only runs over events.
States are arrays of shape (lane, window); a lane is a strategy and an interval.

Rules, which tests/unit/operator_side/simulate/reference.py walks through one by one:
 1. A loss of any machine, or of the stager's node if there is one, ends the job. Checkpoints that are not safe by then
    are lost.
 2. With a stager, a relaunch continues from the newest staged checkpoint, which reaches the store without the job. A
    loss of the stager leaves only the checkpoints that are durable by then.
 3. A notice makes one checkpoint, after the first iteration that ends at or after it. It counts if it is safe in time.
 4. A relaunch takes `restart`, then restore: near while the stager holds a staged checkpoint, else from the store. It
    uses the machines that are there, at most `nodes`, and an iteration takes nodes / machines times as long. Machines
    that arrive later join at the next relaunch.
 5. With fewer than `nodes_min` machines the job waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from operator_side.simulate.strategy import Strategy
from operator_side.simulate.trace_windows import TraceWindows
from operator_side.simulate.traces import Integers

_NEVER_US = np.int64(1) << 60
_SPAN_MAX_US = 1 << 50  # 35 years; sums and products of times then fit in 64 bits

Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    nodes: int  # machines that it uses if it can have them
    nodes_min: int
    iteration_us: int  # time of one iteration on `nodes` machines; at least 1
    restart_us: int  # from a loss until the processes run again, before they restore; at least 0
    target: int | None = None  # iterations after which the job ends; None: it runs to the window's end

    def __post_init__(self) -> None:
        if not 1 <= self.nodes_min <= self.nodes:
            raise ConfigError(f"nodes_min: expected 1 to {self.nodes} (nodes), got {self.nodes_min}")


class StrategyLane(NamedTuple):
    strategy: Strategy
    every: int  # at least 1


@dataclass(frozen=True)
class ReplayOutcome:
    """The results of a replay; arrays are (lane, window)."""

    useful: Integers
    redone: Integers  # iterations that were lost and have to be repeated
    interruptions: Integers
    training_us: Integers
    finished_us: Integers  # when the target was reached; -1: not within the window, or no target
    event_steps: int  # rounds of the replay's loop, independent of the number of lanes


def replay(job: TrainingJob, lanes: Sequence[StrategyLane], windows: TraceWindows) -> ReplayOutcome:
    run = _Replay(job, lanes, windows)
    steps = 0
    while steps < len(windows.time_us) and not run.all_finished():
        run.event(steps)
        steps += 1
    run.close()
    return ReplayOutcome(run.step, run.redone, run.interruptions, run.training_us, run.finished_us, steps)


class _Replay:
    """The state of all lanes. `start_us`: when training begins; `_NEVER_US` while the lane waits for machines."""

    def __init__(self, job: TrainingJob, lanes: Sequence[StrategyLane], windows: TraceWindows) -> None:
        if not lanes:
            raise ConfigError("simulate: expected at least one strategy and one interval, got none")
        strategies = [lane.strategy for lane in lanes]

        def column(name: str) -> Integers:
            return np.array([getattr(one, name) for one in strategies], dtype=np.int64)[:, None]

        self.job, self.windows = job, windows
        every = [1 if lane.strategy.every_iteration else lane.every for lane in lanes]
        self.every = np.array(every, dtype=np.int64)[:, None]
        self.stall_us, self.safe_us = column("stall_us"), column("safe_us")
        self.durable_us, self.lead_us = column("durable_us"), column("lead_us")
        self.near_us, self.store_us = column("restore_near_us"), column("restore_store_us")
        self.places, self.stager = column("in_flight_max"), column("stager") > 0
        self.shape = (len(lanes), len(windows.first_count))
        _check_span(self, job, windows)

        self.step = self._zeros()  # the step at the launch, or to launch from
        self.redone = self._zeros()
        self.interruptions = self._zeros()
        self.training_us = self._zeros()
        self.finished_us = self._zeros() - 1
        self.floor = self._zeros()  # the newest durable step
        self.newest_us = self._zeros()  # when `step` becomes durable, if newer than the floor
        self.near = np.zeros(self.shape, dtype=np.bool_)  # the stager holds a staged checkpoint
        self.iteration_us = self._zeros() + job.iteration_us
        self.start_us = self._zeros() + _NEVER_US
        self._launch(np.ones(self.shape, dtype=np.bool_), np.int64(0), windows.first_count, first=True)

    def event(self, number: int) -> None:
        """Apply event `number` of each window."""
        windows = self.windows
        time = windows.time_us[number]
        stager_lost = (windows.stager_lost[number] > 0) & self.stager
        lost = (windows.lost[number] > 0) | stager_lost
        launched = self.start_us < _NEVER_US
        if lost.any():
            self._end(lost & launched, stager_lost, time)
        waiting = self.start_us >= _NEVER_US
        if waiting.any():
            self._launch(waiting, time, windows.count[number])

    def close(self) -> None:
        """End the windows: count the work of each running job, without an interruption."""
        end = np.int64(self.windows.length_us)
        trained = np.maximum(end - self.start_us, 0)
        done = np.where(self.start_us <= end, self._timeline().iterations(trained), 0)
        self._finish(done)
        self.training_us += trained
        self.step = self.step + done

    def all_finished(self) -> bool:
        return self.job.target is not None and bool((self.finished_us >= 0).all())

    def _end(self, ended: Booleans, stager_lost: Booleans, time: Integers) -> None:
        """Apply losses at `time` to the jobs in `ended` and the stagers in `stager_lost`."""
        timeline = self._timeline()
        trained = time - self.start_us
        training = ended & (trained >= 0)
        trained = np.where(training, trained, 0)
        done = timeline.iterations(trained)
        self._finish(np.where(training, done, 0))
        kept, begun_us = self._kept(timeline, trained, training, self.safe_us)
        in_store, _ = self._kept(timeline, trained, training, self.durable_us)

        # Checkpoints in flight from an earlier launch are in the store by now, or superseded.
        self.floor = np.where(ended & (self.newest_us <= time), self.step, self.floor)
        self.floor = np.where(in_store > 0, self.step + in_store, self.floor)
        at = self.step + done
        new = kept > 0
        self.step = np.where(new, self.step + kept, self.step)
        self.newest_us = np.where(new, self.start_us + begun_us + self.durable_us, self.newest_us)
        self.near = self.near | new
        self.redone += np.where(ended, at - self.step, 0)
        self.interruptions += ended
        self.training_us += trained
        self.start_us = np.where(ended, _NEVER_US, self.start_us)

        if stager_lost.any():
            self.floor = np.where(stager_lost & (self.newest_us <= time), self.step, self.floor)
            self.redone += np.where(stager_lost, self.step - self.floor, 0)
            self.step = np.where(stager_lost, self.floor, self.step)
            self.near = self.near & ~stager_lost

    def _kept(
        self, timeline: _Timeline, trained: Integers, training: Booleans, takes_us: Integers
    ) -> tuple[Integers, Integers]:
        """Return iterations (0: none) and begin of the newest checkpoint that began at least `takes_us` ago."""
        saves = np.where(training, timeline.saves_begun(trained - takes_us), 0)
        kept = saves * self.every
        begun_us = timeline.save_begin(saves)
        if not self.lead_us.any():
            return kept, begun_us
        noticed = np.maximum(trained - self.lead_us, 0)
        iteration = timeline.iterations(np.maximum(noticed - 1, 0)) + 1
        begin = timeline.save_after(iteration)
        better = training & (self.lead_us > 0) & (begin + takes_us <= trained) & (iteration > kept)
        return np.where(better, iteration, kept), np.where(better, begin, begun_us)

    def _launch(
        self, which: Booleans, time: Integers | np.int64, count: Integers, *, first: bool = False
    ) -> None:
        """Launch the lanes of `which` that have enough machines."""
        machines = np.minimum(count, self.job.nodes)
        ready = which & (machines >= self.job.nodes_min)
        restore = np.zeros_like(self.start_us) if first else np.where(self.near, self.near_us, self.store_us)
        self.start_us = np.where(ready, time + self.job.restart_us + restore, self.start_us)
        slower = -(-self.job.iteration_us * self.job.nodes // np.maximum(machines, 1))
        self.iteration_us = np.where(ready, slower, self.iteration_us)

    def _finish(self, done: Integers) -> None:
        """Record when the target was reached, for lanes that have done `done` iterations since their launch."""
        if self.job.target is None:
            return
        missing = self.job.target - self.step
        reached = (self.finished_us < 0) & (done > 0) & (missing >= 1) & (done >= missing)
        if reached.any():
            when = self.start_us + self._timeline().iteration_end(np.maximum(missing, 1))
            self.finished_us = np.where(reached, when, self.finished_us)

    def _timeline(self) -> _Timeline:
        return _Timeline(self.every, self.iteration_us, self.stall_us, self.durable_us, self.places)

    def _zeros(self) -> Integers:
        return np.zeros(self.shape, dtype=np.int64)


def _check_span(run: _Replay, job: TrainingJob, windows: TraceWindows) -> None:
    """Raise `ConfigError` for times whose products do not fit in 64 bits."""
    cycle = int(run.every.max()) * job.iteration_us * job.nodes + int(run.stall_us.max())
    spans = {
        "the longest interval on one machine": cycle * int(run.places.max()),
        "the longest time to durable": int(run.durable_us.max()),
        "the window": windows.length_us,
        "restart and restore": job.restart_us + int(np.maximum(run.store_us, run.near_us).max()),
    }
    for what, span in spans.items():
        if span > _SPAN_MAX_US:
            raise ConfigError(f"{what}: expected at most 35 years, got {span / 3.15576e13:.3g}")


class _Timeline:
    """Stretches of undisturbed training in closed form, one for each lane; times count from the start of each.
    `places`: how many checkpoints may be in flight (N).

    iterations 1…k   save 1  stall  iterations k+1…2k   save 2           save j+1 waits while all N places are taken,
    ├──────────────►│b1────────────├──────────────────►│b2─────►         each for `durable` after its save began

    With a = k × iteration + stall, saves come in groups of N, a apart, and groups come max(N × a, durable) apart. This
    is the rule "begin when k iterations are done and a place is free", written without a loop.
    """

    def __init__(
        self,
        every: Integers,
        iteration_us: Integers,
        stall_us: Integers,
        durable_us: Integers,
        places: Integers,
    ) -> None:
        self._every, self._iteration, self._stall, self._durable = every, iteration_us, stall_us, durable_us
        self._places = places
        self._work: Integers = every * iteration_us
        self._apart: Integers = self._work + stall_us
        self._group: Integers = np.maximum(places * self._apart, durable_us)

    def save_begin(self, number: Integers) -> Integers:
        """Return when save `number` begins, counted from 1; other numbers give no meaningful result."""
        groups = (number - 1) // self._places
        within = number - 1 - groups * self._places
        begin: Integers = self._work + groups * self._group + within * self._apart
        return begin

    def saves_begun(self, time: Integers) -> Integers:
        """Return how many saves have begun by `time`."""
        since = time - self._work
        groups = since // self._group
        within = np.minimum((since - groups * self._group) // self._apart, self._places - 1)
        begun: Integers = np.where(since < 0, 0, groups * self._places + within + 1)
        return begun

    def iterations(self, time: Integers) -> Integers:
        """Return how many iterations have ended by `time`; 0 before the start."""
        saves = self.saves_begun(time)
        after = time - np.where(saves > 0, self.save_begin(saves) + self._stall, 0)
        more = np.minimum(np.maximum(after // self._iteration, 0), self._every)
        iterations: Integers = saves * self._every + more
        return iterations

    def iteration_end(self, iteration: Integers) -> Integers:
        """Return when `iteration`, counted from 1, ends."""
        saves = (iteration - 1) // self._every
        begin = np.where(saves > 0, self.save_begin(saves) + self._stall, 0)
        end: Integers = begin + (iteration - saves * self._every) * self._iteration
        return end

    def save_after(self, iteration: Integers) -> Integers:
        """Return when a save after `iteration`, counted from 1, can begin: fewer than N must be in flight."""
        oldest = (iteration - 1) // self._every + 1 - self._places
        free = np.where(oldest > 0, self.save_begin(oldest) + self._durable, 0)
        after: Integers = np.maximum(self.iteration_end(iteration), free)
        return after
