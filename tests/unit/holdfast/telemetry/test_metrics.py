"""Metrics count each event once, order checkpoints by attempt and step, not time, and never touch a removed ring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from holdfast.ring.ring import Ring
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.metrics import Metrics, RingChunks


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(name, labels)
    return found


def durable(**fields: Any) -> dict[str, Any]:
    return {"attempt": 1, "image_bytes": 100, "pgt2_seconds": 2.0, **fields}


def test_outcomes_are_there_before_anything_happens() -> None:
    assert value(Metrics("stager", "r"), "holdfast_checkpoints_total", outcome="declined") == 0
    assert value(Metrics("flusher", "r"), "holdfast_checkpoints_total", outcome="bad") == 0
    assert value(Metrics("flusher", "r"), "holdfast_checkpoints_total", outcome="staged") is None


def test_the_newest_is_that_of_the_highest_attempt_and_step() -> None:
    now = [1000.0]
    metrics = Metrics("flusher", "r", clock=lambda: now[0])
    metrics.handle_event("durable", durable(attempt=2), 40)
    now[0] = 2000.0
    metrics.handle_event(
        "durable", durable(attempt=1), 90
    )  # of the previous job, flushed later from its ring
    metrics.handle_event(
        "found", {"attempt": 1, "state": "verified", "created": "2020-01-01T00:00:00+00:00"}, 80
    )
    assert value(metrics, "holdfast_newest_step", level="durable") == 40
    assert value(metrics, "holdfast_newest_timestamp_seconds", level="durable") == 1000.0
    assert value(metrics, "holdfast_newest_step", level="verified") == 80
    assert value(metrics, "holdfast_newest_timestamp_seconds", level="verified") == 1577836800.0
    assert value(metrics, "holdfast_checkpoints_total", outcome="durable") == 2
    assert value(metrics, "holdfast_checkpoint_bytes_total", outcome="durable") == 200


def test_the_loss_by_a_kill_is_counted_from_the_save() -> None:
    now = [1000.0]
    stager, flusher = (
        Metrics("stager", "r", clock=lambda: now[0]),
        Metrics("flusher", "r", clock=lambda: now[0]),
    )
    assert value(flusher, "holdfast_newest_saved_timestamp_seconds", level="durable") == 0
    stager.handle_event("staged", {"image_bytes": 1, "pgt1_seconds": 3.0}, 5)
    assert value(stager, "holdfast_newest_saved_timestamp_seconds", level="staged") == 997.0
    flusher.handle_event("durable", durable(pgt2_seconds=8.0), 5)
    now[0] = 2000.0
    flusher.handle_event("durable", durable(pgt2_seconds=9.0), 7)
    flusher.handle_event("verified", {"attempt": 1, "seconds": 1.0}, 5)
    assert value(flusher, "holdfast_newest_saved_timestamp_seconds", level="durable") == 1991.0
    assert value(flusher, "holdfast_newest_saved_timestamp_seconds", level="verified") == 992.0


def test_the_stall_is_that_of_the_slowest_rank_and_a_record_may_be_anything() -> None:
    metrics = Metrics("flusher", "r")
    ranks = {"0": {"cst_seconds": 0.25}, "1": {"cst_seconds": 0.5}, "2": {"cst_seconds": "long"}, "x": 3}
    metrics.handle_event("durable", durable(record={"ranks": ranks}), 5)
    for record in (None, 7, {"ranks": [1]}):
        metrics.handle_event("durable", durable(record=record), 6)
    assert value(metrics, "holdfast_stall_seconds_sum") == 0.5
    assert value(metrics, "holdfast_stall_seconds_count") == 1


def test_causes_are_counted_beside_the_outcomes() -> None:
    metrics = Metrics("stager", "r")
    metrics.handle_event("declined", {"reason": "rank 1: busy: still being sent", "cause": "busy"}, 1)
    metrics.handle_event("declined", {"reason": "steps 3, 4 are still being received", "code": "busy"}, 2)
    metrics.handle_event("failed", {"code": "peer_lost", "message": "rank 1 is dead"}, 3)
    refused = "holdfast_checkpoints_refused_total"
    assert value(metrics, "holdfast_checkpoints_total", outcome="declined") == 2
    assert value(metrics, refused, outcome="declined", cause="busy") == 1
    assert value(metrics, refused, outcome="declined", cause="no room at the stager") == 1
    assert value(metrics, refused, outcome="failed", cause="a process was lost or late") == 1


@pytest.mark.parametrize("end", ["flush_resumed", "durable", "flush_failed"])
def test_a_held_checkpoint_is_held_until_it_ends_or_goes_on(end: str) -> None:
    metrics = Metrics("flusher", "r")
    for step in (1, 2):
        metrics.handle_event("flush_held", {"attempt": 1, "code": "store", "message": "…"}, step)
    assert value(metrics, "holdfast_checkpoints_held") == 2
    metrics.handle_event(end, durable(code="store", seconds=1.0), 1)
    assert value(metrics, "holdfast_checkpoints_held") == 1


def test_a_share_is_counted_when_it_is_sealed_and_is_held_no_more() -> None:
    metrics = Metrics("flusher", "r")
    metrics.handle_event("flush_held", {"attempt": 1}, 5)
    metrics.handle_event("share_sealed", {"attempt": 1, "share": "2/2", "chunks": 3}, 5)
    metrics.handle_event("published", {"attempt": 1, "file": "step-000000005.pt"}, 5)
    assert value(metrics, "holdfast_checkpoints_held") == 0
    assert value(metrics, "holdfast_checkpoints_total", outcome="share_sealed") == 1
    assert value(metrics, "holdfast_checkpoints_total", outcome="durable") == 0


def test_peers_come_and_go() -> None:
    metrics = Metrics("stager", "r")
    metrics.handle_event("rank_silent", {"silent_rank": 1}, None)
    metrics.handle_event("rank_silent", {"silent_rank": 2}, None)
    metrics.handle_event("rank_back", {"silent_rank": 1}, None)
    assert value(metrics, "holdfast_ranks_silent") == 1
    metrics.handle_event("rank_lost", {"lost_rank": 2}, None)
    metrics.handle_event("notice", {"kind": "terminate"}, None)
    assert value(metrics, "holdfast_ranks_silent") == 0
    assert value(metrics, "holdfast_ranks_lost_total") == 1
    assert value(metrics, "holdfast_notices_total", kind="terminate") == 1


def test_the_transport_of_the_job_is_the_one_that_is_not_0() -> None:
    metrics = Metrics("stager", "r")
    said = {"attempt": 1, "ranks": 2, "flusher_pid": 7}
    assert [value(metrics, "holdfast_transport", transport=one) for one in ("mpi", "tcp", "tls")] == [0, 0, 0]
    metrics.handle_event("stager_ready", {**said, "transport": "tls"}, None)
    assert [value(metrics, "holdfast_transport", transport=one) for one in ("mpi", "tcp", "tls")] == [0, 0, 1]


def test_an_event_that_cannot_be_counted_is_still_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    log, metrics = EventLog(path, role="flusher"), Metrics("flusher", "r")
    log.add_listener(metrics.handle_event)
    log.emit("durable", {"image_bytes": "many"}, step=1)
    log.emit("durable", durable(), step=2)
    log.close()
    assert path.read_text().count('"event":"durable"') == 2
    assert "the event durable could not be counted" in caplog.text
    assert value(metrics, "holdfast_newest_step", level="durable") == 2


def test_chunks_of_the_ring_by_state_and_nothing_once_it_is_closed(tmp_path: Path) -> None:
    metrics = Metrics("flusher", "r")
    with Ring.create(tmp_path, chunk_bytes=4096, ring_chunks=8, attempt=1) as ring:
        chunks = RingChunks(ring)
        metrics.registry.register(chunks)
        ring.mark_filling(0, 1, 5, 0)
        ring.mark_filling(1, 1, 5, 1)
        ring.mark_full(1, [(0, 0)], 10)
        assert [value(metrics, "holdfast_ring_chunks", state=s) for s in ("free", "filling", "full")] == [
            6,
            1,
            1,
        ]
        chunks.close()
    assert b"holdfast_ring_chunks" not in generate_latest(metrics.registry)
