"""Combines what stager, flusher, ring and store report into one status of a run. Pure.

All of them name a checkpoint by (attempt, step). If two sources disagree, the closer one wins: the ring for bytes, the
stager for ranks, the earlier time for `save()`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.save_record import StepRecord
from holdfast.policy.hazard import Hazard
from holdfast.telemetry.rows import StoredCheckpoint
from holdfast.telemetry.status_document import (
    CHECKPOINTS_MAX,
    CheckpointStatus,
    RankStatus,
    StatusDocument,
    StatusLine,
    Transport,
    checkpoint_status,
)
from holdfast.wire.failure_count import FailureCount
from operator_side.status.loss import Loss, LossInputs, SavedPoint, loss_with_node, loss_with_trainers
from operator_side.status.ring_files import RingCheckpoint, RingSnapshot
from operator_side.status.share_progress import ShareProgress, ShareSnapshot, share_progress

FAILURES = "; failures: "  # in the reason of an interval
LEVELS = ("staged", "durable", "verified")
_HISTORY = 32  # values of each timing


@dataclass(frozen=True, slots=True)
class Peer:
    """Stager or flusher."""

    state: Literal["here", "silent", "gone"]  # `silent`: its socket exists, but it does not answer
    pid: int | None = None
    since_unix: float | None = None
    note: str = ""  # a sentence about it, for the user


@dataclass(frozen=True, slots=True)
class Level:
    """The newest checkpoint of a level, when it reached the level, and how many of its numbers are NaN or infinite."""

    attempt: int
    step: int
    at_unix: float | None
    nonfinite: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one kind over the newest checkpoints, oldest first."""

    seconds: tuple[float, ...] = ()

    @property
    def last(self) -> float | None:
        return self.seconds[-1] if self.seconds else None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, slots=True)
class Interval:
    """The distance between the last two saves of the job."""

    steps: int
    seconds: float
    why: str = ""  # with `every="auto"` the stager's reason for the current interval


