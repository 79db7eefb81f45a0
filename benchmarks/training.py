"""The training loop around a peer: times single checkpoints, or a run that saves every K iterations.

    iteration:  compute ─► ranks meet ─► before_update() ─► optimizer step ─► save(), every K iterations

Computation is a timed wait (`device`), as if a device computed forward, backward and update while the host cores are
free; or real forward, backward and update on the CPU (`cpu`); or a busy loop of plain Python (`python`), whose jitter
shows which thread holds the interpreter's lock. The ranks meet in an all-reduce of one number, so one rank's stall
delays all, as in data-parallel training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers import Peer
from benchmarks.workload import Workload

__all__ = ["Run", "Sample", "measure", "python_work", "train"]

_POLL_SECONDS = 0.001
_DONE_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Sample:
    """One checkpoint as one rank saw it; moments are `time.monotonic()`, one clock for the whole machine.

    Attributes:
        start, end: Start of `save()`; durable.
        stall_seconds: Time in `save()`, before updates, and in them.
        first_update_seconds: The part before and in the first update, which may wait for the copy.
        stall_cpu_seconds: CPU time of the training thread in the stall: in the rest it slept, or waited for a core.
    """

    start: float
    end: float
    stall_seconds: float
    first_update_seconds: float = 0.0
    stall_cpu_seconds: float = 0.0
    marks: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """A training run as one rank saw it."""

    start: float
    end: float
    durable: float
    iteration_seconds: list[float]
    saves: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(peer: Peer, workload: Workload, step: int, compute_seconds: float) -> Sample:
    """Save `step` and continue to train, with timed waits as computation, until the save is done.

    Raises:
        TimeoutError: The save was not done within five minutes.
    """
    start, begun = time.monotonic(), time.thread_time()
    peer.save(step)
    stall, cpu = time.monotonic() - start, time.thread_time() - begun
    end = first_update = 0.0
    while not end:
        computed = time.monotonic() + compute_seconds
        while (now := time.monotonic()) < computed:
            if not end and peer.done():
                end = now
            time.sleep(_POLL_SECONDS)
        waiting, begun = time.monotonic(), time.thread_time()
        peer.before_update()
        workload.update()
        waited = time.monotonic() - waiting
        cpu += time.thread_time() - begun
        stall, first_update = stall + waited, first_update or waited
        if not end and peer.done():
            end = time.monotonic()
        if now - start > _DONE_SECONDS_MAX:
            raise TimeoutError(f"step {step} was not durable after {_DONE_SECONDS_MAX:.0f} s")
    return Sample(start, end, stall, first_update, cpu, peer.marks())


def train(
    peer: Peer | None,
    workload: Workload,
    *,
    first_step: int,
    iterations: int,
    every: int,
    compute: Callable[[], None],
    meet: Callable[[], None],
) -> Run:
    """Train, saving after the first iteration and every `every` iterations from then on.

    This way as many iterations follow the last checkpoint as any other, and a run of whole intervals carries each
    checkpoint's full cost.

    Args:
        peer: The peer that saves; None: nothing is saved.
        workload: The model and optimizer to train.
        first_step: Number of the first iteration.
        iterations: Number of iterations, for a fair comparison a multiple of `every`.
        every: K.
        compute: One iteration's computation.
        meet: Waits for all ranks.

    Raises:
        TimeoutError: The last checkpoint was not durable within five minutes.
    """
    meet()
    seconds: list[float] = []
    saves = 0
    start = before = time.monotonic()
    for iteration in range(iterations):
        compute()
        meet()
        if peer is not None:
            peer.before_update()
        workload.update()
        if peer is not None and iteration % every == 0:
            peer.save(first_step + iteration)
            saves += 1
        now = time.monotonic()
        seconds.append(now - before)
        before = now
    end = before
    while peer is not None and not peer.done():
        if time.monotonic() - end > _DONE_SECONDS_MAX:
            raise TimeoutError(f"the last checkpoint was not durable after {_DONE_SECONDS_MAX:.0f} s")
        time.sleep(_POLL_SECONDS)
    if peer is not None:
        peer.before_update()
    return Run(start, end, time.monotonic() if saves else end, seconds, saves)


def python_work(operations: int) -> int:
    """Run `operations` rounds of plain Python, which hold the interpreter's lock."""
    total = 0
    for number in range(operations):
        total = (total * 31 + number) & 0xFFFF
    return total
