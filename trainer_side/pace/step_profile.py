"""Measurements of a training and its checkpoints: the profile of CheckFreq (FAST 2021, section 4.2).

    begin_iteration, … ─► iterations without a save ─► median ──────────────┐
                          iterations with one ─► time they add ─────────────┤
    record_copy, record_staged, record_durable ─► medians of the last ──────┴─► Cost, table

The first checkpoint does not count: during it the ranks agree on a layout, memory is allocated, and the flusher starts.

Pure: times come from the clock that is passed in. No checkpoint is taken for a measurement. Medians ignore a single
iteration in which a page was swapped in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from holdfast.policy.cost import Cost

_ITERATIONS = 64
_ITERATIONS_MIN = 5
_CLOCK_SECONDS = 1e-6  # of an iteration that the clock measures as zero
_CHECKPOINTS = 3  # two slow ones of three are no accident


class StepProfile:
    """The measurements of this rank, used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The whole checkpoint's, and those of this rank's part; 0: not known yet.
        self.image_bytes = self.slice_bytes = 0
        self.in_flight_max = 1  # checkpoints that may be in flight at once
        self._begun_at: float | None = None
        self._saved = False
        self._first_step: int | None = None
        self._first_counted = False  # the first save is in the iteration that has begun
        self._iterations: deque[float] = deque(maxlen=_ITERATIONS)
        self._added: deque[float] = deque(maxlen=_CHECKPOINTS)
        self._updates: deque[float] = deque(maxlen=_ITERATIONS)
        self._stalls: deque[float] = deque(maxlen=_CHECKPOINTS)
        self._copies: deque[float] = deque(maxlen=_CHECKPOINTS)
        self._staged: deque[float] = deque(maxlen=_CHECKPOINTS)
        self._durable: deque[float] = deque(maxlen=_CHECKPOINTS)
        self._in_flight: dict[int, float] = {}  # step → when its save ended
        self._began_at: dict[int, float] = {}  # step → begin of its iteration
        self._last_durable_at = -math.inf  # when the last one became durable
        # The newest step's extra iteration time, and its wait for room. None: not known yet.
        self._newest = -1
        self._extra_seconds: float | None = None
        self._wait_seconds: float | None = None

    def begin_iteration(self) -> None:
        """Note that an iteration has ended, and the next one begins."""
        now = self._clock()
        if self._begun_at is not None:
            elapsed = now - self._begun_at
            if not self._saved:
                self._iterations.append(elapsed)
            elif self._iterations and not self._first_counted:
                self._extra_seconds = elapsed - median(self._iterations)
                self._record_added()
        self._begun_at, self._saved, self._first_counted = now, False, False

    def record_save(self, step: int) -> None:
        """Note a save of `step` in the iteration that has just begun."""
        self._saved = True
        self._extra_seconds = self._wait_seconds = None
        if self._first_step is None:
            self._first_step, self._first_counted = step, True
        self._newest = step
        if self._begun_at is not None:
            self._began_at[step] = self._begun_at
        self._in_flight[step] = self._clock()

    def record_decline(self) -> None:
        """Note that a save was due in the iteration that has just begun, and was declined."""
        self._saved, self._extra_seconds, self._wait_seconds = True, None, 0.0

    def record_update(self, seconds: float) -> None:
        """Note how long the optimizers' steps of an iteration took."""
        self._updates.append(seconds)

    def record_copy(
        self, step: int, nbytes: int, seconds: float, stall_seconds: float, wait_seconds: float = 0.0
    ) -> None:
        """Note the copied bytes of this rank for the checkpoint of `step`, and how long it stalled training (CST), less
        `wait_seconds` for room: at a longer interval there is room.
        """
        if step != self._first_step:
            self._stalls.append(stall_seconds - wait_seconds)
            if step == self._newest:
                self._wait_seconds = wait_seconds
                self._record_added()
            if nbytes > 0 and seconds > 0:
                self._copies.append(nbytes / seconds)

    def record_staged(self, step: int, seconds: float) -> None:
        """Note the time from the save of `step` until it was staged (PGT-1)."""
        if step != self._first_step:
            self._staged.append(seconds)

    def record_durable(self, step: int, seconds: float) -> None:
        """Note the time from the save of `step` until it was durable (PGT-2).

        With one in flight at a time, count only from when the previous one was durable: a longer interval has no queue.
        """
        self._in_flight.pop(step, None)
        began_at = self._began_at.pop(step, None)
        if self.in_flight_max == 1 and began_at is not None and began_at + seconds > self._last_durable_at:
            stored_at = began_at + seconds
            seconds = min(seconds, stored_at - self._last_durable_at)
            self._last_durable_at = min(stored_at, self._clock())
        if step != self._first_step:
            self._durable.append(seconds)

    def record_end(self, step: int) -> None:
        """Note that the checkpoint of `step` was declined, or has failed."""
        self._in_flight.pop(step, None)
        self._began_at.pop(step, None)

    def _record_added(self) -> None:
        if self._extra_seconds is not None and self._wait_seconds is not None:
            self._added.append(max(0.0, self._extra_seconds - self._wait_seconds))
            self._extra_seconds = self._wait_seconds = None

    @property
    def has_in_flight(self) -> bool:
        """Whether a checkpoint is in flight to the store."""
        return bool(self._in_flight)

    @property
    def has_cost(self) -> bool:
        """Whether a cost is known: of some iterations, and of a checkpoint after the first one."""
        enough = len(self._iterations) >= _ITERATIONS_MIN
        return enough and bool(self._stalls and self._staged and self._durable)

    def cost(self) -> Cost:
        """Return the current cost of checkpoints, if it `has_cost`. One in flight counts with the time that it has
        taken so far.
        """
        stall = max(_median_or_zero(self._stalls), _median_or_zero(self._added))
        staged, durable = median(self._staged), median(self._durable)
        oldest = min(self._in_flight.values(), default=None)
        if oldest is not None:
            durable = max(durable, self._clock() - max(oldest, self._last_durable_at))
        iteration = max(_CLOCK_SECONDS, median(self._iterations))
        return Cost(iteration, stall, min(staged, durable), durable, self.in_flight_max)

    def fields(self, host_peak_bytes: int) -> Mapping[str, Any]:
        return {
            "iterations": len(self._iterations),
            "iteration_seconds": _median_or_zero(self._iterations),
            "update_seconds": _median_or_zero(self._updates) if self._updates else None,
            "stall_seconds": max(_median_or_zero(self._stalls), _median_or_zero(self._added)),
            "copy_bytes_per_second": _median_or_zero(self._copies) if self._copies else None,
            "staged_seconds": _median_or_zero(self._staged),
            "durable_seconds": _median_or_zero(self._durable),
            "image_bytes": self.image_bytes,
            "slice_bytes": self.slice_bytes,
            "host_peak_bytes": host_peak_bytes,
        }

    def table(self, host_peak_bytes: int) -> str:
        """Return the profile as text, one line for each figure."""
        values = self.fields(host_peak_bytes)
        update, copy = values["update_seconds"], values["copy_bytes_per_second"]
        rows = (
            ("iteration", f"{1e3 * values['iteration_seconds']:.1f} ms", f"median of {values['iterations']}"),
            ("update", "-" if update is None else f"{1e3 * update:.1f} ms", "optimizer.step(), of it"),
            ("stall", f"{1e3 * values['stall_seconds']:.1f} ms", "that a checkpoint adds (CST)"),
            (
                "copy",
                "-" if copy is None else f"{copy / 1e9:.2f} GB/s",
                f"{_mib(self.slice_bytes)} of this rank",
            ),
            ("staged", f"{values['staged_seconds']:.2f} s", "safe from this machine (PGT-1)"),
            ("durable", f"{values['durable_seconds']:.2f} s", "in the store (PGT-2)"),
            ("image", _mib(self.image_bytes), "the whole checkpoint"),
            ("host memory", _mib(host_peak_bytes), "most that this process had"),
        )
        return "\n".join(f"  {name:<12}{value:>14}   {what}" for name, value, what in rows)


def _median_or_zero(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else 0.0


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
