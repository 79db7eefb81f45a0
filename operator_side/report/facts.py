"""All known facts of a run, from which page and sentences are made. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.telemetry.event_reading import Log, LoggedEvent, as_number, as_text
from holdfast.telemetry.event_text import NOTICES, TROUBLES, event_text
from holdfast.telemetry.rows import CheckpointRow, CheckpointRows, StoredCheckpoint, gather_checkpoints
from operator_side.report.attempts import ReportedAttempt, gather_attempts
from operator_side.report.goodput import Goodput, Interruption, compute_goodput, find_interruptions

_MORE_TROUBLES = frozenset({"stager_lost", "damaged", "skipped", "interval_loose", "set_aside", "rewound"})
_LOSS_MAX = 1e15


@dataclass(slots=True)
class Incident:
    """A notice or a trouble. Equal ones of several ranks are merged, with the time of the first."""

    at_unix: float
    event: str
    step: int | None
    text: str
    is_notice: bool
    times: int = 1


@dataclass(frozen=True, slots=True)
class SecondsSpread:
    count: int
    least: float
    median: float
    p90: float
    p99: float
    greatest: float


@dataclass
class RunFacts:
    run: str
    log: Log
    checkpoints: CheckpointRows
    attempts: list[ReportedAttempt]
    interruptions: list[Interruption]
    goodput: Goodput | None
    incidents: list[Incident]
    begin_unix: float | None  # the first known time; None if nothing is known of the run
    end_unix: float | None
    losses: list[tuple[int, float]] = field(default_factory=list)  # steps and training losses, in order
    final_message: str = ""  # the supervisor's last message, if it ended
    unknown: list[str] = field(default_factory=list)  # sentences on what the sources cannot tell, and why

    @property
    def rows(self) -> list[CheckpointRow]:
        """The checkpoints, oldest first."""
        return self.checkpoints.rows

    @property
    def newest_good(self) -> CheckpointRow | None:
        return self.checkpoints.newest("verified") or self.checkpoints.newest("durable")


def gather_facts(
    run: str,
    log: Log,
    stored: Sequence[StoredCheckpoint] = (),
    *,
    dollars_per_hour: float | None = None,
    notes: Iterable[str] = (),
) -> RunFacts:
    """Collect the facts of a run."""
    checkpoints = gather_checkpoints(log.events, stored)
    attempts = gather_attempts(log.events)
    begin, end = _bounds(log.events, checkpoints.rows, attempts)
    until = _worked_until(attempts, log.events)
    rows, price = checkpoints.rows, dollars_per_hour
    interruptions = find_interruptions(attempts, rows, end_unix=until, dollars_per_hour=price)
    goodput = compute_goodput(attempts, interruptions, rows, end_unix=until, dollars_per_hour=price)
    facts = RunFacts(
        run,
        log,
        checkpoints,
        attempts,
        interruptions,
        goodput,
        _incidents(log.events),
        begin,
        end,
        _losses(log.events, stored),
        _final_message(log.events, attempts),
    )
    facts.unknown = [*notes, *_unknown(facts, has_stored=bool(stored), has_price=price is not None)]
    return facts


def _final_message(events: Sequence[LoggedEvent], attempts: Sequence[ReportedAttempt]) -> str:
    over = [event for event in events if event.event == "over" and event.role == "supervisor"]
    is_last = bool(over) and (not attempts or over[-1].time >= attempts[-1].began_at_unix)
    return as_text(over[-1].fields.get("message")) if is_last else ""


def _bounds(
    events: Sequence[LoggedEvent], rows: Sequence[CheckpointRow], attempts: Sequence[ReportedAttempt]
) -> tuple[float | None, float | None]:
    times = [event.time for event in events[:1]] + [event.time for event in events[-1:]]
    for row in rows:
        times += [at for at in (row.saved_at_unix, row.durable_at_unix, row.read_at_unix) if at is not None]
    times += [one.began_at_unix for one in attempts[:1]]
    return min(times, default=None), max(times, default=None)


def _worked_until(attempts: Sequence[ReportedAttempt], events: Sequence[LoggedEvent]) -> float:
    """Return when the work, or the wait for machines, ended; the flusher may have continued."""
    if not attempts:
        return 0.0
    last = attempts[-1]
    if not last.was_lost:
        return last.stopped_at_unix
    times = [event.time for event in events if event.role == "supervisor" or not last.is_supervised]
    return max([last.stopped_at_unix, *times[-1:]])


def _losses(events: Iterable[LoggedEvent], stored: Iterable[StoredCheckpoint]) -> list[tuple[int, float]]:
    """Return the training losses; without any, one among the metrics of checkpoints: they would not make one curve. A
    step that was done twice has the newest.
    """
    records = [(one.step, one.record) for one in stored] + [(event.step, event.fields) for event in events]
    for loss_in in (_own_loss, _loss_in):
        read = [(step, loss_in(fields)) for step, fields in records if step is not None]
        if found := {step: loss for step, loss in read if loss is not None}:
            return sorted(found.items())
    return []


def _own_loss(fields: Mapping[str, Any]) -> float | None:
    return as_number(fields.get("loss"), least=-_LOSS_MAX)


def _loss_in(fields: Any) -> float | None:
    """Return the loss in an event or in a checkpoint's record: its own, or one among the metrics of rank 0."""
    if not isinstance(fields, Mapping):
        return None
    loss = _own_loss(fields)
    metrics = fields.get("metrics")
    if loss is None and isinstance(metrics, Mapping):
        named = sorted((len(name), name) for name in metrics if isinstance(name, str) and "loss" in name)
        loss = as_number(metrics[named[0][1]], least=-_LOSS_MAX) if named else None
    if loss is None and isinstance(ranks := fields.get("ranks"), Mapping):
        loss = _loss_in(ranks.get("0"))
    return _loss_in(fields.get("record")) if loss is None else loss


