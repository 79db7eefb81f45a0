"""Events become spans: one trace for each checkpoint, from two processes that exchange no ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from holdfast.telemetry.spans import Spans, root_ids

RUN = "s3://bucket/run"
ATTEMPT, STEP = 2, 40
RECORD = {
    "ranks": {
        "0": {"saved_at_unix": 1000.0, "save_seconds": 0.25, "gate_seconds": 0.0, "cst_seconds": 0.25},
        "1": {
            "saved_at_unix": 1000.5,
            "save_seconds": 0.5,
            "wait_seconds": 0.125,
            "copy_seconds": 2.0,
            "gate_seconds": 1.0,
            "cst_seconds": 1.5,
            "host": "spot-1",
            "slice_bytes": 50,
        },
    },
    "stager": {"staged_at_unix": 1004.0, "pgt1_seconds": 4.0},
}


class Told:
    """The spans of one process with a manual clock."""

    def __init__(self, role: str) -> None:
        self.now = 0.0
        self._memory = InMemorySpanExporter()
        self.spans = Spans(role, RUN, [SimpleSpanProcessor(self._memory)], clock=lambda: self.now)

    def hear(self, at: float, event: str, step: int | None = STEP, **fields: Any) -> None:
        self.now = at
        self.spans.handle_event(event, fields, step)

    @property
    def all(self) -> Sequence[ReadableSpan]:
        return self._memory.get_finished_spans()

    def one(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.all if span.name == name]
        return found


def stager() -> Told:
    made = Told("stager")
    made.hear(999.0, "stager_ready", None, attempt=ATTEMPT, ranks=2, flusher_pid=7)
    return made


def flusher() -> Told:
    made = Told("flusher")
    made.hear(999.0, "stager_attached", None, attempt=ATTEMPT, pid=7, resumed=False)
    return made


def durable(**fields: Any) -> dict[str, Any]:
    said = {"attempt": ATTEMPT, "file": "step.pt", "image_bytes": 100, "pgt2_seconds": 6.0, "record": RECORD}
    return said | fields


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def said(span: ReadableSpan) -> dict[str, Any]:
    """Return a span's attributes, without those that all spans have."""
    attributes = dict(span.attributes or {})
    assert [attributes.pop(f"holdfast.{name}") for name in ("run", "attempt", "step")] == [RUN, ATTEMPT, STEP]
    return {name.removeprefix("holdfast."): value for name, value in attributes.items()}


def test_a_checkpoint_is_one_trace_with_its_phases_though_two_processes_tell_it() -> None:
    of_stager, of_flusher = stager(), flusher()
    of_flusher.hear(1001.0, "flush_began", attempt=ATTEMPT, image_bytes=100)
    of_stager.hear(1004.0, "staged", pgt1_seconds=4.0, image_bytes=100)
    of_flusher.hear(1006.25, "durable", **durable())
    of_flusher.hear(1010.0, "verified", attempt=ATTEMPT, note="", seconds=3.0)

    told = {span.name: span for span in (*of_stager.all, *of_flusher.all)}
    assert {name: times(span) for name, span in told.items()} == {
        "checkpoint": (1000.0, 1006.0),
        "save": (1000.5, 1001.0),  # of rank 1, which stalled longest
        "copy": (1001.0, 1003.0),
        "stage": (1000.0, 1004.0),
        "flush": (1001.0, 1006.25),
        "read_back": (1007.0, 1010.0),
    }
    root = told.pop("checkpoint")
    assert ids(root) == root_ids(RUN, ATTEMPT, STEP)
    assert root.parent is None
    for span in told.values():
        assert span.parent is not None
        assert (ids(span)[0], span.parent.span_id) == ids(root), span.name
    assert len({ids(span)[1] for span in told.values()}) == len(told)
    assert {span.status.status_code for span in (root, *told.values())} == {StatusCode.UNSET}
    services = {span.name: span.resource.attributes["service.name"] for span in (root, *told.values())}
    assert services.pop("stage") == "holdfast-stager"
    assert set(services.values()) == {"holdfast-flusher"}


