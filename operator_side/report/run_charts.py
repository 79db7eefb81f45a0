"""The charts of a run, from its facts: attempts and phases over time, the use of the time, durations, losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.telemetry.rows import CheckpointRow, NotTaken
from operator_side.page.chart import Chart, Colour, Series, Span
from operator_side.page.words import brief, share
from operator_side.report.attempts import ReportedAttempt
from operator_side.report.goodput import Goodput

_LANES = ("job", "to staged", "to durable", "read back", "trouble")
_PHASES: tuple[tuple[str, str, str, Colour, str], ...] = (
    ("to staged", "saved_at_unix", "staged_at_unix", "staged", "save() to staged"),
    ("to durable", "staged_at_unix", "durable_at_unix", "durable", "staged to durable"),
    ("read back", "durable_at_unix", "read_at_unix", "verified", "durable to read back"),
)
_PART_COLOURS: dict[str, Colour] = {
    "new work": "training",
    "work done twice": "lost",
    "stalls for checkpoints": "stall",
    "getting back after losses": "back",
    "starting": "starting",
    "between runs": "idle",
}


def timeline_chart(
    attempts: Sequence[ReportedAttempt], rows: Sequence[CheckpointRow] = (), missed: Sequence[NotTaken] = ()
) -> Chart:
    """One lane of attempts, one for each phase of checkpoints, and one of skipped and bad checkpoints."""
    bad = [(row.read_at_unix or row.durable_at_unix, row) for row in rows if row.state == "bad"]
    lost = [Span("trouble", at, at, f"step {row.step} is bad") for at, row in bad if at is not None]
    series = [
        *_attempts(attempts, lost),
        *(
            Series(name, colour, list(_phase(rows, lane, since, until)))
            for lane, since, until, colour, name in _PHASES
        ),
        Series(
            "skipped",
            "declined",
            [
                Span("trouble", one.at_unix, one.at_unix, f"step {one.step} {one.kind}: {one.cause}")
                for one in missed
            ],
        ),
    ]
    used = {span.lane for one in series for span in one.spans}
    return Chart(
        "timeline",
        "Attempts and checkpoints over time; the tables have the figures.",
        "time",
        series,
        lanes=[lane for lane in _LANES if lane in used],
        x_title="time (UTC)",
    )


def _attempts(attempts: Iterable[ReportedAttempt], lost: list[Span]) -> list[Series]:
    starting: list[Span] = []
    training: list[Span] = []
    back: list[Span] = []
    for one in attempts:
        name, began, until = f"attempt {one.number}", one.began_at_unix, one.stopped_at_unix
        trained = one.training_at_unix
        if trained is None:
            starting.append(Span("job", began, until, f"{name}: started, never trained"))
        else:
            starting.append(Span("job", began, trained, f"{name}: starting, {brief(trained - began)}"))
            training.append(Span("job", trained, until, f"{name}: training, {brief(until - trained)}"))
        if one.was_lost:
            words = f"{name} {one.cause}: {one.message}"
            lost.append(Span("trouble", until, until, words))
            back.append(Span("job", until, one.ended_at_unix or until, words))
    return [
        Series("training", "training", training),
        Series("starting", "starting", starting),
        Series("ending after a loss", "back", back),
        Series("killed, lost or bad", "lost", lost),
    ]


def _phase(rows: Iterable[CheckpointRow], lane: str, begin: str, end: str) -> Iterable[Span]:
    for row in rows:
        since, until = getattr(row, begin), getattr(row, end)
        if since is not None and until is not None:
            took = brief(max(0.0, until - since))
            text = f"step {row.step} (attempt {row.attempt}) {lane} after {took}"
            yield Span(lane, since, max(since, until), text)


def goodput_chart(goodput: Goodput) -> Chart:
    """The parts of the time in one lane, one after the other."""
    series = []
    at = 0.0
    for name, value in goodput.parts.items():
        if value > 0:
            text = f"{name}: {brief(value)}, {share(value, goodput.total_seconds)}"
            series.append(Series(name, _PART_COLOURS[name], [Span("time", at, at + value, text)]))
            at += value
    return Chart("goodput", "The parts of the time; the table has them.", "seconds", series, lanes=["time"])


def durations_chart(
    stalls: Sequence[tuple[float, float]],
    staged: Sequence[tuple[float, float]],
    durable: Sequence[tuple[float, float]],
) -> Chart:
    """Seconds of checkpoints over their steps: each is (step, seconds)."""
    series = (
        Series("stall of training", "stall", points=stalls),
        Series("save() to staged", "staged", points=staged),
        Series("save() to durable", "durable", points=durable),
    )
    return Chart(
        "durations",
        "How long each checkpoint stalled training, and took to become staged and durable.",
        "step",
        [Series(one.name, one.colour, points=[p for p in one.points if p[1] > 0]) for one in series],
        y="seconds",
        x_title="step",
        is_logarithmic=True,
    )


def losses_chart(losses: Sequence[tuple[float, float]]) -> Chart:
    """The training loss over the steps that logged one."""
    return Chart(
        "losses",
        "The loss over the steps.",
        "step",
        [Series("loss", "training", points=losses)],
        x_title="step",
    )
