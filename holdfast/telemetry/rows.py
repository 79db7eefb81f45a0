"""Each checkpoint in manifests or events, with its phases on each rank; and each step that was skipped.

    save() ──stall──► copy ──► staged ──► durable ──► read back          one row for (attempt, step)

Most events of trainers and stager do not name the attempt. It is the one that stager or flusher named last; in logs of
trainers alone, it comes from the manifest of that step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest
from holdfast.image.save_record import StepRecord
from holdfast.image.shares import ShareNumber
from holdfast.telemetry.causes import OTHER, cause_from
from holdfast.telemetry.event_reading import TIME_MAX, LoggedEvent, as_int, as_number, as_text

_OLD_CAUSE = re.compile(r"(?:rank \d+: )?([a-z][a-z ]{0,30}): ")
_TIMES = (
    *("wait_seconds", "gate_seconds", "copy_seconds", "save_seconds", "cst_seconds"),
    *("sending_seconds", "sent_seconds", "staged_seconds", "durable_seconds"),
)


@dataclass(slots=True)
class RankTimes:
    """Times of one rank for one checkpoint: seconds since `save()` by the rank's own clock, or durations."""

    host: str = ""
    saved_at_unix: float | None = None  # when the rank called `save()`
    slice_bytes: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # name of the time as in docs/format.md → seconds

    def add_event(self, fields: Mapping[str, Any]) -> None:
        """Add the fields of one event, or of this rank in the checkpoint's record."""
        self.host = as_text(fields.get("host")) or self.host
        saved = as_number(fields.get("saved_at_unix"), TIME_MAX)
        self.saved_at_unix = self.saved_at_unix if saved is None else saved
        slice_bytes = as_int(fields.get("slice_bytes"))
        self.slice_bytes = self.slice_bytes if slice_bytes is None else slice_bytes
        for name in _TIMES:
            value = as_number(fields.get(name))
            if value is not None:
                self.seconds[name] = value


@dataclass(slots=True)
class CheckpointRow:
    """One checkpoint and the phases that it has reached."""

    attempt: int
    step: int
    state: str = "saving"  # one of `_ORDER`, or `failed`
    in_store: bool = False
    note: str = ""
    image_bytes: int | None = None
    saved_at_unix: float | None = None
    staged_at_unix: float | None = None
    durable_at_unix: float | None = None
    read_at_unix: float | None = None
    failed_at_unix: float | None = None
    pgt1_seconds: float | None = None
    pgt2_seconds: float | None = None
    nonfinite: int | None = None  # count of NaN and infinite numbers; None: not counted
    staged_shares: set[str] = field(default_factory=set)  # shares (K/S) of several stagers that are staged
    sealed: dict[str, float] = field(default_factory=dict)  # share (K/S) of several stagers → when written
    record_stalls: dict[int, float] = field(default_factory=dict)
    ranks: dict[int, RankTimes] = field(default_factory=dict)

    @property
    def stalls(self) -> dict[int, float]:
        """Stall of each rank's training thread (CST) by this checkpoint."""
        measured = {r: t.seconds["cst_seconds"] for r, t in self.ranks.items() if "cst_seconds" in t.seconds}
        return self.record_stalls | measured

    @property
    def stall_seconds(self) -> float | None:
        """Stall of the slowest rank, because all ranks continue together."""
        return max(self.stalls.values(), default=None)

    def add_record(self, record: Any) -> None:
        """Add the record from a manifest or from the flusher's event."""
        known = StepRecord.from_json(record)
        self.record_stalls |= known.stall_seconds
        saved = as_number(known.saved_at_unix, TIME_MAX)
        if saved is not None:
            self.note_save(saved)
        self.staged_at_unix = self.staged_at_unix or as_number(known.staged_at_unix, TIME_MAX)
        self.pgt1_seconds = self.pgt1_seconds or as_number(known.pgt1_seconds)
        for rank, times in known.ranks.items():
            self.ranks.setdefault(rank, RankTimes()).add_event(times.to_json())

    def note_save(self, at: float) -> None:
        """Note that a rank called `save()` at this time; the first rank counts."""
        self.saved_at_unix = at if self.saved_at_unix is None else min(at, self.saved_at_unix)


@dataclass(slots=True)
class SkippedStep:
    """A step that was declined or failed."""

    attempt: int
    step: int
    at_unix: float
    kind: str
    cause: str
    reason: str
    ranks: int = 0


