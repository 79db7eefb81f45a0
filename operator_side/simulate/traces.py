"""Published traces of spot machines, read into one form.

    ,Time,GPUs                 count at intervals (PCcheck):      0,1652434464.406314,56
    date, time, count          the same, irregular (Bamboo, GCP): 2021-12-11, 11:11:30, 55
    ms,add or remove,node      each machine (Bamboo, AWS):        480000,add,node1

A count says how many machines are held, not which: it hides a loss and a gain between two rows. A malformed line is an
error, never skipped: a trace that is read wrongly gives plausible figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from operator_side.simulate.strategy import HOUR_US, microseconds

Integers = NDArray[np.int64]

_TRACE_BYTES_MAX = 256 << 20
_NODES_MAX = 1_000_000
_SECONDS_MAX = 1e10  # a little over 300 years, since 1970 or since the start
_COUNTS_HEAD = re.compile(r"\s*,\s*Time\s*,\s*GPUs\s*")
_COUNT_ROW = re.compile(r"\d+\s*,\s*[^,]+,\s*[^,]+")
_DATED_ROW = re.compile(r"\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d:\d\d\s*,\s*[^,]+")
_NODE_ROW = re.compile(r"[^,]+,\s*(?:add|remove)\s*,\s*[^,\s]+\s*")


@dataclass(frozen=True)
class Trace:
    """Number of machines over time; row 0 is the beginning."""

    name: str
    time_us: Integers  # time of each row since the first one, never decreasing
    count: Integers
    lost: Integers  # number of machines that were lost at that moment
    end_us: int

    @property
    def losses(self) -> int:
        """Number of moments at which machines were lost."""
        return int(np.count_nonzero(self.lost))

    @property
    def losses_per_hour(self) -> float:
        """Interruptions per hour of a job that uses every machine in the trace."""
        return self.losses * HOUR_US / self.end_us

    @property
    def count_max(self) -> int:
        return int(self.count.max())


def read_trace(path: Path) -> Trace:
    """Read a trace in any of the three formats. Raises `ConfigError`: unreadable or wrong; names file and line."""
    try:
        if path.stat().st_size > _TRACE_BYTES_MAX:
            raise ConfigError(
                f"{path}: expected a trace of at most {_TRACE_BYTES_MAX} bytes; use a part of it"
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; expected a text file with a trace") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = [_TraceRow(path, number, line) for number, line in lines]
    if not rows:
        raise ConfigError(f"{path}: expected a trace, got an empty file")
    return _trace(path, rows[0], list(_reader(rows)(rows)))


@dataclass(frozen=True, slots=True)
class _TraceRow:
    path: Path
    number: int
    text: str

    def error(self, expected: str) -> ConfigError:
        return ConfigError(f"{self.path}:{self.number}: expected {expected}, got {self.text[:80]!r}")

    def cells(self, pattern: re.Pattern[str], expected: str) -> list[str]:
        if not pattern.fullmatch(self.text):
            raise self.error(expected)
        return [cell.strip() for cell in self.text.split(",")]

    def count(self, cell: str) -> int:
        if not (cell.isascii() and cell.isdigit() and int(cell[:9]) <= _NODES_MAX and len(cell) < 9):
            raise self.error(f"a number of machines from 0 to {_NODES_MAX}")
        return int(cell)

    def seconds(self, cell: str, unit_seconds: float = 1.0) -> float:
        try:
            value = float(cell) * unit_seconds
        except ValueError:
            raise self.error("a time, a number") from None
        if not (math.isfinite(value) and 0 <= value <= _SECONDS_MAX):
            raise self.error(f"a time from 0 to {_SECONDS_MAX:g} s")
        return value


# Seconds, machines held from then on, machines lost then (None: the decrease of the count).
_Point = tuple[_TraceRow, float, int, int | None]


def _reader(rows: list[_TraceRow]) -> Callable[[list[_TraceRow]], Iterator[_Point]]:
    first = rows[0].text
    if _COUNTS_HEAD.fullmatch(first):
        return _counts
    if _DATED_ROW.fullmatch(first):
        return _dated
    if _NODE_ROW.fullmatch(first):
        return _nodes
    raise rows[0].error(
        "`,Time,GPUs`, `date, time, count` or `ms,add or remove,node`: the format is not known"
    )


def _counts(rows: list[_TraceRow]) -> Iterator[_Point]:
    for row in rows[1:]:
        _, time, count = row.cells(_COUNT_ROW, "number,seconds,count")
        yield row, row.seconds(time), row.count(count), None


def _dated(rows: list[_TraceRow]) -> Iterator[_Point]:
    for row in rows:
        date, time, count = row.cells(_DATED_ROW, "date, time, count")
        try:
            # Only differences matter, so the zone does not; a clock change would show as a row out of order.
            moment = datetime.fromisoformat(f"{date}T{time}+00:00")
        except ValueError:
            raise row.error("a date and a time that exist") from None
        yield row, moment.timestamp(), row.count(count), None


def _nodes(rows: list[_TraceRow]) -> Iterator[_Point]:
    held: set[str] = set()
    at_once: _Point | None = None
    for row in rows:
        time, what, node = row.cells(_NODE_ROW, "milliseconds,add or remove,node")
        seconds = row.seconds(time, 0.001)
        if (what == "add") == (node in held):
            raise row.error(
                "a machine that was not added before" if what == "add" else "a machine that is held"
            )
        held.symmetric_difference_update({node})
        if len(held) > _NODES_MAX:
            raise row.error(f"at most {_NODES_MAX} machines at once")
        lost = int(what == "remove")
        if at_once is not None and at_once[1] == seconds:
            at_once = (row, seconds, len(held), (at_once[3] or 0) + lost)
            continue
        if at_once is not None:
            yield at_once
        at_once = (row, seconds, len(held), lost)
    if at_once is not None:
        yield at_once


def _trace(path: Path, head: _TraceRow, points: list[_Point]) -> Trace:
    if len(points) < 2:
        raise head.error("at least two moments of a trace")
    begin_seconds = points[0][1]
    times, counts, losses = [0], [points[0][2]], [0]
    before = begin_seconds
    for row, seconds, count, lost in points[1:]:
        if seconds < before:
            raise row.error(
                f"rows in the order of time, and this one is {before - seconds:g} s earlier than the one before; "
                "sort the file, and see that rows of one moment do not contradict each other"
            )
        before = seconds
        lost_now = max(0, counts[-1] - count) if lost is None else lost
        if not lost_now and count == counts[-1] and row is not points[-1][0]:
            continue  # no change
        times.append(microseconds(seconds - begin_seconds))
        counts.append(count)
        losses.append(lost_now)
    if not times[-1]:
        raise points[-1][0].error("a trace that lasts longer than no time at all")
    time_us, count_held, lost_then = (np.array(values, dtype=np.int64) for values in (times, counts, losses))
    return Trace(path.name, time_us, count_held, lost_then, end_us=times[-1])
