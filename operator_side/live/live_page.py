"""Renders live.html from a run's status and, if its logs are known, from their facts. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

from holdfast.command.output import format_seconds
from holdfast.telemetry.event_text import truncate
from holdfast.telemetry.rows import CheckpointRow
from holdfast.telemetry.status_document import CheckpointStatus, RankStatus
from operator_side.page.chart import Chart, Colour, Series
from operator_side.page.render_page import render_page
from operator_side.page.words import dollars, moment
from operator_side.report.attempts import ReportedAttempt
from operator_side.report.facts import RunFacts
from operator_side.report.goodput import Interruption
from operator_side.report.run_charts import durations_chart, losses_chart, timeline_chart
from operator_side.report.run_tiles import Tile, run_tiles
from operator_side.status.loss import Loss
from operator_side.status.run_status import RunStatus
from operator_side.status.status_text import (
    age,
    head_lines,
    interval_lines,
    line_text,
    lost_steps,
    rank_counts,
    resumes_from,
)

_STRIP_MIN = 9  # fewer ranks are readable in the table
_RANKS_SHOWN = 8
_LINES_SHOWN = 6
_ATTEMPTS_SHOWN = 200
_POINTS_MAX = 400
_URL_CHARACTERS_MAX = 300
_RANK_COLOURS: dict[str, Colour] = {
    "here": "training",
    "coming": "starting",
    "silent": "back",
    "left": "idle",
    "lost": "lost",
}
_Item = TypeVar("_Item")


def live_page(
    status: RunStatus,
    facts: RunFacts | None,
    *,
    every_seconds: float,
    others: Sequence[str] = (),
    is_full_page: bool = True,
    link: str = "",
) -> bytes:
    """Render the page of a run; `facts`: from its logs, if there are logs.

    The page fetches its main part every `every_seconds`. `is_full_page`: false renders only the main part. `others`:
    runs of this machine to link to. `link`: the query that names this run.
    """
    ranks = sorted(status.ranks, key=lambda rank: rank.rank) if status.ranks_total >= _STRIP_MIN else []
    rows = _checkpoints(status, facts)
    interruptions = facts.interruptions[-_ATTEMPTS_SHOWN:] if facts is not None else []
    charts = [
        ("losses", "Loss", losses_chart(_thinned(_losses(status, facts)), interruptions)),
        ("progress", "Progress", _progress(rows, interruptions)),
        ("durations", "How long checkpoints took", durations_chart(rows)),
    ]
    if facts is not None:
        charts.append(
            ("timeline", "Attempts and interruptions", timeline_chart(_attempts_until_now(facts, status)))
        )
    return render_page(
        "live/live.html",
        is_full_page=is_full_page,
        every=every_seconds,
        fragment=f"main{link}",
        run=truncate(status.run, _URL_CHARACTERS_MAX),
        status=status,
        others=others,
        head=[*head_lines(status), *filter(None, [status.resume_text])],
        state=_state(status, facts),
        tiles_of_run=list(_tiles(status, facts)),
        charts=[one for one in charts if not one[2].is_empty],
        strip=ranks,
        counts=rank_counts(status),
        rank_colours=_RANK_COLOURS,
        rank_title=_rank_title,
        ranks=status.ranks[:_RANKS_SHOWN],
        interval_lines=interval_lines,
        line=partial(line_text, now_unix=status.now_unix),
        lines=[
            (title, lines[-_LINES_SHOWN:][::-1])
            for title, lines in (
                ("Notices", status.notices),
                ("Troubles", status.problems),
                ("Checkpoints not taken", status.declined),
            )
            if lines
        ],
    )


def _state(status: RunStatus, facts: RunFacts | None) -> tuple[Colour, str]:
    """Describe the present activity of the run, or how it ended, as far as known, with its colour."""
    counts = rank_counts(status)
    last = facts.attempts[-1] if facts is not None and facts.attempts else None
    if status.waits_at:
        return "idle", "waiting for a job"
    if status.stager.state == "silent":
        return "back", "the stager does not answer"
    if status.is_running:
        if any(counts[name] for name in ("lost", "silent", "left")):
            return "back", "some ranks are missing"
        return ("starting", "starting") if counts["coming"] else ("training", "training")
    if last is None:
        return "idle", "no training job is running"
    if not last.cause:
        began = age(status.now_unix, last.began_at_unix)
        return "starting", f"attempt {last.number} was launched {began} ago; no stager is here"
    ended = f"attempt {last.number} ended at {moment(last.stopped_at_unix)}"
    return "lost" if last.was_lost else "idle", f"{ended} ({last.cause}): {last.message}"


def _tiles(status: RunStatus, facts: RunFacts | None) -> Iterator[Tile]:
    good = _level("last good step", "verified" if "verified" in status.levels else "durable", status)
    yield from run_tiles(facts, good) if facts is not None and facts.attempts else [good]
    if losses := _losses(status, facts):
        step, loss = losses[-1]
        yield Tile("loss", f"{loss:.4g}", f"of step {step}", "training")
    if status.is_running or status.flights:
        yield _loss("a kill now loses", status.loss_trainers)
        yield _loss("with the stager's node", status.loss_node)
    yield _level("newest staged step", "staged", status)
    yield _level("newest durable step", "durable", status)


def _losses(status: RunStatus, facts: RunFacts | None) -> Sequence[tuple[int, float]]:
    """Return the losses of the logs, which have all; without logs the stager's newest ones."""
    return facts.losses if facts is not None and facts.losses else sorted(dict(status.losses).items())


