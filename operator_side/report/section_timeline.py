"""The section with the whole run on one axis: attempts, and each checkpoint by phase."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.telemetry.rows import CheckpointRow
from operator_side.report.attempts import ReportedAttempt
from operator_side.report.facts import RunFacts
from operator_side.report.markup import Html, brief, keys, plural, said, section, stands_out, tag, thin
from operator_side.report.pictures import Bar, BarRow, lanes, thinned

_BARS_MAX = 400  # checkpoints in the picture


def timeline(facts: RunFacts) -> Html | None:
    """The whole run on one axis: attempts, and each checkpoint by phase."""
    if facts.begin_unix is None or facts.end_unix is None:
        return None
    rows = [row for row in facts.rows if row.saved_at_unix is not None]
    shown = thinned(rows, _BARS_MAX, stands_out)
    missed = thinned(facts.checkpoints.not_taken, _BARS_MAX)
    found = [
        BarRow("job", [bar for one in thinned(facts.attempts, _BARS_MAX) for bar in _of_attempt(one)]),
        BarRow("save → staged", list(_phases(shown, "saved_at_unix", "staged_at_unix", "start", "staged"))),
        BarRow("→ durable", list(_phases(shown, "staged_at_unix", "durable_at_unix", "work", "durable"))),
        BarRow("→ read back", list(_phases(shown, "durable_at_unix", "read_at_unix", "stall", "read back"))),
        BarRow(
            "not taken, bad",
            [
                Bar(one.at_unix, one.at_unix, "back", f"step {one.step} {one.kind}: {one.cause}")
                for one in missed
            ]
            + [
                Bar(at, at, "back", f"step {row.step} is bad")
                for row in shown
                if row.state == "bad" and (at := row.read_at_unix or row.durable_at_unix) is not None
            ],
        ),
    ]
    count = f"{plural(len(facts.attempts), 'attempt')} and {plural(len(rows), 'checkpoint')}"
    about = f"{count} over time; the tables below tell the same."
    return section(
        "timeline",
        "Timeline",
        lanes("timeline-picture", "The run over time", about, found, facts.begin_unix, facts.end_unix),
        keys(
            ("start", "starting; save() to staged"),
            ("work", "training; staged to durable"),
            ("back", "lost, on its way back; not taken or bad"),
            ("stall", "durable to read back"),
        ),
        thin(
            shown,
            rows,
            "checkpoint",
            "the first, the last, bad and failed ones, and of the others evenly chosen ones",
        ),
        tag(
            "p",
            "Times are UTC. A bar that would be too narrow to see is drawn wider than it is.",
            class_="faint",
        ),
    )


def _of_attempt(one: ReportedAttempt) -> Iterable[Bar]:
    trained = one.training_at_unix
    until = one.stopped_at_unix
    if trained is None:
        yield Bar(one.began_at_unix, until, "start", f"attempt {one.number}: started, never trained")
        return
    yield Bar(
        one.began_at_unix,
        trained,
        "start",
        f"attempt {one.number}: starting, {brief(trained - one.began_at_unix)}",
    )
    yield Bar(trained, until, "work", f"attempt {one.number}: training, {brief(until - trained)}")
    if one.was_lost:
        ended = until if one.ended_at_unix is None else one.ended_at_unix
        yield Bar(until, ended, "back", said(f"attempt {one.number} {one.cause}: {one.message}"))


def _phases(rows: Iterable[CheckpointRow], begin: str, end: str, class_: str, what: str) -> Iterable[Bar]:
    for row in rows:
        since, until = getattr(row, begin), getattr(row, end)
        if since is not None and until is not None:
            title = f"step {row.step} (attempt {row.attempt}) {what} after {brief(max(0.0, until - since))}"
            yield Bar(since, until, class_, title)
