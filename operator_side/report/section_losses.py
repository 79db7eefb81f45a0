"""The sections about losses: interruptions and the ways back from them; what the time went into, and its price."""

from __future__ import annotations

from operator_side.report.attempts import ReportedAttempt
from operator_side.report.facts import RunFacts
from operator_side.report.goodput import PARTS
from operator_side.report.markup import (
    ROWS_MAX,
    Html,
    brief,
    dollars,
    join,
    keys,
    moment,
    said,
    section,
    share,
    table,
    tag,
    thin,
)
from operator_side.report.pictures import Bar, BarRow, bars, lanes, thinned

_PART_CLASSES = dict(zip(PARTS, ("work", "again", "stall", "back", "start", "idle"), strict=True))
_WAYS_MAX = 16


def interruptions(facts: RunFacts) -> Html | None:
    """Each loss, the phases until training went on, and the cost; then all attempts."""
    if not facts.attempts:
        return None
    found = facts.interruptions
    shown = thinned(found, ROWS_MAX)
    rows = []
    for one in shown:
        lost = one.lost
        rows.append(
            (
                moment(one.attempt.stopped_at_unix),
                str(one.attempt.number),
                said(f"{one.attempt.cause}: {one.attempt.message}"),
                _phases_back(one.back),
                brief(one.down_seconds) + ("" if one.back is not None else ", to the end of the logs"),
                "-" if lost is None else brief(lost.seconds),
                "-"
                if lost is None or lost.steps is None
                else f"{'~' if lost.is_estimate else ''}{lost.steps}",
                dollars(one.dollars),
            )
        )
    columns = (
        "first sign",
        "attempt",
        "why",
        "phases until training",
        "time until training",
        "work lost",
        "steps",
        "cost",
    )
    numbers = ("attempt", "time until training", "work lost", "steps", "cost")
    attempts = thinned(facts.attempts, ROWS_MAX, lambda one: one.was_lost)
    every = [
        (
            str(one.number),
            moment(one.began_at_unix),
            "-" if one.ranks is None else str(one.ranks),
            said(", ".join(one.hosts)) or "-",
            {None: "-", -1: "the beginning"}.get(one.restored_step, f"step {one.restored_step}"),
            moment(one.training_at_unix),
            moment(one.ended_at_unix),
            said(f"{one.cause}: {one.message}") if one.cause else "still running when the logs end",
        )
        for one in attempts
    ]
    names = ("attempt", "began", "ranks", "hosts", "resumed from", "training since", "ended", "how")
    return section(
        "interruptions",
        "Interruptions",
        table("Interruptions", columns, rows, numbers=numbers)
        if rows
        else tag("p", "No interruption is known."),
        thin(shown, found, "interruption", "the first, the last, and evenly chosen ones"),
        _ways_back(facts),
        table("Attempts", names, every, numbers=("attempt", "ranks")),
        thin(attempts, facts.attempts, "attempt", "lost ones first"),
    )


def _phases_back(back: ReportedAttempt | None) -> str:
    if back is None:
        return "training did not resume"
    return ", ".join(f"{name} {brief(value)}" for name, value in back.phases.items()) or "not known"


def _ways_back(facts: RunFacts) -> Html | None:
    classes = {
        "ended": "back",
        "launched": "idle",
        "joined": "start",
        "restored": "stall",
        "training": "work",
    }
    rows = []
    with_phases = [one for one in facts.interruptions if one.back is not None and one.back.phases]
    for one in with_phases[-_WAYS_MAX:]:
        assert one.back is not None
        at, parts = 0.0, []
        for name, value in one.back.phases.items():
            parts.append(Bar(at, at + value, classes.get(name, "idle"), f"until {name}: {brief(value)}"))
            at += value
        rows.append(BarRow(f"to attempt {one.back.number}", parts))
    if not rows:
        return None
    longest = max(lane.bars[-1].end for lane in rows)
    about = (
        "Seconds from the first sign of a loss to training, phase by phase; the table above has the figures."
    )
    return join(
        lanes("back-picture", "From loss to training", about, rows, 0.0, longest, is_clock=False),
        keys(*((class_, f"until {name}") for name, class_ in classes.items())),
        thin(rows, with_phases, "way back", "the last ones"),
    )


def goodput(facts: RunFacts) -> Html | None:
    """The parts of the time, and their price."""
    found = facts.goodput
    if found is None or found.total_seconds <= 0:
        return None
    parts = [
        (f"{name}: {brief(value)}, {share(value, found.total_seconds)}", value, _PART_CLASSES[name])
        for name, value in found.parts.items()
    ]
    rows = [
        (
            join(tag("span", "", class_=f"key {_PART_CLASSES[name]}"), name),
            brief(value),
            share(value, found.total_seconds),
            dollars(found.dollars(value)),
            PARTS[name],
        )
        for name, value in found.parts.items()
    ]
    columns = ("what", "time", "share", "cost", "meaning")
    about = "Shares of the whole time; the table below has the figures."
    return section(
        "goodput",
        "Goodput and cost",
        bars("goodput-picture", "Use of the time", about, parts),
        table("Use of the time", columns, rows, numbers=("time", "share", "cost")),
        tag("p", "An estimate: the logs do not fully say when training went on, or what was done again.")
        if found.is_estimate
        else None,
    )
