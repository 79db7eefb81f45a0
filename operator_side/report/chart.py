"""The report's chart: attempts and checkpoint phases as bars on one time axis, in pixels of an SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from holdfast.telemetry.rows import CheckpointRow, NotTaken
from operator_side.report.attempts import ReportedAttempt
from operator_side.report.words import brief

WIDTH, LEFT, RIGHT = 960, 120, 16
_TICKS = 5
_BAR_WIDTH_MIN = 1.5
_DAY_SECONDS = 86400.0
_Bar = tuple[float, float, str, str]  # begin, end, kind, title


class Box(NamedTuple):
    """A bar with its tooltip; `kind` is its colour in page.html."""

    x: float
    width: float
    kind: str
    title: str


class Chart(NamedTuple):
    """ConcurrencyLimit by name, from top to bottom, and the ticks of the axis: where, and the time there."""

    lanes: dict[str, list[Box]]
    ticks: list[tuple[float, str]]


def timeline_chart(
    attempts: Sequence[ReportedAttempt],
    rows: Sequence[CheckpointRow],
    missed: Sequence[NotTaken],
    begin: float,
    end: float,
) -> Chart:
    """Lay out one lane of attempts, one for each phase of checkpoints, and one of skipped and bad checkpoints."""
    span = max(end - begin, 1e-9)

    def x(at: float) -> float:
        return LEFT + (min(max(at, begin), end) - begin) / span * (WIDTH - LEFT - RIGHT)

    def box(bar: _Bar) -> Box:
        width = max(_BAR_WIDTH_MIN, x(bar[1]) - x(bar[0]))
        return Box(round(min(x(bar[0]), WIDTH - RIGHT - width), 1), round(width, 1), bar[2], bar[3])

    bad = [(row.read_at_unix or row.durable_at_unix, row) for row in rows if row.state == "bad"]
    lanes: dict[str, list[_Bar]] = {
        "job": [bar for one in attempts for bar in _of_attempt(one)],
        "save → staged": list(_phases(rows, "saved_at_unix", "staged_at_unix", "start")),
        "→ durable": list(_phases(rows, "staged_at_unix", "durable_at_unix", "work")),
        "→ read back": list(_phases(rows, "durable_at_unix", "read_at_unix", "stall")),
        "skipped, bad": [
            (one.at_unix, one.at_unix, "back", f"step {one.step} {one.kind}: {one.cause}") for one in missed
        ]
        + [(at, at, "back", f"step {row.step} is bad") for at, row in bad if at is not None],
    }
    form = "%m-%d %H:%M" if span > _DAY_SECONDS else "%H:%M:%S"
    times = [begin + (end - begin) * tick / _TICKS for tick in range(_TICKS)] + [end]
    ticks = [(round(x(at), 1), datetime.fromtimestamp(at, UTC).strftime(form)) for at in times]
    return Chart({name: [box(bar) for bar in bars] for name, bars in lanes.items()}, ticks)


def _of_attempt(one: ReportedAttempt) -> Iterable[_Bar]:
    name, began, until = f"attempt {one.number}", one.began_at_unix, one.stopped_at_unix
    if one.training_at_unix is None:
        yield began, until, "start", f"{name}: started, never trained"
        return
    yield began, one.training_at_unix, "start", f"{name}: starting, {brief(one.training_at_unix - began)}"
    yield one.training_at_unix, until, "work", f"{name}: training, {brief(until - one.training_at_unix)}"
    if one.was_lost:
        yield until, one.ended_at_unix or until, "back", f"{name} {one.cause}: {one.message}"


def _phases(rows: Iterable[CheckpointRow], begin: str, end: str, kind: str) -> Iterable[_Bar]:
    for row in rows:
        since, until = getattr(row, begin), getattr(row, end)
        if since is not None and until is not None:
            what = end.removesuffix("_at_unix").replace("read", "read back")
            took = brief(max(0.0, until - since))
            yield since, until, kind, f"step {row.step} (attempt {row.attempt}) {what} after {took}"