def _incidents(events: Iterable[LoggedEvent]) -> list[Incident]:
    found: dict[tuple[str, int | None, str], Incident] = {}
    for event in events:
        if event.event not in NOTICES | TROUBLES | _MORE_TROUBLES:
            continue
        words = event_text(event.fields)
        key = (event.event, event.step, words)
        if key in found:
            found[key].times += 1
        else:
            found[key] = Incident(event.time, event.event, event.step, words, event.event in NOTICES)
    return sorted(found.values(), key=lambda one: one.at_unix)


def _unknown(facts: RunFacts, *, has_stored: bool, has_price: bool) -> list[str]:
    log, has_rows = facts.log, bool(facts.rows)
    roles = {event.role for event in log.events}
    is_supervised = any(one.is_supervised for one in facts.attempts)
    unknown_loss = any(one.lost is None and one.recovery is not None for one in facts.interruptions)
    sentences = {
        "No event log was given (--events). Attempts, interruptions, goodput, and declined or pruned steps are not "
        "known; checkpoints are shown from their manifests.": not log.events,
        "The log of `holdfast run` (status.jsonl) was not given. How attempts ended, and how training went on, comes "
        "from the logs of stager and ranks, or is not known.": log.events and not is_supervised,
        "No event log of a rank was given (setting `events` on the ranks' machines). Declined steps are those in the "
        "log of the stager, and times of ranks come from manifests and the flusher.": (
            log.events and "trainer" not in roles
        ),
        "No manifest was read: checkpoints are shown from the logs, and what the store has now is not known.": (
            not has_stored
        ),
        f"{log.unreadable} lines of the logs are not events (a full disk may have cut them) and are left out.": (
            log.unreadable
        ),
        **{
            f"The last line of {name} is incomplete: its writer was killed, or is still writing.": True
            for name in log.unfinished
        },
        "The logs do not have the fill level or the size of the ring. The report shows the most bytes of checkpoints "
        "between save() and durable at a time; the ring cannot have held more.": has_rows,
        "Rates are means over the whole way of one checkpoint, including waits; they do not show the highest speed of "
        "link or store.": has_rows,
        "No price was given (--dollars-per-hour), so costs are not shown.": not has_price,
        "For some interruptions the lost work is not known: the checkpoint from which training resumed is in no log "
        "and no longer in the store. Goodput is then an upper bound.": unknown_loss,
        "Times are by the clock of the machine that wrote them; the clocks may differ.": len(roles) > 1,
    }
    return [sentence for sentence, is_so in sentences.items() if is_so]


def compute_spread(values: Iterable[float]) -> SecondsSpread | None:
    """Return least, median, percentiles (nearest rank) and greatest; None without values."""
    found = sorted(values)
    if not found:
        return None

    def at(share: float) -> float:
        return found[min(len(found) - 1, max(0, math.ceil(share * len(found)) - 1))]

    return SecondsSpread(len(found), found[0], statistics.median(found), at(0.90), at(0.99), found[-1])


def ring_bytes(rows: Iterable[CheckpointRow], end_unix: float) -> list[tuple[float, int]]:
    """Return bytes of saved, not yet durable checkpoints over time: an upper bound of the ring's content."""
    changes: list[tuple[float, int]] = []
    for row in rows:
        begin, nbytes = row.saved_at_unix, row.image_bytes
        done = row.durable_at_unix or row.failed_at_unix or (end_unix if row.state == "staged" else None)
        if begin is not None and nbytes and done is not None and done >= begin:
            changes += [(begin, nbytes), (done, -nbytes)]
    levels: list[tuple[float, int]] = []
    held = 0
    for at, change in sorted(changes):
        held += change
        if levels and levels[-1][0] == at:
            levels[-1] = (at, held)
        else:
            levels.append((at, held))
    return levels