@pytest.mark.parametrize(("share", "ended"), [("1/2", 1006.25), ("2/2", 1003.0)])
def test_the_flush_of_a_share_ends_with_its_seal_and_that_of_the_lead_with_the_file(
    share: str, ended: float
) -> None:
    told = flusher()
    told.hear(1001.0, "flush_began", attempt=ATTEMPT, image_bytes=100, share=share)
    told.hear(1003.0, "share_sealed", attempt=ATTEMPT, share=share, chunks=3)
    if share == "1/2":
        told.hear(1006.25, "durable", **durable())
    assert times(told.one("flush")) == (1001.0, ended)


def test_attributes_are_the_words_and_units_of_the_project() -> None:
    of_stager, of_flusher = stager(), flusher()
    of_stager.hear(1004.0, "staged", pgt1_seconds=4.0, image_bytes=100)
    of_flusher.hear(1001.0, "flush_began", attempt=ATTEMPT, image_bytes=100)
    of_flusher.hear(1006.0, "durable", **durable())
    assert said(of_flusher.one("checkpoint")) == {
        "outcome": "durable",
        "file": "step.pt",
        "image_bytes": 100,
        "pgt1_seconds": 4.0,
        "pgt2_seconds": 6.0,
        "stall_seconds": 1.5,
    }
    rank = {"rank": 1, "host": "spot-1", "slice_bytes": 50}
    assert said(of_flusher.one("save")) == {**rank, "wait_seconds": 0.125}
    assert said(of_flusher.one("copy")) == {**rank, "gate_seconds": 1.0}
    assert said(of_flusher.one("flush")) == {"image_bytes": 100}
    assert said(of_stager.one("stage")) == {"image_bytes": 100, "pgt1_seconds": 4.0}


@pytest.mark.parametrize(
    ("event", "fields", "cause", "reason"),
    [
        ("declined", {"reason": "rank 1: busy: sending", "cause": "busy"}, "busy", "rank 1: busy: sending"),
        (
            "failed",
            {"code": "peer_lost", "message": "rank 1 is dead"},
            "a process was lost or late",
            "peer_lost; rank 1 is dead",
        ),
    ],
)
def test_a_failed_checkpoint_is_an_error_span_with_its_cause(
    event: str, fields: dict[str, Any], cause: str, reason: str
) -> None:
    told = stager()
    told.hear(1003.0, event, seconds=2.0, **fields)
    root = told.one("checkpoint")
    assert ids(root) == root_ids(RUN, ATTEMPT, STEP)
    assert times(root) == (1001.0, 1003.0)
    assert said(root) == {"outcome": event, "cause": cause}
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, reason)


def test_a_failure_after_staged_begins_its_span_at_the_save() -> None:
    told = stager()
    told.hear(1004.0, "staged", pgt1_seconds=4.0, image_bytes=100)
    told.hear(1009.0, "failed", code="damage", message="state/1", seconds=0.0)
    assert times(told.one("checkpoint")) == (1000.0, 1009.0)


@pytest.mark.parametrize("stager_is_there", [True, False])
def test_a_flush_that_fails_is_the_stagers_to_tell_while_there_is_one(stager_is_there: bool) -> None:
    told = flusher()
    told.hear(1001.0, "flush_began", attempt=ATTEMPT, image_bytes=100)
    if not stager_is_there:
        told.hear(1002.0, "stager_gone", None, pid=7, finished=False)
    told.hear(1003.0, "flush_failed", attempt=ATTEMPT, code="peer_lost", message="its stager ended")
    flush = told.one("flush")
    assert times(flush) == (1001.0, 1003.0)
    assert (flush.status.status_code, flush.status.description) == (
        StatusCode.ERROR,
        "peer_lost; its stager ended",
    )
    roots = [span for span in told.all if span.name == "checkpoint"]
    assert [(ids(root), times(root)) for root in roots] == (
        [] if stager_is_there else [(root_ids(RUN, ATTEMPT, STEP), (1001.0, 1003.0))]
    )


