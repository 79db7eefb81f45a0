"""The tiles of a run: goodput, lost steps, cost, the last good step, interruptions. Pure."""

from __future__ import annotations

from typing import NamedTuple

from operator_side.page.chart import Colour
from operator_side.page.words import brief, dollars, moment, plural, share
from operator_side.report.facts import RunFacts


class Tile(NamedTuple):
    """One figure at the top of the page; `colour` has the same meaning as in the charts."""

    name: str
    figure: str
    note: str = ""
    colour: Colour | str = ""


def run_tiles(facts: RunFacts, last_good: Tile) -> list[Tile]:
    """Make all tiles. An unknown figure is a dash, with the reason in the note."""
    return [_goodput(facts), _lost_steps(facts), _cost(facts), last_good, _interruptions(facts)]


def last_good_tile(facts: RunFacts) -> Tile:
    newest = facts.newest_good
    if newest is None:
        return Tile("last good step", "-", "no checkpoint became durable", "lost" if facts.rows else "")
    read = "read back" if newest.state == "verified" else "not read back yet"
    at = newest.read_at_unix or newest.durable_at_unix
    note = f"{read}, attempt {newest.attempt}" + (f", {moment(at)}" if at else "")
    return Tile("last good step", str(newest.step), note, newest.state)


def _goodput(facts: RunFacts) -> Tile:
    goodput = facts.goodput
    if goodput is None or goodput.share is None:
        return Tile("goodput", "-", "no log says when the run trained")
    about = "~" if goodput.is_estimate else ""
    figure = about + share(goodput.parts["new work"], goodput.up_seconds)
    return Tile("goodput", figure, f"of {brief(goodput.up_seconds)} is work that was kept", "training")


def _lost_steps(facts: RunFacts) -> Tile:
    lost = [one.lost for one in facts.interruptions if one.lost is not None]
    if not facts.attempts or (facts.interruptions and not lost):
        later = "known once training resumes" if _is_coming_back(facts) else "no log says what was done twice"
        return Tile("steps lost", "-", later)
    if not lost:
        return Tile("steps lost", "0", "no work was done twice")
    steps = [one.steps for one in lost if one.steps is not None]
    is_estimate = len(steps) < len(facts.interruptions) or any(one.is_estimate for one in lost)
    figure = f"{'~' if is_estimate and steps else ''}{sum(steps):,}"
    note = f"{brief(sum(one.seconds for one in lost))} of work done again"
    return Tile("steps lost", figure, note, "lost" if sum(steps) else "")


def _cost(facts: RunFacts) -> Tile:
    goodput = facts.goodput
    if goodput is None or goodput.dollars_per_hour is None:
        return Tile("cost", "-", "no --dollars-per-hour" if goodput else "no log says how long the run took")
    cost, lost = goodput.dollars(goodput.up_seconds), goodput.dollars(goodput.overhead_seconds)
    return Tile("cost", dollars(cost), f"{dollars(lost)} of it for losses and checkpoints")


def _interruptions(facts: RunFacts) -> Tile:
    if not facts.attempts:
        return Tile("interruptions", "-", "no log has the attempts")
    found = facts.interruptions
    if not found:
        return Tile("interruptions", "0", plural(len(facts.attempts), "attempt"))
    if found[-1].recovery is None:
        note = "restarting" if _is_coming_back(facts) else "training did not resume"
    else:
        note = (
            f"back after {brief(max(one.down_seconds for one in found if one.recovery is not None))} at most"
        )
    return Tile("interruptions", str(len(found)), note, "lost")


def _is_coming_back(facts: RunFacts) -> bool:
    """Whether the last attempt was launched after a loss, and neither trains yet nor has ended."""
    last = facts.attempts[-1] if facts.interruptions else None
    return last is not None and not last.cause and last.training_at_unix is None
