"""A trace of each checkpoint for OpenTelemetry, built from the events of stager and flusher, like their metrics.

docs/monitoring.md lists the spans and their attributes. Each span has one sender: the flusher sends the span
`checkpoint` of a durable checkpoint; the stager sends that of a declined or failed one, and the flusher does if no
stager is left.

Processes do not pass trace ids to each other: the ids are derived from run, attempt and step (`root_ids`), so the
collector joins the spans of stager, flusher, and a flusher that replaces a killed one. Imported only if spans are
wanted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from holdfast import __version__
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.telemetry.causes import cause_from
from holdfast.telemetry.event_text import event_text
from holdfast.telemetry.rows import CheckpointRow

_log = logging.getLogger("holdfast.tracing")

_ROOT = "checkpoint"
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_BEGAN_KEPT = 64  # checkpoints that may still fail
_END_SECONDS_MAX = 5.0  # for the last spans, when the process has finished everything else
# A rank's consecutive phases, each with the field of its waiting time.
_OF_RANK = (("save", "wait_seconds"), ("copy", "gate_seconds"))


def root_ids(run: str, attempt: int, step: int) -> tuple[int, int]:
    """Return a checkpoint's trace id and the id of its span `checkpoint`: bytes 0 to 15 and 16 to 23 of a SHA-256.

    A hash, because samplers expect random trace ids and ids of two runs must differ. `run`: the URL as the flusher
    has it.
    """
    digest = hashlib.sha256(f"{run}\n{attempt}\n{step}".encode()).digest()
    span_id = digest[_TRACE_ID_BYTES : _TRACE_ID_BYTES + _SPAN_ID_BYTES]
    return int.from_bytes(digest[:_TRACE_ID_BYTES], "big"), int.from_bytes(span_id, "big")


class Spans:
    """Spans of one stager or flusher. Any thread. `processors`: receive finished spans, and must not block."""

    def __init__(
        self,
        role: str,
        run: str,
        processors: Sequence[SpanProcessor],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._clock = run, clock
        self._lock = threading.Lock()
        self._ids = _SpanIds()
        ours = Resource.create({"service.name": f"holdfast-{role}", "service.version": __version__})
        # A private provider, not the process-wide one, so that `close` decides when it shuts down.
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()),  # the environment overrides ours
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("holdfast", __version__)
        self._attempt = 0
        self._attached = False
        self._flushes: dict[CheckpointId, Span] = {}
        self._started_at: dict[CheckpointId, float] = {}

    def handle_event(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        """Create the spans of one event; ignore unknown ones."""
        with self._lock:
            match event:
                case "stager_ready" | "flusher_replaced":
                    self._attempt = fields["attempt"]
                case "stager_attached" | "stager_gone":
                    self._attached = event == "stager_attached"
                case _ if step is not None:
                    attempt = fields.get("attempt", self._attempt)  # events of a stager omit its attempt
                    self._handle_step_event(event, fields, CheckpointId(int(attempt), step))

    def close(self) -> None:
        """Send the remaining spans, and wait a few seconds at most for the collector."""
        with self._lock:
            for key in list(self._flushes):
                self._end_flush(key, self._clock(), "this flusher ended before the checkpoint was durable")
        # `shutdown` may wait longer than the exporters' own timeouts, so it runs in a thread that can be left behind.
        ending = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        ending.start()
        ending.join(_END_SECONDS_MAX)
        if ending.is_alive():
            _log.warning(
                "the collector did not take the last spans within %g s, so they are dropped; check that it runs",
                _END_SECONDS_MAX,
            )

    def _handle_step_event(self, event: str, fields: Mapping[str, Any], key: CheckpointId) -> None:
        now = self._clock()
        match event:
            case "staged":
                pgt1_seconds, image_bytes = fields["pgt1_seconds"], fields["image_bytes"]
                self._record_start(key, now - pgt1_seconds)
                values = {"image_bytes": image_bytes, "pgt1_seconds": pgt1_seconds}
                _end(self._begin_phase("stage", key, now - pgt1_seconds, values), now)
            case "declined" | "failed":
                self._record_failure(event, key, now, fields)
            case "flush_began":
                self._record_start(key, now)
                values = {"image_bytes": fields["image_bytes"]}
                self._flushes[key] = self._begin_phase("flush", key, now, values)
            case "flush_held" | "flush_resumed":
                if key in self._flushes:
                    self._flushes[key].add_event(event, {"message": event_text(fields)}, timestamp=_ns(now))
            case "flush_failed":
                self._end_flush(key, now, event_text(fields))
                if not self._attached:
                    self._record_failure("failed", key, now, fields)
            case "share_sealed" if not fields["share"].startswith("1/"):
                self._end_flush(key, now, "")  # the flush of share 1, the lead, ends when it has published
            case "durable":
                self._end_flush(key, now, "")
                self._record_durable(key, now, fields)
            case "verified" | "drifted" | "doubtful" | "bad" | "verify_failed":
                problem = "" if event == "verified" else event_text(fields) or event
                began = now - fields["seconds"]
                _end(self._begin_phase("read_back", key, began, {"outcome": event}), now, problem)

    def _record_durable(self, key: CheckpointId, now: float, fields: Mapping[str, Any]) -> None:
        known = CheckpointRow(*key)
        known.add_record(fields.get("record"))  # checks the record, which comes from other processes
        pgt2_seconds, stalls = fields["pgt2_seconds"], known.stalls
        saved_at = now - pgt2_seconds if known.saved_at_unix is None else known.saved_at_unix
        values = {
            "outcome": "durable",
            "file": fields["file"],
            "image_bytes": fields["image_bytes"],
            "pgt1_seconds": known.pgt1_seconds,
            "pgt2_seconds": pgt2_seconds,
            "stall_seconds": known.stall_seconds,
        }
        self._end_root(key, saved_at, saved_at + pgt2_seconds, values)
        # Only the slowest rank, for which training waits: spans of all ranks would be thousands.
        rank = max(stalls, key=lambda rank: stalls[rank], default=None)
        times = None if rank is None else known.ranks.get(rank)
        if times is None or times.saved_at_unix is None:
            return
        at = times.saved_at_unix
        of_rank = {"rank": rank, "host": times.host, "slice_bytes": times.slice_bytes}
        for phase, wait in _OF_RANK:
            seconds = times.seconds.get(f"{phase}_seconds")
            if seconds is not None:
                span = self._begin_phase(phase, key, at, {**of_rank, wait: times.seconds.get(wait)})
                at += seconds
                _end(span, at)

    def _record_failure(self, outcome: str, key: CheckpointId, now: float, fields: Mapping[str, Any]) -> None:
        began = self._started_at.get(key, now - fields.get("seconds", 0.0))
        values = {"outcome": outcome, "cause": cause_from(fields)}
        self._end_root(key, began, now, values, event_text(fields))

    def _end_flush(self, key: CheckpointId, now: float, problem: str) -> None:
        span = self._flushes.pop(key, None)
        _end(span or self._begin_phase("flush", key, now, {}), now, problem)

    # -- spans -----------------------------------------------------------------------------------------------------

    def _end_root(
        self, key: CheckpointId, began: float, ended: float, values: Mapping[str, Any], problem: str = ""
    ) -> None:
        self._started_at.pop(key, None)
        self._ids.chosen = root_ids(self._run, *key)
        try:
            span = self._begin(_ROOT, key, Context(), began, values)
        finally:
            self._ids.chosen = None
        _end(span, ended, problem)

    def _begin_phase(
        self, name: str, key: CheckpointId, started_at: float, values: Mapping[str, Any]
    ) -> Span:
        trace_id, span_id = root_ids(self._run, *key)
        # The span `checkpoint` may come later or from another process; its trace id tells whether it is sampled.
        decision = self._provider.sampler.should_sample(Context(), trace_id, _ROOT).decision
        is_kept = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_kept else TraceFlags.DEFAULT)
        root = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
        return self._begin(name, key, set_span_in_context(root, Context()), started_at, values)

    def _begin(
        self, name: str, key: CheckpointId, context: Context, started_at: float, values: Mapping[str, Any]
    ) -> Span:
        known = {"run": self._run, "attempt": key[0], "step": key[1], **values}
        attributes = {f"holdfast.{word}": value for word, value in known.items() if value is not None}
        return self._tracer.start_span(name, context, attributes=attributes, start_time=_ns(started_at))

    def _record_start(self, key: CheckpointId, at: float) -> None:
        self._started_at[key] = at
        while len(self._started_at) > _BEGAN_KEPT:
            del self._started_at[min(self._started_at)]


class _SpanIds(IdGenerator):
    """Generator of random ids, unless `chosen` has the trace id and span id of the next span."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.chosen: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.chosen[0] if self.chosen else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        return self.chosen[1] if self.chosen else self._random.generate_span_id()


def _end(span: Span, at: float, problem: str = "") -> None:
    if problem:
        span.set_status(StatusCode.ERROR, problem)
    span.end(_ns(at))


def _ns(unix_seconds: float) -> int:
    return round(unix_seconds * 1e9)