def test_a_store_that_fails_meanwhile_is_told_within_the_flush() -> None:
    told = flusher()
    told.hear(1001.0, "flush_began", attempt=ATTEMPT, image_bytes=100)
    told.hear(1002.0, "flush_held", attempt=ATTEMPT, code="store", message="No space left on device")
    told.hear(1003.0, "flush_resumed", attempt=ATTEMPT, seconds=1.0, failures=1)
    told.hear(1006.0, "durable", **durable())
    held, resumed = told.one("flush").events
    assert (held.name, held.timestamp) == ("flush_held", 1002 * 10**9)
    assert held.attributes == {"message": "store; No space left on device"}
    assert (resumed.name, resumed.timestamp) == ("flush_resumed", 1003 * 10**9)


@pytest.mark.parametrize("event", ["bad", "verify_failed"])
def test_a_read_back_that_is_not_well_is_an_error_of_that_trace_also_in_another_process(event: str) -> None:
    told = Told("flusher")  # replaces a killed flusher, so this step is new to it
    told.hear(1010.0, event, attempt=ATTEMPT, note="chunk 3: wrong CRC", seconds=3.0)
    span = told.one("read_back")
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == root_ids(RUN, ATTEMPT, STEP)
    assert said(span) == {"outcome": event}
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "chunk 3: wrong CRC")


def test_a_flush_left_at_the_flushers_end_is_told() -> None:
    told = flusher()
    told.hear(1001.0, "flush_began", attempt=ATTEMPT, image_bytes=100)
    told.now = 1005.0
    told.spans.close()
    flush = told.one("flush")
    assert times(flush) == (1001.0, 1005.0)
    assert flush.status.status_code is StatusCode.ERROR


def test_the_attempt_of_a_stager_is_that_of_its_flusher() -> None:
    told = stager()
    told.hear(1000.0, "flusher_replaced", None, pid=8, attempt=3, resumed=False, seconds=1.0)
    told.hear(1004.0, "staged", pgt1_seconds=4.0, image_bytes=100)
    assert ids(told.one("stage"))[0] == root_ids(RUN, 3, STEP)[0]


@pytest.mark.parametrize("record", [None, 7, {"ranks": [1]}, {"ranks": {"0": {"saved_at_unix": "noon"}}}])
def test_a_record_may_be_anything(record: object) -> None:
    told = flusher()
    told.hear(1006.0, "durable", **durable(record=record))
    assert times(told.one("checkpoint")) == (1000.0, 1006.0)
    assert {span.name for span in told.all} == {"checkpoint", "flush"}


def test_a_sampled_trace_is_kept_whole_and_others_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    of_stager, of_flusher = stager(), flusher()
    for step in range(40):
        of_stager.hear(1004.0, "staged", step, pgt1_seconds=4.0, image_bytes=100)
        of_flusher.hear(1001.0, "flush_began", step, attempt=ATTEMPT, image_bytes=100)
        of_flusher.hear(1006.0, "durable", step, **durable())
    traces: dict[int, set[str]] = {}
    for span in (*of_stager.all, *of_flusher.all):
        traces.setdefault(ids(span)[0], set()).add(span.name)
    assert 0 < len(traces) < 40
    assert all(names == {"checkpoint", "save", "copy", "stage", "flush"} for names in traces.values())


def test_the_environments_name_of_the_service_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=blue")
    told = stager()
    told.hear(1004.0, "staged", pgt1_seconds=4.0, image_bytes=100)
    resource = told.one("stage").resource.attributes
    assert (resource["service.name"], resource["team"]) == ("mine", "blue")