@dataclass
class CheckpointRows:
    """The result of `gather_checkpoints`. `rows`: oldest first."""

    rows: list[CheckpointRow] = field(default_factory=list)
    skipped: list[SkippedStep] = field(default_factory=list)

    @property
    def causes(self) -> Counter[str]:
        """Number of skipped steps, by cause."""
        return Counter(one.cause for one in self.skipped)

    def newest(self, *states: str) -> CheckpointRow | None:
        return next((row for row in reversed(self.rows) if row.state in states), None)


def gather_checkpoints(events: Iterable[LoggedEvent], stored: Sequence[StoredCheckpoint]) -> CheckpointRows:
    """Merge the facts from events and manifests."""
    builder = _RowBuilder(stored)
    for event in events:
        builder.add_event(event)
    for one in stored:
        builder.add_stored(one)
    return builder.result()


class _RowBuilder:
    def __init__(self, stored: Sequence[StoredCheckpoint]) -> None:
        self._rows: dict[CheckpointId, CheckpointRow] = {}
        self._skipped: dict[CheckpointId, SkippedStep] = {}
        self._attempt: int | None = None
        self._stored_attempts: dict[int, int] = {}
        for one in stored:
            self._stored_attempts[one.step] = max(one.attempt, self._stored_attempts.get(one.step, 0))

    def add_event(self, event: LoggedEvent) -> None:
        named = as_int(event.fields.get("attempt"))
        if event.event in {"stager_ready", "flusher_ready", "stager_attached", "flusher_replaced"}:
            self._attempt = self._attempt if named is None else named
        if event.step is None or event.event == "found":
            return
        if event.role == "flusher":
            self._add_flusher_event(event, self._row_of_event(event, named))
        elif event.role == "stager" and event.event == "staged":
            self._add_staged(event)
        elif event.event in {"declined", "failed"}:
            self._add_skipped(event)
        elif event.role == "trainer" and event.event in {"save", "staged", "durable"}:
            row = self._row_of_event(event, None)
            times = row.ranks.setdefault(event.rank or 0, RankTimes())
            times.add_event(event.fields)
            if times.saved_at_unix is not None:
                row.note_save(times.saved_at_unix)
            if event.event == "staged":  # the stager's own log may not be available
                row.staged_at_unix = row.staged_at_unix or event.time
                _advance(row, "staged")
            elif event.event == "durable":
                row.durable_at_unix = row.durable_at_unix or event.time
                _advance(row, "durable")

    def _row_of_event(self, event: LoggedEvent, named: int | None) -> CheckpointRow:
        assert event.step is not None
        attempt = named if named is not None else self._attempt
        if attempt is None:
            attempt = self._stored_attempts.get(event.step, 1)
        return self._row_for(CheckpointId(attempt, event.step))

    def _row_for(self, key: CheckpointId) -> CheckpointRow:
        return self._rows.setdefault(key, CheckpointRow(*key))

    def _add_staged(self, event: LoggedEvent) -> None:
        row = self._row_of_event(event, None)
        row.image_bytes = as_int(event.fields.get("image_bytes")) or row.image_bytes
        pgt1 = as_number(event.fields.get("pgt1_seconds"))
        if pgt1 is not None:
            row.note_save(event.time - min(pgt1, event.time))
        if "share" in event.fields:
            row.staged_shares.add(as_text(event.fields["share"]))
            if not _has_all(row.staged_shares):
                return  # the ranks, and the store, say so too: the other stagers' logs may not be available
        row.staged_at_unix = event.time
        row.pgt1_seconds = row.pgt1_seconds if pgt1 is None else pgt1
        _advance(row, "staged")

    def _add_flusher_event(self, event: LoggedEvent, row: CheckpointRow) -> None:
        row.image_bytes = as_int(event.fields.get("image_bytes")) or row.image_bytes
        match event.event:
            case "durable":
                row.durable_at_unix, row.failed_at_unix = event.time, None
                row.add_record(event.fields.get("record"))
                row.pgt2_seconds = as_number(event.fields.get("pgt2_seconds"))
                row.staged_at_unix = row.staged_at_unix or event.time
                row.state, row.note = ("durable", "") if row.state == "failed" else (row.state, row.note)
                _advance(row, "durable")
            case "share_sealed" | "seal_read":  # the second is the lead's: the share's own log may be missing
                share = as_text(event.fields.get("share"))
                row.sealed[share] = min(event.time, row.sealed.get(share, event.time))
            case "doubted":
                row.note = as_text(event.fields.get("note"))
                _advance(row, "doubtful")
            case "verified" | "drifted" | "doubtful" | "bad":
                row.read_at_unix, row.note = event.time, as_text(event.fields.get("note"))
                row.nonfinite = as_int(event.fields.get("nonfinite"))
                _advance(row, event.event)
            case "flush_failed":
                self._add_skipped(event)

    def _add_skipped(self, event: LoggedEvent) -> None:
        row = self._row_of_event(event, as_int(event.fields.get("attempt")))
        key = CheckpointId(row.attempt, row.step)
        reason = as_text(event.fields.get("reason")) or as_text(event.fields.get("message"))
        stated = {name: as_text(event.fields.get(name)) for name in ("cause", "code")}
        cause = cause_from(stated) if any(stated.values()) else _cause_in_old_log(reason)
        kind = "declined" if event.event == "declined" else "failed"
        one = self._skipped.setdefault(key, SkippedStep(*key, event.time, kind, cause, reason))
        one.ranks += event.role == "trainer"
        if kind == "failed" and one.kind == "declined":
            one.kind = kind
        if row.durable_at_unix is None:
            row.state, row.note = kind, reason
            row.failed_at_unix = row.failed_at_unix or event.time

    def add_stored(self, one: StoredCheckpoint) -> None:
        """Add the facts of a manifest, whose state overrides that of the events."""
        row = self._row_for(CheckpointId(one.attempt, one.step))
        row.in_store, row.state, row.image_bytes = True, one.state, one.image_bytes
        row.add_record(one.record)
        saved = as_number(one.saved_at_unix, TIME_MAX)
        if saved is not None:
            row.note_save(saved)
            row.staged_at_unix = row.staged_at_unix or as_number(saved + one.pgt1_seconds, TIME_MAX)
        row.durable_at_unix = row.durable_at_unix or as_number(one.durable_at_unix, TIME_MAX)
        row.pgt1_seconds = row.pgt1_seconds or as_number(one.pgt1_seconds)
        row.pgt2_seconds = row.pgt2_seconds or as_number(one.pgt2_seconds)
        row.note = one.note or row.note
        row.nonfinite = one.nonfinite if row.nonfinite is None else row.nonfinite

    def result(self) -> CheckpointRows:
        """Return the rows. A step that became durable after a failure was not skipped; a declined one gets no row."""
        done = {key for key, row in self._rows.items() if row.durable_at_unix is not None}
        rows = [row for _, row in sorted(self._rows.items()) if row.state != "declined"]
        skipped = [one for key, one in self._skipped.items() if key not in done]
        return CheckpointRows(rows, sorted(skipped, key=lambda one: one.at_unix))


