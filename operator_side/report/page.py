"""Renders report.html from the facts, with tiles and charts, as one file that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

from holdfast.telemetry.event_text import truncate
from holdfast.telemetry.rows import CheckpointRow, RankTimes, SkippedStep
from operator_side.page.render_page import render_page
from operator_side.page.words import moment, plural
from operator_side.report.attempts import ReportedAttempt
from operator_side.report.facts import Incident, RunFacts, compute_spread, ring_bytes
from operator_side.report.goodput import PARTS
from operator_side.report.run_charts import (
    DURATIONS,
    durations_chart,
    goodput_chart,
    losses_chart,
    timeline_chart,
)
from operator_side.report.run_tiles import last_good_tile, run_tiles
from operator_side.report.sentences import find_hints, summarize_run

_URL_CHARACTERS_MAX = 300
_FILES_SHOWN = 20
_BARS_MAX = 400  # in a lane of a chart, or points of a line
_ROWS_MAX = 200  # of a table
_DETAILED_MAX = 12  # checkpoints shown rank by rank
_RANKS_MAX = 16
_SECONDS_MIN = 1e-6  # a shorter time means that nothing was copied
_Item = TypeVar("_Item")


def report_page(facts: RunFacts, *, made_at_unix: float) -> bytes:
    saved = [row for row in facts.rows if row.saved_at_unix is not None]
    timeline = timeline_chart(
        thinned(facts.attempts, _BARS_MAX),
        thinned(saved, _BARS_MAX),
        thinned(facts.checkpoints.skipped, _BARS_MAX),
    )
    return render_page(
        "report/report.html",
        facts=facts,
        run=truncate(facts.run, _URL_CHARACTERS_MAX),
        made_at=moment(made_at_unix),
        sources=_sources(facts),
        tiles_of_run=run_tiles(facts, last_good_tile(facts)),
        happened=summarize_run(facts),
        hints=find_hints(facts),
        parts=PARTS,
        timeline=timeline,
        durations=durations_chart(thinned(facts.rows, _BARS_MAX)),
        goodput_parts=goodput_chart(facts.goodput) if facts.goodput else None,
        losses=losses_chart(thinned(facts.losses, _BARS_MAX), facts.interruptions[-_BARS_MAX:]),
        seconds={
            name: [value for row in facts.rows if (value := getattr(row, field)) is not None]
            for name, _, field in DURATIONS
        },
        ring=[nbytes for _, nbytes in ring_bytes(facts.rows, facts.end_unix or 0.0)],
        rates={name: _rates(facts.rows, field) for name, _, field in DURATIONS[1:]},
        detailed=_select_detailed(facts.rows),
        few=partial(thinned, most=_ROWS_MAX),
        compute_spread=compute_spread,
        worst=_worst_ranks,
    )


def _sources(facts: RunFacts) -> str:
    files = facts.log.files
    names = ", ".join(files[:_FILES_SHOWN])
    if len(files) > _FILES_SHOWN:
        names += f" and {len(files) - _FILES_SHOWN} more"
    logs = f" and {plural(len(facts.log.events), 'event')} of {names}" if files else ""
    return f"{plural(sum(row.in_store for row in facts.rows), 'manifest')}{logs}"


def thinned(items: Sequence[_Item], most: int) -> list[_Item]:
    """Select at most `most` items, in order: the first, the last, the newest that stand out, then evenly."""
    if len(items) <= most:
        return list(items)
    kept = {0, len(items) - 1} if most > 1 else {len(items) - 1}
    special = [index for index, item in enumerate(items) if index not in kept and _stands_out(item)]
    room = max(0, most - len(kept))
    kept.update(special[-room:] if room else [])
    room = most - len(kept)
    rest = [index for index in range(len(items)) if index not in kept]
    if room > 0:
        kept.update(rest[index * len(rest) // room] for index in range(room))
    return [items[index] for index in sorted(kept)]


def _stands_out(item: object) -> bool:
    match item:
        case CheckpointRow():
            return item.state not in {"durable", "verified"} or bool(item.nonfinite)
        case ReportedAttempt():
            return item.was_lost
        case SkippedStep():
            return item.kind == "failed"
        case Incident():
            return item.is_notice
    return False


def _rates(rows: Iterable[CheckpointRow], seconds: str) -> list[float]:
    took = ((row.image_bytes, getattr(row, seconds)) for row in rows)
    return [
        nbytes / value for nbytes, value in took if nbytes and value is not None and value >= _SECONDS_MIN
    ]


def _worst_ranks(row: CheckpointRow) -> list[tuple[int, RankTimes]]:
    """Return the ranks with the longest stalls, by number."""
    by_stall = sorted(row.ranks.items(), key=lambda one: one[1].seconds.get("cst_seconds", 0.0))
    return sorted(by_stall[-_RANKS_MAX:])


def _select_detailed(rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    """Select the newest, the slowest to durable, those with the longest stalls, and the newest bad ones."""
    known, few = [row for row in rows if row.ranks], _DETAILED_MAX // 4
    chosen = [
        *known[-few:],
        *sorted(known, key=lambda row: row.pgt2_seconds or 0.0)[-few:],
        *sorted(known, key=lambda row: row.stall_seconds or 0.0)[-few:],
        *[row for row in known if row.state in {"bad", "drifted", "doubtful", "failed"}][-few:],
    ]
    keys = {(row.attempt, row.step) for row in chosen}
    return [row for row in known if (row.attempt, row.step) in keys]
