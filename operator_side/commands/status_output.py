"""How a terminal shows the picture of a run: in 80 columns, and readable without colours.

A pure function: picture ─► renderable. With a height the lists (ranks, lines) are cut to it; the worst entries stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.command.output import plain, seconds, size, table
from holdfast.telemetry.status_document import RankStatus, StatusLine
from operator_side.status.loss import Lost
from operator_side.status.picture import LEVELS, Peer, Picture, Timings, UnderWay

_BAR_CELLS = 16
_SPARKS, _ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_RANKS_SHOWN, _FLIGHTS_SHOWN, _LINES_SHOWN = 8, 6, 3
_RANKS_SHOWN_LEAST, _FLIGHTS_SHOWN_LEAST, _LINES_SHOWN_LEAST = 1, 1, 1
_HOST_CHARACTERS_MAX = 20
_OVER = {"tcp": ", over TCP, not encrypted", "tls": ", over TLS"}
# Dropped first where the window is too small.
_DROPPED = ("timings", "notices", "declined", "ring", "flights", "ranks", "notes", "troubles")
_RANK_STYLE = {"lost": "red", "silent": "yellow", "coming": "dim", "left": "dim"}


def render(picture: Picture, *, ascii_only: bool = False, height: int | None = None) -> RenderableType:
    """The picture, for `rich`.

    Args:
        picture: The run.
        ascii_only: Use ASCII characters alone.
        height: Lines of the terminal; lists are shortened so that the picture fits, if possible. None: no limit.
    """
    shown = (_RANKS_SHOWN, _FLIGHTS_SHOWN, _LINES_SHOWN)
    parts = _parts(picture, ascii_only, shown)
    if height is not None and _lines(parts) > height:
        shown = (_RANKS_SHOWN_LEAST, _FLIGHTS_SHOWN_LEAST, _LINES_SHOWN_LEAST)
        parts = _parts(picture, ascii_only, shown)
        for count in range(1, len(_DROPPED) + 1):
            if _lines(parts) <= height:
                break
            parts = _parts(picture, ascii_only, shown, without=_DROPPED[:count])
    if height is not None:  # a wrapped line would push the end of the picture out of sight
        for part in parts:
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _parts(
    picture: Picture, ascii_only: bool, shown: tuple[int, int, int], *, without: Sequence[str] = ()
) -> list[RenderableType]:
    ranks, flights, lines = shown
    idle = bool(picture.waits_at) and not picture.flights
    loss: list[RenderableType] = [] if idle else [_loss(picture), Text()]
    found: list[RenderableType] = [*_head(picture), Text(), _levels(picture), Text(), *loss]
    rest: dict[str, list[RenderableType]] = {
        "ring": _ring(picture, ascii_only),
        "flights": _flights(picture, ascii_only, flights),
        "timings": _timings(picture, ascii_only),
        "ranks": _ranks(picture, ranks),
        "declined": _declined(picture),
        "notices": _said("notices", picture.notices, picture.now_unix, lines),
        "troubles": _said("troubles", picture.problems, picture.now_unix, lines),
        "notes": [Text(f"note: {plain(note)}", style="yellow") for note in picture.notes],
    }
    for name, parts in rest.items():
        found += [] if name in without else parts
    return found


def _lines(parts: Iterable[RenderableType]) -> int:
    """About how many lines the parts take: a table has two more than rows."""
    return sum(part.row_count + 2 if isinstance(part, Table) else 1 for part in parts)


# -- who, how far, how much is at risk ---------------------------------------------------------------------------------


def _head(picture: Picture) -> list[RenderableType]:
    clock = datetime.fromtimestamp(picture.now_unix, UTC).strftime("%H:%M:%S UTC")
    where = f"attempt {picture.attempt}, {clock}" if picture.attempt else clock
    return [
        Text(plain(picture.run), style="bold"),
        Text(f"{where}; {_who(picture)}"),
        Text(
            f"{_peer('stager', picture.stager, picture)}{_OVER.get(picture.transport or '', '')}; "
            f"{_peer('flusher', picture.flusher, picture)}"
        ),
    ]


def _peer(name: str, peer: Peer, picture: Picture) -> str:
    if peer.state == "gone":
        return f"no {name}"
    if name == "stager" and picture.waits_at:
        return f"stager process {peer.pid} waits for a job at {plain(picture.waits_at)}"
    process = "" if peer.pid is None else f" process {peer.pid}"
    if peer.state == "silent":
        return f"{name}{process} does not answer ({plain(peer.note)})"
    since = "" if peer.since_unix is None else f", {_age(picture, peer.since_unix)}"
    return f"{name}{process}{since}"


def _who(picture: Picture) -> str:
    if not picture.ranks:
        return "no training job is running" if not picture.is_running else "the ranks are not known"
    counts = Counter(rank.state for rank in picture.ranks)
    counts["here"] += (
        picture.ranks_total - counts.total()
    )  # the picture names the ranks in a worse state first
    named = [
        f"{counts[state]} {state}" for state in ("here", "coming", "silent", "left", "lost") if counts[state]
    ]
    return f"{picture.ranks_total} ranks: {', '.join(named)}"


def _levels(picture: Picture) -> Table:
    rows = table("CHECKPOINT", "STEP", "AGE", "ATTEMPT", right=("STEP", "AGE", "ATTEMPT"))
    for name in LEVELS:
        level = picture.levels.get(name)
        if level is None:
            rows.add_row(f"newest {name}", "-", "-", "-", style="dim")
            continue
        at = "-" if not level.at_unix else _age(picture, level.at_unix)
        broken = f", {level.nonfinite:,} numbers not finite" if level.nonfinite else ""
        style = "yellow" if broken else ""
        rows.add_row(f"newest {name}{broken}", str(level.step), at, str(level.attempt), style=style)
    return rows


def _loss(picture: Picture) -> Table:
    rows = table(
        "A KILL RIGHT NOW LOSES",
        "STEPS",
        "TIME",
        "DOLLARS",
        "RESUMES FROM",
        right=("STEPS", "TIME", "DOLLARS"),
    )
    for what, lost in (
        ("of all trainers", picture.loss_trainers),
        ("and of the stager's node", picture.loss_node),
    ):
        rows.add_row(what, _steps(lost), seconds(lost.seconds), _dollars(lost), _from(lost))
    return rows


def _steps(lost: Lost) -> str:
    if lost.steps is None:
        return "?"
    return f"~{lost.steps}" if lost.is_estimate else str(lost.steps)


def _dollars(lost: Lost) -> str:
    return "-" if lost.dollars is None else f"${lost.dollars:.2f}"


def _from(lost: Lost) -> str:
    return "the beginning" if lost.since_step is None else f"step {lost.since_step}"


# -- what is on its way ------------------------------------------------------------------------------------------------


def _ring(picture: Picture, ascii_only: bool) -> list[RenderableType]:
    ring = picture.ring
    if ring is None:
        return [Text("this machine has no ring of the run", style="dim")]
    full, filling = ring.chunks.get("full", 0), ring.chunks.get("filling", 0)
    used = bar((full + filling) / ring.ring_chunks, ascii_only)
    whole = size(ring.chunk_bytes * ring.ring_chunks)
    return [
        Text(
            f"ring    {used} {full + filling} of {ring.ring_chunks} chunks ({whole}): {full} full, {filling} filling"
        )
    ]


def _flights(picture: Picture, ascii_only: bool, shown: int) -> list[RenderableType]:
    if not picture.flights:
        return []
    rows = table("STEP", "STATE", "IN THE RING", "WRITTEN", "", right=("STEP", "IN THE RING"))
    for flight in picture.flights[-shown:]:
        state = "held" if flight.held else flight.state
        rows.add_row(str(flight.step), state, size(flight.ring_bytes), *_written(flight, ascii_only))
    found: list[RenderableType] = [Text(), rows]
    if len(picture.flights) > shown:
        found.append(Text(f"and {len(picture.flights) - shown} older checkpoints in flight"))
    held = next((flight for flight in picture.flights if flight.held), None)
    if held is not None:
        found.append(Text(f"the store fails: {plain(held.held)}", style="yellow"))
    return found


def _written(flight: UnderWay, ascii_only: bool) -> tuple[str, str]:
    if flight.written_bytes is None or not flight.image_bytes:
        return "", f"of {size(flight.image_bytes)}" if flight.image_bytes else "-"
    fraction = flight.written_bytes / flight.image_bytes
    return bar(
        fraction, ascii_only
    ), f"{size(flight.written_bytes)} of {size(flight.image_bytes)}, {fraction:.0%}"


def _timings(picture: Picture, ascii_only: bool) -> list[RenderableType]:
    names = (
        ("save to staged", picture.pgt1),
        ("save to durable", picture.pgt2),
        ("stall of training", picture.stall),
    )
    known = [(name, timings) for name, timings in names if timings.seconds]
    found: list[RenderableType] = []
    if known:
        rows = table("SECONDS", "LAST", "MEDIAN", "NEWEST RIGHTMOST", right=("LAST", "MEDIAN"))
        for name, timings in known:
            rows.add_row(name, _short(timings.last), _short(timings.median), _sparks(timings, ascii_only))
        found = [Text(), rows]
    if picture.interval is not None:
        every = picture.interval
        found.append(
            Text(f"interval: every {every.steps} steps or {seconds(every.seconds)}, from the last two saves")
        )
        if every.why:  # the reason begins with the steps, which the line above has
            found.append(Text(f"  auto: {plain(every.why).removeprefix(f'every {every.steps} steps: ')}"))
    return found


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 0.1 else seconds(value)


def _sparks(timings: Timings, ascii_only: bool) -> str:
    return spark(timings.seconds[-_BAR_CELLS:], ascii_only)


# -- ranks and lines ---------------------------------------------------------------------------------------------------


def _ranks(picture: Picture, shown: int) -> list[RenderableType]:
    if not picture.ranks:
        return []
    rows = table(
        "RANK",
        "HOST",
        "STATE",
        "SAVED STEP",
        "HEARD",
        "STALL",
        right=("RANK", "SAVED STEP", "HEARD", "STALL"),
    )
    for rank in picture.ranks[:shown]:
        rows.add_row(*_rank(rank), style=_RANK_STYLE.get(rank.state, ""))
    found: list[RenderableType] = [Text(), rows]
    rest = picture.ranks[shown:]
    more = picture.ranks_total - len(picture.ranks[:shown])
    if more > 0:
        steps = {rank.step for rank in rest}
        at = f", at step {steps.pop()}" if len(steps) == 1 and None not in steps and len(rest) == more else ""
        found.append(Text(f"and {more} more ranks, in no worse state{at}"))
    return found


def _rank(rank: RankStatus) -> tuple[str, ...]:
    quiet = "-" if rank.quiet_seconds is None else f"{seconds(rank.quiet_seconds)} ago"
    step = "-" if rank.step is None else str(rank.step)
    return (
        str(rank.rank),
        plain(rank.host)[:_HOST_CHARACTERS_MAX],
        rank.state,
        step,
        quiet,
        _short(rank.stall_seconds),
    )


def _declined(picture: Picture) -> list[RenderableType]:
    if not picture.not_taken:
        return []
    causes = sorted(picture.not_taken.items(), key=lambda cause: -cause[1])
    counted = ", ".join(f"{count} {plain(cause)}" for cause, count in causes)
    found: list[RenderableType] = [
        Text(),
        Text(f"checkpoints not taken: {sum(picture.not_taken.values())} ({counted})"),
    ]
    if picture.declined:
        last = picture.declined[-1]
        found.append(Text(f"  last: {_line(last, picture.now_unix)}"))
    return found


def _said(title: str, lines: Sequence[StatusLine], now_unix: float, shown: int) -> list[RenderableType]:
    if not lines:
        return []
    more = f", {len(lines) - shown} earlier ones not shown" if len(lines) > shown else ""
    return [Text(), Text(f"{title}{more}"), *(Text(f"  {_line(line, now_unix)}") for line in lines[-shown:])]


def _line(line: StatusLine, now_unix: float) -> str:
    step = "" if line.step is None else f" step {line.step}"
    return f"{seconds(max(0.0, now_unix - line.at_unix))} ago {plain(line.event)}{step}: {plain(line.text)}"


# -- pieces ------------------------------------------------------------------------------------------------------------


def bar(fraction: float, ascii_only: bool = False, cells: int = _BAR_CELLS) -> str:
    """A bar such as `████░░░░`, which is full only at 1 and empty only at 0."""
    done, left = ("#", ".") if ascii_only else ("█", "░")
    fraction = min(1.0, max(0.0, fraction))
    filled = math.floor(fraction * cells) if fraction > 0.5 else math.ceil(fraction * cells)
    return done * filled + left * (cells - filled)


def spark(values: Sequence[float], ascii_only: bool = False) -> str:
    """One character for each value, by its place between the smallest and the largest."""
    marks = _ASCII_SPARKS if ascii_only else _SPARKS
    if not values:
        return ""
    least, span = min(values), max(values) - min(values)
    if span <= 0:
        return marks[len(marks) // 2] * len(values)
    return "".join(marks[min(len(marks) - 1, int((value - least) / span * len(marks)))] for value in values)


def _age(picture: Picture, at_unix: float) -> str:
    return seconds(max(0.0, picture.now_unix - at_unix))
