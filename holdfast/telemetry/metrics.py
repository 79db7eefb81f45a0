"""The metrics of stager and flusher for Prometheus, counted from the events that they emit, so that both agree.

    EventLog.emit ──► Metrics.handle_event ──► counters, histograms ─┐
                     ring's journal, store's failures ───────────────┴─► registry ──► /metrics (metrics_page.py)

docs/monitoring.md says what each metric means. Imported only if metrics are wanted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast import __version__
from holdfast.errors import ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.save_record import StepRecord
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.telemetry.causes import cause_from
from holdfast.telemetry.status_document import Transport
from holdfast.wire.step_proof import ProofVerdict

disable_created_metrics()  # type: ignore[no-untyped-call]  # no extra `_created` metric for each counter

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_STALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
_READ_BACK = ("verified", "drifted", "doubtful", "bad", "verify_failed")
_OUTCOMES = {
    "stager": ("staged", "declined", "failed"),
    "flusher": ("share_sealed", "durable", *_READ_BACK, "flush_failed"),
}
_SAVED_KEPT = 64  # checkpoints that may still be read back
_LEVELS = {"stager": ("staged",), "flusher": ("durable", "verified")}


class Metrics:
    """Metrics of one stager or flusher. `handle_event`: any thread. Each outcome exists from the start, because
    Prometheus sees no increase in a counter that first appears with 1.
    """

    def __init__(self, role: str, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        ProcessCollector(registry=self.registry)
        info = self._gauge("holdfast_info", "Always 1; identifies the process.", "role", "run", "version")
        info.labels(role, run, __version__).set(1)
        self._checkpoints = self._counter("holdfast_checkpoints", "Checkpoints by outcome.", "outcome")
        self._bytes = self._counter("holdfast_checkpoint_bytes", "Bytes of these checkpoints.", "outcome")
        self._refused = self._counter(
            "holdfast_checkpoints_refused", "Declined and failed checkpoints, by cause.", "outcome", "cause"
        )
        self._seconds = Histogram(
            "holdfast_stage_seconds",
            "Seconds from save() to staged and to durable, and of a read-back.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._newest_step = self._gauge("holdfast_newest_step", "Newest checkpoint of this level.", "level")
        self._newest_time = self._gauge(
            "holdfast_newest_timestamp_seconds",
            "Unix time at which the newest checkpoint reached this level; 0: none has.",
            "level",
        )
        self._newest_saved = self._gauge(
            "holdfast_newest_saved_timestamp_seconds",
            "Unix time of save() of the newest checkpoint of this level: work since then would be lost; 0: none.",
            "level",
        )
        for outcome in _OUTCOMES[role]:
            self._checkpoints.labels(outcome)
        for level in _LEVELS[role]:
            self._bytes.labels(level)
            self._newest_time.labels(level)
            self._newest_saved.labels(level)
        self._newest: dict[str, CheckpointId] = {}
        self._saved_at: dict[CheckpointId, float] = {}  # Unix time of save()
        if role == "stager":
            self._create_peer_metrics()
        else:
            self._create_flush_metrics()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _create_peer_metrics(self) -> None:
        self._silent: set[int] = set()
        silent = self._gauge("holdfast_ranks_silent", "Ranks that currently give no sign of life.")
        silent.set_function(lambda: len(self._silent))
        self._ranks_lost = self._counter("holdfast_ranks_lost", "Ranks that died.")
        self._flushers_lost = self._counter("holdfast_flushers_lost", "Flushers that ended too early.")
        self._divergences = self._counter("holdfast_divergences", "New findings of replicas that differ.")
        self._notices = self._counter(
            "holdfast_notices", "Notices that a machine will be taken away.", "kind"
        )
        for kind in ("terminate", "rebalance"):
            self._notices.labels(kind)
        self._resumes = self._counter(
            "holdfast_resumes",
            "Resumes, by how the first step compares with that of the run before.",
            "verdict",
        )
        for verdict in ProofVerdict:
            self._resumes.labels(verdict.value)
        self._transport = self._gauge(
            "holdfast_transport",
            "1 for the transport between ranks and stager; tls is TCP, encrypted.",
            "transport",
        )
        for transport in get_args(Transport):
            self._transport.labels(transport)

    def _create_flush_metrics(self) -> None:
        self._held: set[int | None] = set()
        held = self._gauge("holdfast_checkpoints_held", "Checkpoints that wait because the store fails.")
        held.set_function(lambda: len(self._held))
        self._attached = self._gauge("holdfast_stager_attached", "1 while a stager is attached.")
        self._stall = Histogram(
            "holdfast_stall_seconds",
            "Seconds for which a checkpoint stalled the training thread of its slowest rank.",
            buckets=_STALL_SECONDS,
            registry=self.registry,
        )
        self._pruned = self._counter("holdfast_pruned", "Checkpoints that retention removed.")

    def handle_event(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        """Count one event; ignore unknown ones."""
        match event:
            case "staged" | "durable":
                self._count_success(event, fields, step)
            case _ if event in _READ_BACK:
                self._count_read_back(event, fields, step)
            case "declined" | "failed" | "flush_failed":
                self._count_failure(event, fields, step)
            case "share_sealed":
                self._checkpoints.labels(event).inc()
                self._held.discard(step)
            case "flush_held":
                self._held.add(step)
            case "flush_resumed":
                self._held.discard(step)
            case "found":
                self._count_found(fields, step)
            case _:
                self._count_peer_event(event, fields)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _count_success(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        self._checkpoints.labels(event).inc()
        self._bytes.labels(event).inc(fields["image_bytes"])
        seconds = fields["pgt1_seconds" if event == "staged" else "pgt2_seconds"]
        self._seconds.labels(f"to_{event}").observe(seconds)
        now = self._clock()
        self._update_newest(event, fields.get("attempt", 0), step, now, saved_at_unix=now - seconds)
        if event == "durable":
            self._held.discard(step)
            stalls = StepRecord.from_json(fields.get("record")).stall_seconds
            if stalls:
                self._stall.observe(max(stalls.values()))

    def _count_read_back(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        self._checkpoints.labels(event).inc()
        self._seconds.labels("read_back").observe(fields["seconds"])
        if event == "verified":
            self._update_newest(event, fields["attempt"], step, self._clock(), saved_at_unix=None)

    def _count_failure(self, event: str, fields: Mapping[str, Any], step: int | None) -> None:
        self._checkpoints.labels(event).inc()
        self._refused.labels(event, cause_from(fields)).inc()
        if event == "flush_failed":
            self._held.discard(step)

    def _count_found(self, fields: Mapping[str, Any], step: int | None) -> None:
        for level in ("durable", "verified") if fields["state"] == "verified" else ("durable",):
            created = datetime.fromisoformat(fields["created"]).timestamp()
            self._update_newest(level, fields["attempt"], step, created, saved_at_unix=created)

    def _update_newest(
        self, level: str, attempt: int, step: int | None, at_unix: float, *, saved_at_unix: float | None
    ) -> None:
        order = CheckpointId(attempt, step or 0)
        if order >= self._newest.get(level, order):  # an older one may be read back after a newer one
            self._newest[level] = order
            self._newest_step.labels(level).set(order.step)
            self._newest_time.labels(level).set(at_unix)
            if saved_at_unix is None:  # a read-back: use the time noted when it became durable
                saved_at_unix = self._saved_at.get(order, at_unix)
            self._saved_at[order] = saved_at_unix
            self._newest_saved.labels(level).set(saved_at_unix)
            while len(self._saved_at) > _SAVED_KEPT:
                del self._saved_at[min(self._saved_at)]

    # -- peers ---------------------------------------------------------------------------------------------------

    def _count_peer_event(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "rank_silent":
                self._silent.add(fields["silent_rank"])
            case "rank_back":
                self._silent.discard(fields["silent_rank"])
            case "rank_lost":
                self._ranks_lost.inc()
                self._silent.discard(fields["lost_rank"])
            case "flusher_lost":
                self._flushers_lost.inc()
            case "divergence":
                self._divergences.inc()
            case "notice":
                self._notices.labels(str(fields["kind"])).inc()
            case "resume_proof":
                self._resumes.labels(str(fields["verdict"])).inc()
            case "stager_ready":
                self._transport.labels(str(fields["transport"])).set(1)
            case "stager_attached":
                self._attached.set(1)
            case "stager_gone":
                self._attached.set(0)
            case "pruned":
                self._pruned.inc(len(fields["files"]))


class RingChunks(Collector):
    """Number of ring chunks in each state, at each scrape. The ring may be unmapped only after `close`."""

    def __init__(self, ring: Ring) -> None:
        self._ring: Ring | None = ring
        self._scrape_lock = threading.Lock()  # held during a scrape

    def close(self) -> None:
        """Wait for a running scrape, and skip the ring in later ones."""
        with self._scrape_lock:
            self._ring = None

    def collect(self) -> Iterable[Metric]:
        """Yield the gauge. Ignore a damaged journal: the flusher reports that."""
        found: Tally[SlotState] = Tally()
        with self._scrape_lock:
            if self._ring is None:
                return
            with contextlib.suppress(ProtocolError):
                found.update(self._ring.state(slot) for slot in range(self._ring.ring_chunks))
        chunks = GaugeMetricFamily("holdfast_ring_chunks", "Chunks of the ring by state.", labels=["state"])
        for state in SlotState:
            chunks.add_metric([state.name.lower()], found[state])
        yield chunks


class StoreRetries(Collector):
    """Store calls that failed and were retried. `failures`: returns the count for each call name."""

    def __init__(self, failures: Callable[[], Mapping[str, int]]) -> None:
        self._failures = failures

    def collect(self) -> Iterable[Metric]:
        retries = CounterMetricFamily(
            "holdfast_store_retries", "Store calls that were retried.", labels=["call"]
        )
        for call, count in self._failures().items():
            retries.add_metric([call], count)
        yield retries
