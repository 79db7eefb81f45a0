"""The rules of operator_side/simulate/replay.py again, in plain Python: one lane, iteration by iteration.

Slow, and written to be read beside the rules; shares no arithmetic with the replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from operator_side.simulate.replay import StrategyLane, TrainingJob
from operator_side.simulate.strategy import Strategy
from operator_side.simulate.trace_windows import Column


@dataclass
class Checkpoint:
    step: int
    safe_at: int
    durable_at: int


@dataclass
class Stretch:
    """A stretch of training, from `start` on."""

    start: int
    first_step: int
    iteration: int
    ends: list[int] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)  # start time, iterations done


@dataclass
class Seen:
    useful: int = 0
    redone: int = 0
    interruptions: int = 0
    training: int = 0
    finished: int = -1


def walk(job: TrainingJob, lane: StrategyLane, column: Column, length: int) -> Seen:
    """Return the expected result of the replay for this lane in this window."""
    strategy = lane.strategy
    every = 1 if strategy.every_iteration else lane.every
    seen = Seen()
    step, in_store = 0, 0
    pending: list[Checkpoint] = []
    near = False
    stretch: Stretch | None = None

    def launch(time: int, machines: int, restore: int) -> Stretch | None:
        machines = min(machines, job.nodes)
        if machines < job.nodes_min:
            return None
        iteration = (job.iteration_us * job.nodes + machines - 1) // machines
        return Stretch(time + job.restart_us + restore, step, iteration)

    def note_finish(running: Stretch) -> None:
        if job.target is not None and seen.finished < 0 and running.first_step < job.target:
            missing = job.target - running.first_step
            if len(running.ends) >= missing:
                seen.finished = running.ends[missing - 1]

    stretch = launch(0, column.first_count, 0)
    for time, lost, count, stager_lost in zip(
        column.time_us.tolist(),
        column.lost.tolist(),
        column.count.tolist(),
        column.stager_lost.tolist(),
        strict=True,
    ):
        stager_gone = bool(stager_lost) and strategy.stager
        if (lost or stager_gone) and stretch is not None:
            train(stretch, every, strategy, time)
            note_finish(stretch)
            made = [
                Checkpoint(stretch.first_step + done, begun + strategy.safe_us, begun + strategy.durable_us)
                for begun, done in stretch.saves
            ]
            made += emergency(stretch, strategy, time)
            position = stretch.first_step + len(stretch.ends)
            in_store = max([in_store, *(c.step for c in pending + made if c.durable_at <= time)])
            safe = [c for c in made if c.safe_at <= time]
            if safe:
                newest = max(safe, key=lambda c: c.step)
                pending, step, near = [newest], newest.step, True
            seen.redone += position - step
            seen.interruptions += 1
            seen.training += max(0, time - stretch.start)
            stretch = None
        if stager_gone:
            in_store = max([in_store, *(c.step for c in pending if c.durable_at <= time)])
            seen.redone += step - in_store
            step, pending, near = in_store, [], False
        if stretch is None:
            stretch = launch(time, count, strategy.restore_near_us if near else strategy.restore_store_us)
    if stretch is not None:
        train(stretch, every, strategy, length)
        note_finish(stretch)
        step += len(stretch.ends)
        seen.training += max(0, length - stretch.start)
    seen.useful = step
    return seen


def train(stretch: Stretch, every: int, strategy: Strategy, until: int) -> None:
    """Run iterations and saves until `until`, inclusive."""
    now, in_flight = stretch.start, list[int]()
    while True:
        now += stretch.iteration
        if now > until:
            return
        stretch.ends.append(now)
        if len(stretch.ends) % every == 0:
            now = when_free(now, in_flight, strategy.in_flight_max)
            if now > until:
                return
            stretch.saves.append((now, len(stretch.ends)))
            in_flight.append(now + strategy.durable_us)
            now += strategy.stall_us


def when_free(now: int, in_flight: list[int], places: int) -> int:
    while sum(end > now for end in in_flight) >= places:
        now = min(end for end in in_flight if end > now)
    return now


def emergency(stretch: Stretch, strategy: Strategy, time: int) -> list[Checkpoint]:
    """Return the emergency checkpoint after a notice, none for strategies without notices."""
    notice = max(time - strategy.lead_us, stretch.start)
    after = [number for number, end in enumerate(stretch.ends, 1) if end >= notice]
    if not strategy.lead_us or not after:
        return []
    done = after[0]
    earlier = [begun + strategy.durable_us for begun, before in stretch.saves if before < done]
    begun = when_free(stretch.ends[done - 1], earlier, strategy.in_flight_max)
    if begun + strategy.safe_us > time:
        return []
    return [Checkpoint(stretch.first_step + done, begun + strategy.safe_us, begun + strategy.durable_us)]