def _level(title: str, name: Colour, status: RunStatus) -> Tile:
    level = status.levels.get(name)
    if level is None:
        return Tile(title, "-", f"no checkpoint is {name} yet")
    note = f"{name} " if name not in title else ""
    note += f"{age(status.now_unix, level.at_unix)} ago, " if level.at_unix else ""
    note += f"attempt {level.attempt}"
    if level.nonfinite:
        note += f", {level.nonfinite:,} numbers not finite"
    return Tile(title, str(level.step), note, name)


def _loss(name: str, lost: Loss) -> Tile:
    """Make the tile of a kill's loss. No red: nothing is lost yet."""
    price = "" if lost.dollars is None else f", {dollars(lost.dollars)}"
    steps = lost_steps(lost)
    note = f"{format_seconds(lost.seconds)}{price}; resumes from {resumes_from(lost)}"
    return Tile(name, f"{steps} {'step' if steps == '1' else 'steps'}", note)


def _attempts_until_now(facts: RunFacts, status: RunStatus) -> list[ReportedAttempt]:
    """Return the attempts; one that runs or starts reaches to now."""
    shown = facts.attempts[-_ATTEMPTS_SHOWN:]
    if shown and not shown[-1].cause and (status.is_running or shown[-1].training_at_unix is None):
        now = max(status.now_unix, shown[-1].last_seen_at_unix)
        shown[-1] = dataclasses.replace(shown[-1], last_seen_at_unix=now)
    return shown


def _checkpoints(status: RunStatus, facts: RunFacts | None) -> Sequence[CheckpointRow | CheckpointStatus]:
    """Return the checkpoints of the logs, which have all; if the logs are elsewhere, the status's newest ones."""
    logged: Sequence[CheckpointRow] = facts.rows if facts is not None else ()
    return _thinned(max(logged, status.checkpoints, key=len))


def _progress(
    rows: Sequence[CheckpointRow | CheckpointStatus], interruptions: Sequence[Interruption]
) -> Chart:
    """Chart the saved steps over time: the line falls at a loss."""
    points = sorted((at, row.step) for row in rows if (at := row.saved_at_unix))
    series = [
        Series("saved steps", "training", points=points),
        Series("killed or lost", "lost", marks=[one.attempt.stopped_at_unix for one in interruptions]),
    ]
    text = "The steps of the checkpoints over the time of their save()."
    return Chart("progress", text, "time", series, y="step", x_title="time (UTC)", y_title="step")


def _thinned(points: Sequence[_Item]) -> Sequence[_Item]:
    """Select about `_POINTS_MAX` of the points, including the last."""
    return points[:: -max(1, len(points) // _POINTS_MAX)][::-1]


def _rank_title(rank: RankStatus) -> str:
    step = "no step saved" if rank.step is None else f"saved step {rank.step}"
    return f"rank {rank.rank}{f' on {rank.host}' if rank.host else ''}: {rank.state}, {step}"