def _has_all(shares: Iterable[str]) -> bool:
    """Whether these shares, written K/S, are all of them."""
    try:
        numbers = [ShareNumber.from_text(share) for share in shares]
    except ValueError:  # of another version
        return False
    return all(len(numbers) >= number.writers for number in numbers)


_ORDER = ("saving", "staged", "durable", "verified", "drifted", "doubtful", "bad")


def _advance(row: CheckpointRow, state: str) -> None:
    if row.state not in _ORDER or _ORDER.index(state) > _ORDER.index(row.state):
        row.state = state


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint as described by its manifest. `note`: why it is bad. `nonfinite`: as in `CheckpointRow`."""

    attempt: int
    step: int
    state: Literal["durable", "verified", "drifted", "doubtful", "bad"]
    image_bytes: int
    durable_at_unix: float
    saved_at_unix: float
    pgt1_seconds: float
    pgt2_seconds: float
    record: Mapping[str, Any]
    note: str = ""
    nonfinite: int | None = None

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> StoredCheckpoint | None:
        """Return None if the manifest's creation time cannot be parsed."""
        try:
            durable_at = datetime.fromisoformat(manifest.created).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
        return cls(
            attempt=manifest.attempt,
            step=manifest.step,
            state=manifest.display_state,
            image_bytes=manifest.image_bytes,
            durable_at_unix=durable_at,
            saved_at_unix=durable_at - manifest.pgt2_seconds,
            pgt1_seconds=manifest.pgt1_seconds,
            pgt2_seconds=manifest.pgt2_seconds,
            record=manifest.record,
            note=manifest.caveat if manifest.is_drifted or manifest.is_doubtful else manifest.note,
            nonfinite=manifest.nonfinite.values if manifest.nonfinite else None,
        )


def _cause_in_old_log(reason: str) -> str:
    """Return the cause at the start of the sentence, for logs of older versions, which have no field for it."""
    match = _OLD_CAUSE.match(reason)
    return match[1] if match else OTHER
