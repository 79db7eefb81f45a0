"""Makes the charts of a run from its facts: attempts and phases over time, the use of the time, durations, losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.telemetry.rows import CheckpointRow, SkippedStep
from holdfast.telemetry.status_document import CheckpointStatus
from operator_side.page.chart import Chart, Colour, Series, Span
from operator_side.page.words import brief, share
from operator_side.report.attempts import ReportedAttempt
from operator_side.report.goodput import Goodput, Interruption

_LANES = ("job", "to staged", "to durable", "read back", "trouble")
_PHASES: tuple[tuple[str, str, str, Colour, str], ...] = (
    ("to staged", "saved_at_unix", "staged_at_unix", "staged", "save() to staged"),
    ("to durable", "staged_at_unix", "durable_at_unix", "durable", "staged to durable"),
    ("read back", "durable_at_unix", "read_at_unix", "verified", "durable to read back"),
)
DURATIONS: tuple[tuple[str, Colour, str], ...] = (
    ("stall of training", "stall", "stall_seconds"),
    ("save() to staged", "staged", "pgt1_seconds"),
    ("save() to durable", "durable", "pgt2_seconds"),
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
    attempts: Sequence[ReportedAttempt],
    rows: Sequence[CheckpointRow] = (),
    missed: Sequence[SkippedStep] = (),
) -> Chart:
    """Chart the attempts in one lane, each phase of checkpoints in one, and skipped and bad checkpoints in one."""
    bad = [(row.read_at_unix or row.durable_at_unix, row) for row in rows if row.state == "bad"]
    lost = [Span("trouble", at, at, f"step {row.step} is bad") for at, row in bad if at is not None]
    skipped = [
        Span("trouble", one.at_unix, one.at_unix, f"step {one.step} {one.kind}: {one.cause}")
        for one in missed
    ]
    series = [
        *_attempts(attempts, lost),
        *(
            Series(name, colour, list(_phase(rows, lane, since, until)))
            for lane, since, until, colour, name in _PHASES
        ),
        Series("skipped", "declined", skipped),
    ]
    used = {span.lane for one in series for span in one.spans}
    lanes = [lane for lane in _LANES if lane in used]
    text = "Attempts and checkpoints over time; the tables have the figures."
    return Chart("timeline", text, "time", series, lanes=lanes, x_title="time (UTC)")


def _attempts(attempts: Iterable[ReportedAttempt], lost: list[Span]) -> list[Series]:
    starting: list[Span] = []
    training: list[Span] = []
    back: list[Span] = []
    is_back = False
    for one in attempts:
        name, began, until = f"attempt {one.number}", one.began_at_unix, one.stopped_at_unix
        trained = one.training_at_unix
        start = back if is_back else starting
        if trained is None:
            start.append(Span("job", began, until, f"{name}: started, never trained"))
        else:
            start.append(Span("job", began, trained, f"{name}: starting, {brief(trained - began)}"))
            training.append(Span("job", trained, until, f"{name}: training, {brief(until - trained)}"))
        if one.was_lost:
            words = f"{name} {one.cause}: {one.message}"
            lost.append(Span("trouble", until, until, words))
            back.append(Span("job", until, one.ended_at_unix or until, words))
        is_back = one.was_lost or (is_back and trained is None)
    return [
        Series("training", "training", training),
        Series("starting", "starting", starting),
        Series("getting back after losses", "back", back),
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
    """Chart the parts of the time in one lane, one after the other."""
    series = []
    at = 0.0
    for name, value in goodput.parts.items():
        if value > 0:
            text = f"{name}: {brief(value)}, {share(value, goodput.total_seconds)}"
            series.append(Series(name, _PART_COLOURS[name], [Span("time", at, at + value, text)]))
            at += value
    return Chart(
        "goodput",
        "The parts of the time; the table has them.",
        "seconds",
        series,
        lanes=["time"],
        x_title="time by its use",
    )


def durations_chart(rows: Sequence[CheckpointRow | CheckpointStatus]) -> Chart:
    """Chart the seconds of checkpoints over their steps."""
    series = []
    for name, colour, field in DURATIONS:
        values = [(row.step, getattr(row, field)) for row in rows]
        points = [(step, value) for step, value in values if value is not None and value > 0]
        series.append(Series(name, colour, points=points))
    text = "How long each checkpoint stalled training, and took to become staged and durable."
    return Chart(
        "durations", text, "step", series, y="seconds", x_title="step", y_title="time", is_logarithmic=True
    )


def losses_chart(losses: Sequence[tuple[float, float]], interruptions: Iterable[Interruption] = ()) -> Chart:
    """Chart the training loss over the steps that logged one, with the steps that training resumed from."""
    resumed = [one.recovery.restored_step for one in interruptions if one.recovery is not None]
    marks = sorted({max(0, step) for step in resumed if step is not None})
    series = [
        Series("loss", "training", points=losses),
        Series("killed, resumed from this step", "lost", marks=marks),
    ]
    return Chart("losses", "The loss over the steps.", "step", series, x_title="step", y_title="loss")
