"""How a terminal shows the status of a run: in 80 columns, and readable without colours.

A pure function: status ─► renderable. With a height, lists (ranks, lines) are cut to fit; the worst entries stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.command.output import escape_controls, format_seconds, format_size, table
from holdfast.telemetry.status_document import RankStatus, StatusLine
from operator_side.page.words import dollars, plural
from operator_side.status.ring_files import RingCheckpoint
from operator_side.status.run_status import LEVELS, RunStatus
from operator_side.status.status_text import (
    age,
    head_lines,
    interval_lines,
    line_text,
    lost_steps,
    resumes_from,
)

_BAR_CELLS = 16
_SPARKS, _ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_SHOWN, _SHOWN_LEAST = (8, 6, 3), (1, 1, 1)  # ranks, flights, lines
_HOST_CHARACTERS_MAX = 20
# Dropped in this order if the window is too small.
_DROPPED = ("timings", "notices", "declined", "ring", "flights", "ranks", "notes", "troubles")
_RESUME_STYLE = {"verified resume": "", "differs": "red", "not proven": "yellow"}
_RANK_STYLE = {"lost": "red", "silent": "yellow", "coming": "dim", "left": "dim"}


def render(status: RunStatus, *, ascii_only: bool = False, height: int | None = None) -> RenderableType:
    """Render the status for `rich`. `height`: lines of the terminal; lists are shortened to fit, if possible."""
    parts = _parts(status, ascii_only, _SHOWN)
    if height is not None:
        for count in range(len(_DROPPED) + 1):
            if _count_lines(parts) <= height:
                break
            parts = _parts(status, ascii_only, _SHOWN_LEAST, without=_DROPPED[:count])
        for part in parts:  # a wrapped line would push the end out of sight
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _parts(
    status: RunStatus, ascii_only: bool, shown: tuple[int, int, int], *, without: Sequence[str] = ()
) -> list[RenderableType]:
    ranks, flights, lines = shown
    idle = not status.is_running and not status.flights
    loss: list[RenderableType] = [] if idle else [_loss(status), Text()]
    found: list[RenderableType] = [*_head(status), Text(), _levels(status), Text(), *loss]
    rest: dict[str, list[RenderableType]] = {
        "ring": _ring(status, ascii_only),
        "flights": _flights(status, ascii_only, flights),
        "timings": _timings(status, ascii_only),
        "ranks": _ranks(status, ranks),
        "declined": _declined(status),
        "notices": _event_lines("notices", status.notices, status.now_unix, lines),
        "troubles": _event_lines("troubles", status.problems, status.now_unix, lines),
        "notes": [Text(f"note: {escape_controls(note)}", style="yellow") for note in status.notes],
    }
    for name, parts in rest.items():
        found += [] if name in without else parts
    return found


def _count_lines(parts: Iterable[RenderableType]) -> int:
    """Estimate how many lines the parts take: a table has two more than rows."""
    return sum(part.row_count + 2 if isinstance(part, Table) else 1 for part in parts)


# -- who, how far, how much is at risk ---------------------------------------------------------------------------------


def _head(status: RunStatus) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(escape_controls(status.run), style="bold"),
        *(Text(escape_controls(line)) for line in head_lines(status)),
    ]
    if status.resume_text:
        lines.append(Text(escape_controls(status.resume_text), style=_RESUME_STYLE.get(status.resume, "")))
    return lines


def _levels(status: RunStatus) -> Table:
    rows = table("CHECKPOINT", "STEP", "AGE", "ATTEMPT", right=("STEP", "AGE", "ATTEMPT"))
    for name in LEVELS:
        level = status.levels.get(name)
        if level is None:
            rows.add_row(f"newest {name}", "-", "-", "-", style="dim")
            continue
        at = "-" if not level.at_unix else age(status.now_unix, level.at_unix)
        broken = f", {level.nonfinite:,} numbers not finite" if level.nonfinite else ""
        style = "yellow" if broken else ""
        rows.add_row(f"newest {name}{broken}", str(level.step), at, str(level.attempt), style=style)
    return rows


def _loss(status: RunStatus) -> Table:
    numbers = ("STEPS", "TIME", "DOLLARS")
    rows = table("A KILL RIGHT NOW LOSES", *numbers, "RESUMES FROM", right=numbers)
    for what, lost in (
        ("of all trainers", status.loss_trainers),
        ("and of the stager's node", status.loss_node),
    ):
        rows.add_row(
            what, lost_steps(lost), format_seconds(lost.seconds), dollars(lost.dollars), resumes_from(lost)
        )
    return rows


# -- what is on its way ------------------------------------------------------------------------------------------------


def _ring(status: RunStatus, ascii_only: bool) -> list[RenderableType]:
    ring = status.ring
    if ring is None:
        return [Text("this machine has no ring of the run", style="dim")]
    full, filling = ring.chunks.get("full", 0), ring.chunks.get("filling", 0)
    used = bar((full + filling) / ring.ring_chunks, ascii_only)
    whole = (
        f"{full + filling} of {ring.ring_chunks} chunks ({format_size(ring.chunk_bytes * ring.ring_chunks)})"
    )
    return [Text(f"ring    {used} {whole}: {full} full, {filling} filling")]


def _flights(status: RunStatus, ascii_only: bool, shown: int) -> list[RenderableType]:
    if not status.flights:
        return []
    rows = table("STEP", "STATE", "IN THE RING", "WRITTEN", "", right=("STEP", "IN THE RING"))
    for flight in status.flights[-shown:]:
        state = "held" if flight.held else flight.state
        rows.add_row(str(flight.step), state, format_size(flight.ring_bytes), *_written(flight, ascii_only))
    found: list[RenderableType] = [Text(), rows]
    if len(status.flights) > shown:
        found.append(Text(f"and {len(status.flights) - shown} older checkpoints in flight"))
    if status.shares:
        each = ", ".join(f"{share.share} {share.state}" for share in status.shares)
        found.append(Text(f"shares of step {status.shares[0].step}: {escape_controls(each)}"))
    held = next((flight for flight in status.flights if flight.held), None)
    if held is not None:
        found.append(Text(f"the store fails: {escape_controls(held.held)}", style="yellow"))
    return found


def _written(flight: RingCheckpoint, ascii_only: bool) -> tuple[str, str]:
    if flight.written_bytes is None or not flight.image_bytes:
        return "", f"of {format_size(flight.image_bytes)}" if flight.image_bytes else "-"
    fraction = flight.written_bytes / flight.image_bytes
    done = f"{format_size(flight.written_bytes)} of {format_size(flight.image_bytes)}, {fraction:.0%}"
    return bar(fraction, ascii_only), done


def _timings(status: RunStatus, ascii_only: bool) -> list[RenderableType]:
    names = (
        ("save to staged", status.pgt1),
        ("save to durable", status.pgt2),
        ("stall of training", status.stall),
    )
    known = [(name, timings) for name, timings in names if timings.seconds]
    found: list[RenderableType] = []
    if known:
        rows = table("SECONDS", "LAST", "MEDIAN", "NEWEST RIGHTMOST", right=("LAST", "MEDIAN"))
        for name, timings in known:
            sparks = spark(timings.seconds[-_BAR_CELLS:], ascii_only)
            rows.add_row(name, _short(timings.last), _short(timings.median), sparks)
        found = [Text(), rows]
    return [*found, *(Text(escape_controls(line)) for line in interval_lines(status))]


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 0.1 else format_seconds(value)


# -- ranks and lines ---------------------------------------------------------------------------------------------------


def _ranks(status: RunStatus, shown: int) -> list[RenderableType]:
    if not status.ranks:
        return []
    numbers = ("SAVED STEP", "HEARD", "STALL")
    rows = table("RANK", "HOST", "STATE", *numbers, right=("RANK", *numbers))
    for rank in status.ranks[:shown]:
        rows.add_row(*_rank(rank), style=_RANK_STYLE.get(rank.state, ""))
    found: list[RenderableType] = [Text(), rows]
    rest = status.ranks[shown:]
    more = status.ranks_total - len(status.ranks[:shown])
    if more > 0:
        steps = {rank.step for rank in rest}
        at = f", at step {steps.pop()}" if len(steps) == 1 and None not in steps and len(rest) == more else ""
        found.append(Text(f"and {plural(more, 'more rank')}, in no worse state{at}"))
    return found


def _rank(rank: RankStatus) -> tuple[str, ...]:
    quiet = "-" if rank.quiet_seconds is None else f"{format_seconds(rank.quiet_seconds)} ago"
    step = "-" if rank.step is None else str(rank.step)
    host = escape_controls(rank.host)[:_HOST_CHARACTERS_MAX]
    return str(rank.rank), host, rank.state, step, quiet, _short(rank.stall_seconds)


def _declined(status: RunStatus) -> list[RenderableType]:
    if not status.not_taken:
        return []
    causes = sorted(status.not_taken.items(), key=lambda cause: -cause[1])
    counted = ", ".join(f"{count} {escape_controls(cause)}" for cause, count in causes)
    found: list[RenderableType] = [
        Text(),
        Text(f"checkpoints not taken: {sum(status.not_taken.values())} ({counted})"),
    ]
    if status.declined:
        last = status.declined[-1]
        found.append(Text(f"  last: {escape_controls(line_text(last, status.now_unix))}"))
    return found


def _event_lines(
    title: str, lines: Sequence[StatusLine], now_unix: float, shown: int
) -> list[RenderableType]:
    if not lines:
        return []
    more = f", {len(lines) - shown} earlier ones not shown" if len(lines) > shown else ""
    return [
        Text(),
        Text(f"{title}{more}"),
        *(Text(f"  {escape_controls(line_text(line, now_unix))}") for line in lines[-shown:]),
    ]


# -- pieces ------------------------------------------------------------------------------------------------------------


def bar(fraction: float, ascii_only: bool = False, cells: int = _BAR_CELLS) -> str:
    """Draw a bar such as `████░░░░`, which is full only at 1 and empty only at 0."""
    done, left = ("#", ".") if ascii_only else ("█", "░")
    fraction = min(1.0, max(0.0, fraction))
    filled = math.floor(fraction * cells) if fraction > 0.5 else math.ceil(fraction * cells)
    return done * filled + left * (cells - filled)


def spark(values: Sequence[float], ascii_only: bool = False) -> str:
    """Draw one character per value, by its place between the smallest and the largest."""
    marks = _ASCII_SPARKS if ascii_only else _SPARKS
    if not values:
        return ""
    least, span = min(values), max(values) - min(values)
    if span <= 0:
        return marks[len(marks) // 2] * len(values)
    return "".join(marks[min(len(marks) - 1, int((value - least) / span * len(marks)))] for value in values)
