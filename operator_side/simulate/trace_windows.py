"""Events for the replay, by position; one column for each window of a trace.

Many windows of one trace, begun at seeded offsets, give the spread of a figure. Windows do not wrap around, so no loss
is invented. Short columns are padded with events at the window's end at which nothing happens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import ConfigError
from operator_side.simulate.traces import Integers, Trace

_EVENTS_MAX = 1_000_000  # in a window; training could not progress with more


@dataclass(frozen=True)
class Column:
    """One window; its arrays have one value per event."""

    first_count: int
    time_us: Integers
    lost: Integers  # machines
    count: Integers  # machines left
    stager_lost: Integers  # 0 or 1

    def with_stager_losses(self, times_us: Integers) -> Column:
        """Return the same window with losses of the stager's node at `times_us`; at equal times these come last."""
        if not len(times_us):
            return self
        counts = np.concatenate(([self.first_count], self.count))
        held = counts[np.searchsorted(self.time_us, times_us, side="right")]
        times = np.concatenate((self.time_us, times_us))
        order = np.argsort(times, kind="stable")
        none = np.zeros(len(times_us), dtype=np.int64)
        return Column(
            self.first_count,
            times[order],
            np.concatenate((self.lost, none))[order],
            np.concatenate((self.count, held))[order],
            np.concatenate((self.stager_lost, none + 1))[order],
        )


@dataclass(frozen=True)
class TraceWindows:
    """Windows of one length side by side: arrays are (event, window), `first_count` is (window)."""

    length_us: int
    first_count: Integers
    time_us: Integers
    lost: Integers
    count: Integers
    stager_lost: Integers

    def node_microseconds(self, nodes: int) -> Integers:
        """Return machines × time of each window, with at most `nodes` machines: the time that is paid for."""
        times = np.concatenate(
            (np.zeros((1, len(self.first_count)), dtype=np.int64), self.time_us), axis=0
        ).clip(max=self.length_us)
        until = np.concatenate((times[1:], np.full((1, len(self.first_count)), self.length_us)), axis=0)
        counts = np.concatenate((self.first_count[None, :], self.count), axis=0).clip(max=nodes)
        held: Integers = ((until - times) * counts).sum(axis=0)
        return held


def stack(columns: list[Column], length_us: int) -> TraceWindows:
    rows = max(len(column.time_us) for column in columns)

    def filled(values: Integers, filling: int) -> Integers:
        return np.concatenate((values, np.full(rows - len(values), filling, dtype=np.int64)))

    def side_by_side(name: str, filling: int = 0) -> Integers:
        return np.stack([filled(getattr(column, name), filling) for column in columns], axis=1)

    last = [int(column.count[-1]) if len(column.count) else column.first_count for column in columns]
    counts = [filled(column.count, count) for column, count in zip(columns, last, strict=True)]
    return TraceWindows(
        length_us,
        np.array([column.first_count for column in columns], dtype=np.int64),
        side_by_side("time_us", length_us),
        side_by_side("lost"),
        np.stack(counts, axis=1),
        side_by_side("stager_lost"),
    )


def cut_windows(
    trace: Trace, *, length_us: int, offsets: int, rng: np.random.Generator, stager_mtbf_us: int | None = None
) -> TraceWindows:
    """Cut windows from a trace at random offsets. Raises `ConfigError`: the trace is shorter than a window."""
    if not 0 < length_us <= trace.end_us:
        raise ConfigError(
            f"{trace.name}: expected a window of at most {trace.end_us / 3.6e9:.2f} h, which the trace has, "
            f"got {length_us / 3.6e9:.2f} h"
        )
    columns = []
    for begin in rng.integers(0, trace.end_us - length_us, size=offsets, endpoint=True).tolist():
        first = int(np.searchsorted(trace.time_us, begin, side="right"))
        last = int(np.searchsorted(trace.time_us, begin + length_us, side="right"))
        rows = slice(first, last)
        column = Column(
            int(trace.count[first - 1]),
            trace.time_us[rows] - begin,
            trace.lost[rows],
            trace.count[rows],
            np.zeros(last - first, dtype=np.int64),
        )
        columns.append(column.with_stager_losses(_draw_times(rng, stager_mtbf_us, length_us)))
    return stack(columns, length_us)


def poisson_windows(
    *,
    nodes: int,
    mtbf_us: int,
    provision_us: int,
    length_us: int,
    samples: int,
    rng: np.random.Generator,
    stager_mtbf_us: int | None = None,
) -> TraceWindows:
    """Make random traces: a machine is lost every `mtbf_us` on average, and replaced after `provision_us`."""
    columns = []
    for _ in range(samples):
        losses = _draw_times(rng, mtbf_us, length_us)
        gains = losses + provision_us
        gains = gains[gains <= length_us]
        times = np.concatenate((losses, gains))
        change = np.concatenate((np.full(len(losses), -1), np.ones(len(gains), dtype=np.int64)))
        order = np.argsort(times, kind="stable")
        # All nodes may be lost at the same time: the next loss then takes no machine.
        counts = np.maximum(0, nodes + np.cumsum(change[order]))
        # Machines that arrive at the moment of a loss count for its relaunch.
        counts = counts[np.searchsorted(times[order], times[order], side="right") - 1]
        column = Column(
            nodes, times[order], (change[order] < 0).astype(np.int64), counts, np.zeros(len(times), np.int64)
        )
        columns.append(column.with_stager_losses(_draw_times(rng, stager_mtbf_us, length_us)))
    return stack(columns, length_us)


def _draw_times(rng: np.random.Generator, mtbf_us: int | None, length_us: int) -> Integers:
    """Draw times of a Poisson process within `length_us`; no times if there is no mean."""
    if mtbf_us is None:
        return np.zeros(0, dtype=np.int64)
    mean = length_us / mtbf_us
    if mean > _EVENTS_MAX:
        raise ConfigError(
            f"losses {mtbf_us / 3.6e9:g} h apart for {length_us / 3.6e9:g} h: expected at most {_EVENTS_MAX} of them, "
            f"got {mean:.3g}; take a longer mean or fewer iterations"
        )
    number = int(rng.poisson(mean))
    return np.sort(rng.integers(1, length_us, size=number, endpoint=True, dtype=np.int64))
