"""The facts that stager and flusher remember for `holdfast status`, taken from the events that they emit.

    EventLog.emit ─► StatusState.handle_event ─► newest checkpoints, declined steps, notices, problems, the interval
                                 └─► StatusState.build_document ─► `holdfast status`

The size is bounded: lists keep the newest, texts are cut.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.save_record import StepRecord
from holdfast.telemetry.causes import OTHER, cause_from
from holdfast.telemetry.event_text import NOTICES, TROUBLES, event_text, truncate
from holdfast.telemetry.status_document import (
    CHECKPOINTS_MAX,
    LINES_MAX,
    LOSSES_MAX,
    RANKS_MAX,
    TEXT_CHARACTERS_MAX,
    FailuresStatus,
    RankStatus,
    StatusDocument,
    StatusLine,
    Transport,
    checkpoint_status,
)
from holdfast.wire.step_proof import ResumeProof

_CAUSES_MAX = 16
_STATE_ORDER = ("lost", "silent", "coming", "here", "left")


class StatusState:
    """State of one process for `holdfast status`. Any thread. `ranks`: returns all ranks, for `build_document`."""

    def __init__(
        self,
        role: Literal["stager", "flusher"],
        run: str,
        *,
        ranks: Callable[[], Sequence[RankStatus]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._role, self._run, self._ranks, self._clock = role, run, ranks, clock
        self._lock = threading.Lock()
        self._since = clock()
        self._attempt = 0
        self._checkpoints: OrderedDict[CheckpointId, dict[str, Any]] = OrderedDict()
        self._causes: Counter[str] = Counter()
        self._declined: deque[StatusLine] = deque(maxlen=LINES_MAX)
        self._notices: deque[StatusLine] = deque(maxlen=LINES_MAX)
        self._problems: deque[StatusLine] = deque(maxlen=LINES_MAX)
        # rank → step, seconds; of the newest durable checkpoint
        self._stalls: dict[int, tuple[int, float]] = {}
        self._attached: bool | None = False if role == "flusher" else None
        self._ended_at: float | None = None
        self._interval_why = ""
        self._failures: FailuresStatus | None = None
        self._resume: ResumeProof | None = None
        self._transport: Transport | None = None
        self._losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_MAX)

    def handle_event(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        """Remember one event; ignore unknown ones."""
        with self._lock:
            if event in NOTICES:
                self._notices.append(self._status_line(event, fields, step))
            elif event in TROUBLES:
                self._problems.append(self._status_line(event, fields, step))
            match event:
                case "flusher_ready" | "stager_ready":
                    self._since, self._attempt = self._clock(), fields["attempt"]
                    self._transport = fields.get("transport")
                case "flusher_replaced":
                    self._attempt = fields["attempt"]
                case "stager_attached":
                    self._on_stager_attached(fields)
                case "stager_gone":
                    self._attached, self._ended_at = False, self._clock()
                case "interval":
                    self._interval_why = truncate(str(fields["why"]))
                case "interval_loose":
                    self._interval_why = truncate(f"powers of two, until the next change: {fields['reason']}")
                case "resume_proof":
                    self._resume = ResumeProof.from_json(fields)
                case "found":
                    self._on_found(fields, step)
                case _ if step is not None:
                    self._handle_step_event(event, fields, step)

    def _on_stager_attached(self, fields: Mapping[str, Any]) -> None:
        self._attached, self._ended_at, self._attempt = True, None, fields["attempt"]
        if "failures" in fields:
            self._failures = FailuresStatus(failures=fields["failures"], seconds=fields["seen_seconds"])

    def _handle_step_event(self, event: str, fields: Mapping[str, Any], step: int) -> None:
        key = CheckpointId(int(fields.get("attempt", self._attempt)), step)
        update = functools.partial(self._update_checkpoint, key)
        now = self._clock()
        match event:
            case "flush_began" | "recovered":
                update(image_bytes=fields.get("image_bytes"), share=fields.get("share"))
            case "share_sealed" | "seal_read":
                sealed = self._checkpoints.get(key, {}).get("sealed", ())
                update(sealed=tuple(sorted({*sealed, str(fields["share"])})), held="")
            case "loss" if math.isfinite(fields["loss"]):
                self._losses.append((step, float(fields["loss"])))
            case "staged":
                pgt1_seconds = float(fields["pgt1_seconds"])
                update(image_bytes=fields["image_bytes"], staged_at_unix=now)
                update(saved_at_unix=now - pgt1_seconds, pgt1_seconds=pgt1_seconds)
            case "published":
                update(durable_at_unix=now, held="")
            case "durable":
                self._on_durable(key, fields, now)
            case "verified" | "drifted" | "doubtful" | "bad" | "verify_failed":
                update(read_back=event, read_back_at_unix=now, nonfinite=fields.get("nonfinite"))
            case "flush_held":
                update(held=truncate(str(fields.get("message", "held"))))
            case "flush_resumed":
                update(held="")
            case "declined" | "failed" | "flush_failed":
                cause = cause_from(fields)
                is_known = cause in self._causes or len(self._causes) < _CAUSES_MAX
                self._causes[cause if is_known else OTHER] += 1
                self._declined.append(self._status_line(event, fields, step))
                if event != "declined":
                    update(failed=truncate(str(fields.get("message") or fields.get("reason") or event)))

    def _on_durable(self, key: CheckpointId, fields: Mapping[str, Any], now: float) -> None:
        record = StepRecord.from_json(fields.get("record"))
        stalls = record.stall_seconds
        self._update_checkpoint(
            key,
            image_bytes=fields["image_bytes"],
            durable_at_unix=now,
            pgt2_seconds=fields["pgt2_seconds"],
            saved_at_unix=record.saved_at_unix or now - fields["pgt2_seconds"],
            staged_at_unix=record.staged_at_unix,
            pgt1_seconds=record.pgt1_seconds,
            stall_seconds=max(stalls.values(), default=None),
            held="",
        )
        if stalls:
            self._stalls = {rank: (key.step, seconds) for rank, seconds in stalls.items()}

    def _on_found(self, fields: Mapping[str, Any], step: int | None) -> None:
        created = datetime.fromisoformat(fields["created"]).timestamp()
        state = "verified" if fields["state"] == "verified" else ""
        key = CheckpointId(int(fields["attempt"]), step or 0)
        self._update_checkpoint(key, durable_at_unix=created, saved_at_unix=created, read_back=state)

    def _update_checkpoint(self, key: CheckpointId, **known: Any) -> None:
        row = self._checkpoints.setdefault(key, {})
        row.update({name: value for name, value in known.items() if value is not None})
        while len(self._checkpoints) > CHECKPOINTS_MAX:
            del self._checkpoints[min(self._checkpoints)]

    def _status_line(self, event: str, fields: Mapping[str, Any], step: int | None) -> StatusLine:
        return StatusLine(at_unix=self._clock(), event=event, step=step, text=event_text(fields))

    # -- the document ----------------------------------------------------------------------------------------------

    def build_document(self) -> StatusDocument:
        """Build the document for the current state."""
        ranks = list(self._ranks()) if self._ranks is not None else []
        with self._lock:
            if self._ranks is None:
                ranks = [
                    RankStatus(rank=rank, step=step, stall_seconds=seconds)
                    for rank, (step, seconds) in self._stalls.items()
                ]
            return StatusDocument(
                role=self._role,
                run=truncate(self._run, 4 * TEXT_CHARACTERS_MAX),
                pid=os.getpid(),
                attempt=self._attempt,
                since_unix=self._since,
                now_unix=self._clock(),
                ranks_total=len(ranks),
                ranks=tuple(sorted(ranks, key=_worst_first)[:RANKS_MAX]),
                checkpoints=tuple(
                    checkpoint_status(attempt, step, **row)
                    for (attempt, step), row in sorted(self._checkpoints.items())
                ),
                not_taken=dict(self._causes),
                declined=tuple(self._declined),
                notices=tuple(self._notices),
                problems=tuple(self._problems),
                stager_attached=self._attached,
                work_ended_at_unix=self._ended_at,
                transport=self._transport,
                interval_why=self._interval_why,
                losses=tuple(self._losses),
                seen=self._failures,
                resume="" if self._resume is None else self._resume.verdict.value,
                resume_text=""
                if self._resume is None
                else truncate(self._resume.text, 4 * TEXT_CHARACTERS_MAX),
            )


def _worst_first(rank: RankStatus) -> tuple[int, int, float, int]:
    """Sort key: by state (lost, silent, …), then by the oldest step, then by the longest stall."""
    step = -1 if rank.step is None else rank.step
    return (_STATE_ORDER.index(rank.state), step, -(rank.stall_seconds or 0.0), rank.rank)
