"""The sections about time and bytes: how long checkpoints took, what the ring may have held, and rates."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.command.output import size
from holdfast.telemetry.rows import CheckpointRow
from operator_side.report.facts import RunFacts, ring_bytes, spread_of
from operator_side.report.markup import Html, brief, keys, rate, section, table, tag, thin
from operator_side.report.pictures import Series, bins, histogram, series, thinned

_DOTS_MAX = 300
_BINS = 160
_SECONDS_MIN = 1e-6  # in less nothing was copied


def times(facts: RunFacts) -> Html | None:
    """How long checkpoints took: the stall of training, to staged, to durable."""
    kinds = (
        ("stall of training (slowest rank)", "cst", "stall", [row.stall_seconds for row in facts.rows]),
        ("save() to staged", "pgt1", "start", [row.pgt1_seconds for row in facts.rows]),
        ("save() to durable", "pgt2", "work", [row.pgt2_seconds for row in facts.rows]),
    )
    rows, pictures = [], []
    for words, name, class_, values in kinds:
        known = [value for value in values if value is not None]
        spread = spread_of(known)
        if spread is None:
            continue
        figures = (spread.least, spread.median, spread.p90, spread.p99, spread.greatest)
        rows.append((words, f"{spread.count:,}", *(brief(value) for value in figures)))
        about = f"How many of {spread.count} checkpoints took how long: {brief(figures[0])} to {brief(figures[-1])}."
        pictures += [tag("h3", words), histogram(f"{name}-picture", words, about, known, class_)]
    if not rows:
        return None
    columns = ("what", "checkpoints", "least", "median", "90 %", "99 %", "greatest")
    return section(
        "times",
        "How long checkpoints took",
        table("Seconds, over all checkpoints for which they are known", columns, rows, numbers=columns[1:]),
        *pictures,
    )


def ring(facts: RunFacts) -> Html | None:
    """The most that the ring may have held, and rates, over time."""
    if facts.begin_unix is None or facts.end_unix is None:
        return None
    levels = ring_bytes(facts.rows, facts.end_unix)
    if not levels:
        return None
    begin, end = facts.begin_unix, facts.end_unix
    held = bins(levels, begin, end, _BINS)
    to_ring = list(_rates(facts.rows, "pgt1_seconds", "staged_at_unix"))
    to_store = list(_rates(facts.rows, "pgt2_seconds", "durable_at_unix"))
    shown = [thinned(to_ring, _DOTS_MAX), thinned(to_store, _DOTS_MAX)]
    rows = [("bytes between save() and durable", size(int(max(nbytes for _, nbytes in levels))), "-", "-")]
    for words, found in (("rate from save() to staged", to_ring), ("rate from save() to durable", to_store)):
        spread = spread_of(value for _, value in found)
        if spread is not None:
            rows.append((words, rate(spread.greatest), rate(spread.median), rate(spread.least)))
    return section(
        "ring",
        "Ring and rates",
        series(
            "ring-picture",
            "Bytes between save() and durable",
            "At most so much was in the ring at a time; the table below has the greatest.",
            [Series("bytes", "start", held, as_columns=True)],
            begin,
            end,
            lambda value: size(int(value)),
        ),
        series(
            "rate-picture",
            "Rates of checkpoints",
            "Bytes of each checkpoint by the time from save() to staged, and to durable.",
            [Series("to staged", "start", shown[0]), Series("to durable", "work", shown[1])],
            begin,
            end,
            rate,
        ),
        keys(("start", "to staged"), ("work", "to durable")),
        thin(shown[0], to_ring, "dot", "evenly chosen ones")
        or thin(shown[1], to_store, "dot", "evenly chosen ones"),
        table(
            "Ring and rates",
            ("what", "greatest", "median", "least"),
            rows,
            numbers=("greatest", "median", "least"),
        ),
        tag(
            "p",
            "How full the ring was, and how large it is, is not in the logs: this is the most that it can have held. "
            "Rates are means over the whole way, waits included.",
            class_="faint",
        ),
    )


def _rates(rows: Iterable[CheckpointRow], seconds: str, at: str) -> Iterable[tuple[float, float]]:
    for row in rows:
        took, when = getattr(row, seconds), getattr(row, at)
        if took is not None and took >= _SECONDS_MIN and when is not None and row.image_bytes:
            yield when, row.image_bytes / took