@dataclass(frozen=True, slots=True)
class RunStatus:
    """All facts about a run. Lists have the newest last, but `ranks` has the worst first."""

    run: str
    now_unix: float
    attempt: int
    is_running: bool
    flusher: Peer
    stager: Peer
    transport: Transport | None
    waits_at: str  # HOST:PORT of a standing stager without a job; otherwise ""
    resume: str  # how the first step after the last resume compares with the same step before; "": no resume
    resume_text: str  # the same as a sentence
    ranks: tuple[RankStatus, ...]
    ranks_total: int
    levels: Mapping[str, Level]
    losses: tuple[tuple[int, float], ...]  # training steps and their losses, as the stager heard them
    loss_trainers: Loss
    loss_node: Loss
    ring: RingSnapshot | None
    flights: tuple[RingCheckpoint, ...]
    shares: tuple[ShareProgress, ...]  # for the newest of `flights`, if several stagers write one file
    pgt1: Timings
    pgt2: Timings
    stall: Timings
    interval: Interval | None
    failures: (
        str  # how often the run is interrupted, by `every="auto"` or else by the flusher's count; "": unknown
    )
    checkpoints: tuple[CheckpointStatus, ...]
    not_taken: Mapping[str, int]
    declined: tuple[StatusLine, ...]
    notices: tuple[StatusLine, ...]
    problems: tuple[StatusLine, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def newest_unix(self) -> float:
        """Time of the last sign of the run: a process began, or a checkpoint reached a level."""
        times = [
            self.stager.since_unix,
            self.flusher.since_unix,
            *(one.at_unix for one in self.levels.values()),
        ]
        return max((at for at in times if at is not None), default=0.0)

    def document(self) -> dict[str, Any]:
        """Return the document of `--json` (docs/status.md)."""
        found = dataclasses.asdict(
            dataclasses.replace(
                self, ranks=(), checkpoints=(), declined=(), notices=(), problems=(), ring=None
            )
        )
        for name in ("checkpoints", "declined", "notices", "problems", "ranks"):
            found[name] = [row.model_dump() for row in getattr(self, name)]
        for flight in found["flights"]:
            del flight["record"]
        found["notes"] = list(self.notes)
        if self.ring is not None:
            found["ring"] = {
                name: getattr(self.ring, name) for name in ("attempt", "chunk_bytes", "ring_chunks", "chunks")
            }
        for name in ("pgt1", "pgt2", "stall"):
            of: Timings = getattr(self, name)
            del found[name]
            found[f"{name}_seconds"] = {"last": of.last, "median": of.median, "history": list(of.seconds)}
        return found


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """Everything that one look found out about a run. `stored`: the checkpoints whose manifests were read."""

    flusher: Peer
    stager: Peer
    flusher_document: StatusDocument | None = None
    stager_document: StatusDocument | None = None
    ring: RingSnapshot | None = None
    others: Sequence[ShareSnapshot] = ()  # more stagers of the run on this machine
    stored: Iterable[StoredCheckpoint] = ()
    notes: Iterable[str] = ()


def compose(
    run: str, now_unix: float, found: RunEvidence, *, dollars_per_hour: float | None = None
) -> RunStatus:
    """Combine the findings of one look into a status. `run`: URL of the run, or another name for it."""
    flusher, stager, ring = found.flusher, found.stager, found.ring
    flusher_document, stager_document = found.flusher_document, found.stager_document
    rows = _rows(flusher_document, stager_document, ring, found.stored)
    documents = (flusher_document, stager_document)
    attempt = max((document.attempt for document in documents if document is not None), default=0)
    attempt = attempt or max((key[0] for key in rows), default=0)
    ranks, ranks_total = _ranks(flusher_document, stager_document, ring)
    present = [rank for rank in ranks if rank.state in {"coming", "here", "silent"}]
    is_running = stager.state != "gone" and (stager_document is None or bool(present))
    # Ranks that are still joining have done no work that a kill could lose.
    may_work = is_running and (not present or any(rank.state != "coming" for rank in present))
    since = stager.since_unix if stager.since_unix is not None else flusher.since_unix
    flights = tuple(_flights(ring, rows))
    shares = {
        key: share_progress(key, ring, flusher_document, found.others)
        for key in (CheckpointId(one.attempt, one.step) for one in flights)
    }
    partial = {
        key for key, of in shares.items() if any(one.state in ("receiving", "elsewhere") for one in of)
    }
    levels = {name: level for name in LEVELS if (level := _newest(rows, name, partial)) is not None}
    saved = [(key, row.saved_at_unix) for key, row in sorted(rows.items()) if row.saved_at_unix is not None]
    interval = last_interval(saved)
    if interval is not None and stager_document is not None:
        interval = dataclasses.replace(interval, why=stager_document.interval_why)
    known = LossInputs(
        now_unix,
        (now_unix if since is None else since) if may_work else None,
        staged=_point(rows, levels.get("staged")),
        durable=_point(rows, levels.get("durable")),
        newest=SavedPoint(*saved[-1][0], saved[-1][1]) if saved else None,
        step_seconds=interval.seconds / interval.steps if interval else None,
        dollars_per_hour=dollars_per_hour,
    )
    document = stager_document or flusher_document
    return RunStatus(
        run=run,
        now_unix=now_unix,
        attempt=attempt,
        is_running=is_running,
        flusher=flusher,
        stager=stager,
        transport=stager_document.transport if stager_document else None,
        waits_at=stager_document.waits_at if stager_document else "",
        resume=stager_document.resume if stager_document else "",
        resume_text=stager_document.resume_text if stager_document else "",
        ranks=ranks,
        ranks_total=ranks_total,
        levels=levels,
        losses=stager_document.losses if stager_document else (),
        loss_trainers=loss_with_trainers(known),
        loss_node=loss_with_node(known),
        ring=ring,
        flights=flights,
        shares=next(reversed(shares.values()), ()),
        pgt1=_timings(rows, "pgt1_seconds"),
        pgt2=_timings(rows, "pgt2_seconds"),
        stall=_timings(rows, "stall_seconds"),
        interval=interval,
        failures=_failures(flusher_document, stager_document),
        checkpoints=tuple(row for _, row in sorted(rows.items()))[-CHECKPOINTS_MAX:],
        not_taken=document.not_taken if document else {},
        declined=document.declined if document else (),
        notices=_lines(stager_document, flusher_document, "notices"),
        problems=_lines(stager_document, flusher_document, "problems"),
        notes=tuple(found.notes),
    )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _rows(
    flusher: StatusDocument | None,
    stager: StatusDocument | None,
    ring: RingSnapshot | None,
    stored: Iterable[StoredCheckpoint],
) -> dict[CheckpointId, CheckpointStatus]:
    """Merge the facts from flusher, stager, ring and store on each checkpoint."""
    rows: dict[CheckpointId, CheckpointStatus] = {}
    for one in stored:
        _merge(rows, _row_of_stored(one))
    for document in (flusher, stager):
        for row in document.checkpoints if document else ():
            _merge(rows, row)
    for checkpoint in ring.checkpoints if ring else ():
        _merge(rows, _row_of_ring(checkpoint))
    return rows


def _merge(rows: dict[CheckpointId, CheckpointStatus], row: CheckpointStatus) -> None:
    key = CheckpointId(row.attempt, row.step)
    before = rows.get(key)
    if before is None:
        rows[key] = row
        return
    more = {name: value for name, value in row if value not in {None, "", ()}}
    if before.saved_at_unix is not None and row.saved_at_unix is not None:
        more["saved_at_unix"] = min(before.saved_at_unix, row.saved_at_unix)
    rows[key] = before.model_copy(update=more)


def _row_of_stored(one: StoredCheckpoint) -> CheckpointStatus:
    return checkpoint_status(
        one.attempt,
        one.step,
        image_bytes=one.image_bytes,
        saved_at_unix=one.saved_at_unix,
        staged_at_unix=one.saved_at_unix + one.pgt1_seconds,
        durable_at_unix=one.durable_at_unix,
        pgt1_seconds=one.pgt1_seconds,
        pgt2_seconds=one.pgt2_seconds,
        stall_seconds=max(StepRecord.from_json(one.record).stall_seconds.values(), default=None),
        read_back="" if one.state == "durable" else one.state,
        nonfinite=one.nonfinite,
    )


def _row_of_ring(checkpoint: RingCheckpoint) -> CheckpointStatus:
    record = StepRecord.from_json(checkpoint.record)
    saved, staged, pgt1 = record.saved_at_unix, record.staged_at_unix, record.pgt1_seconds
    is_staged = checkpoint.state == "staged"
    return checkpoint_status(
        checkpoint.attempt,
        checkpoint.step,
        image_bytes=checkpoint.image_bytes,
        saved_at_unix=saved,
        # A staged checkpoint counts as staged even if its time is missing.
        staged_at_unix=(saved or 0.0 if staged is None else staged) if is_staged else None,
        pgt1_seconds=pgt1 if pgt1 is not None and pgt1 >= 0 else None,
        stall_seconds=max(record.stall_seconds.values(), default=None),
    )


def _newest(
    rows: Mapping[CheckpointId, CheckpointStatus], level: str, partial: Collection[CheckpointId]
) -> Level | None:
    """Return the newest good checkpoint that has reached the level; a durable one counts as staged, too. `partial`:
    those of several stagers of which a share may not be staged.
    """
    for key, row in sorted(rows.items(), reverse=True):
        staged_at = None if key in partial else row.staged_at_unix
        at = {
            "staged": staged_at if staged_at is not None else row.durable_at_unix,
            "durable": row.durable_at_unix,
            "verified": (row.read_back_at_unix or row.durable_at_unix)
            if row.read_back == "verified"
            else None,
        }[level]
        is_lost = row.read_back == "bad" or (row.failed and row.durable_at_unix is None)
        if at is not None and not is_lost:
            return Level(*key, at, row.nonfinite)
    return None


def _point(rows: Mapping[CheckpointId, CheckpointStatus], level: Level | None) -> SavedPoint | None:
    if level is None:
        return None
    row = rows[CheckpointId(level.attempt, level.step)]
    saved = row.saved_at_unix if row.saved_at_unix is not None else level.at_unix
    return SavedPoint(level.attempt, level.step, saved or 0.0)


def last_interval(saved: Sequence[tuple[CheckpointId, float]]) -> Interval | None:
    """Return the distance between the last two saves if one job made both. `saved`: in order."""
    if len(saved) < 2:
        return None
    (before, before_at), (last, last_at) = saved[-2:]
    if before[0] != last[0] or last[1] <= before[1] or last_at <= before_at:
        return None
    return Interval(last[1] - before[1], last_at - before_at)


def _timings(rows: Mapping[CheckpointId, CheckpointStatus], name: str) -> Timings:
    values = [getattr(row, name) for _, row in sorted(rows.items())]
    return Timings(tuple(value for value in values if value is not None)[-_HISTORY:])


def _flights(
    ring: RingSnapshot | None, rows: Mapping[CheckpointId, CheckpointStatus]
) -> Iterable[RingCheckpoint]:
    for checkpoint in ring.checkpoints if ring else ():
        row = rows[CheckpointId(checkpoint.attempt, checkpoint.step)]
        if row.durable_at_unix is None:
            yield dataclasses.replace(checkpoint, held=row.held)


def _failures(flusher: StatusDocument | None, stager: StatusDocument | None) -> str:
    _, begin, line = ("" if stager is None else stager.interval_why).partition(FAILURES)
    if begin:
        return f"{begin.removeprefix('; ')}{line}"
    seen = None if flusher is None else flusher.seen
    return "" if seen is None else Hazard.from_observed(FailureCount(seen.failures, seen.seconds)).description


# -- ranks and lines ---------------------------------------------------------------------------------------------------


def _ranks(
    flusher: StatusDocument | None, stager: StatusDocument | None, ring: RingSnapshot | None
) -> tuple[tuple[RankStatus, ...], int]:
    """Return the stager's ranks, with the stall of each one's newest checkpoint, and their number."""
    if stager is None:
        return (), 0
    stalls = {rank.rank: rank.stall_seconds for rank in (flusher.ranks if flusher else ())}
    for checkpoint in ring.checkpoints if ring else ():  # newest last
        stalls.update(StepRecord.from_json(checkpoint.record).stall_seconds)
    with_stalls = tuple(
        rank.model_copy(update={"stall_seconds": stalls.get(rank.rank, rank.stall_seconds)})
        for rank in stager.ranks
    )
    return with_stalls, max(stager.ranks_total, len(with_stalls))


def _lines(
    stager: StatusDocument | None, flusher: StatusDocument | None, name: str
) -> tuple[StatusLine, ...]:
    found = [line for document in (stager, flusher) if document for line in getattr(document, name)]
    return tuple(sorted(found, key=lambda line: line.at_unix))
