"""Which events are sent to people."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.notify.alert import Severity, alert_for


def supervisor(event: str, **fields: Any) -> dict[str, Any]:
    return {"role": "supervisor", "event": event, "message": "it was so", **fields}


@pytest.mark.parametrize(
    ("said", "kind", "title", "severity"),
    [
        (supervisor("ended", cause="preempted"), "preempted", "preempted", Severity.WARNING),
        (supervisor("ended", cause="killed"), "killed", "killed", Severity.WARNING),
        (supervisor("training", step=8, launched_seconds=2.0), "resumed", "resumed", Severity.INFO),
        (
            supervisor("resume_proof", verdict="verified resume"),
            "resume_proof",
            "resume: verified resume",
            Severity.INFO,
        ),
        (
            supervisor("resume_proof", verdict="differs"),
            "resume_proof",
            "resume: differs",
            Severity.ERROR,
        ),
        (supervisor("over", cause="done"), "over", "done", Severity.INFO),
        (supervisor("over", cause="crashed"), "over", "gave up", Severity.ERROR),
        (
            {"role": "stager", "event": "notice", "kind": "terminate", "name": "rank 3 on spot-7"},
            "notice",
            "preemption notice",
            Severity.WARNING,
        ),
        (
            {"role": "trainer", "event": "stager_lost", "message": "cut"},
            "stager_lost",
            "stager lost",
            Severity.ERROR,
        ),
        ({"role": "trainer", "event": "stager_back"}, "stager_back", "stager is back", Severity.INFO),
    ],
)
def test_an_event_becomes_a_message(said: dict[str, Any], kind: str, title: str, severity: Severity) -> None:
    alert = alert_for(said)
    assert alert is not None
    assert (alert.kind, alert.title, alert.severity) == (kind, title, severity)
    assert alert.text


@pytest.mark.parametrize(
    "said",
    [
        supervisor("launched", attempt=1),
        supervisor("training", step=0, joined_seconds=1.0, seconds=2.0),
        supervisor("ended", cause="done"),
        supervisor("ended", cause="stopped"),
        {"role": "stager", "event": "notice", "kind": "rebalance"},
        {"role": "stager", "event": "resume_proof", "verdict": "differs"},
        {"role": "flusher", "event": "durable", "step": 3},
        {"event": ["flush_held"], "role": None},
        {},
    ],
)
def test_the_way_of_a_run_is_no_message(said: dict[str, Any]) -> None:
    assert alert_for(said) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"step": 7, "code": "store", "message": "503 Slow Down"}, "step 7: 503 Slow Down"),
        ({"step": 7, "code": "store"}, "step 7: store"),
        ({"step": 7}, "step 7"),
        ({}, "store is failing"),
        ({"message": 5, "step": "7"}, "5"),
    ],
)
def test_a_message_says_what_the_event_says(fields: dict[str, Any], text: str) -> None:
    alert = alert_for({"role": "flusher", "event": "flush_held", **fields})
    assert alert is not None
    assert (alert.kind, alert.text) == ("store_failing", text)


def test_a_long_text_is_cut() -> None:
    alert = alert_for(supervisor("over", cause="crashed") | {"message": "x" * 5000})
    assert alert is not None
    assert len(alert.text) == 1000


@pytest.mark.parametrize(
    ("said", "kind", "severity", "text"),
    [
        (
            {"event": "rank_lost", "lost_rank": 3, "reason": "rank 3 was silent"},
            "lost",
            Severity.WARNING,
            "rank 3 was silent",
        ),
        (
            {"event": "resume_proof", "step": 7, "verdict": "verified resume", "text": "equal on 2 ranks"},
            "resume_proof",
            Severity.INFO,
            "step 7: equal on 2 ranks",
        ),
        (
            {"event": "resume_proof", "step": 7, "verdict": "differs", "text": "data differs"},
            "resume_proof",
            Severity.ERROR,
            "step 7: data differs",
        ),
        (
            {"event": "stager_ended", "lost_ranks": []},
            "job_ended",
            Severity.INFO,
            "every rank has left the stager",
        ),
        (
            {"event": "stager_ended", "lost_ranks": [1, 3]},
            "job_ended",
            Severity.WARNING,
            "ranks [1, 3] were lost",
        ),
        (
            {"event": "stager_ready", "attempt": 3, "returned": True},
            "stager_back",
            Severity.INFO,
            "the ranks had lost the stager, and have returned to it as attempt 3",
        ),
        ({"event": "stopped", "message": "told to"}, "over", Severity.INFO, "told to"),
        ({"event": "gave_up", "message": "no store"}, "over", Severity.ERROR, "no store"),
        (
            {"event": "notice", "kind": "terminate", "name": "spot-7"},
            "notice",
            Severity.WARNING,
            "spot-7; terminate",
        ),
    ],
)
def test_a_stager_without_a_supervisor_tells_of_ranks_proofs_and_ends_itself(
    said: dict[str, Any], kind: str, severity: Severity, text: str
) -> None:
    alert = alert_for({"role": "stager", **said}, is_unsupervised=True)
    assert alert is not None
    assert (alert.kind, alert.severity, alert.text) == (kind, severity, text)


@pytest.mark.parametrize("event", ["rank_lost", "resume_proof", "stager_ended", "stopped", "gave_up"])
def test_a_supervised_stager_leaves_those_to_its_supervisor(event: str) -> None:
    assert alert_for({"role": "stager", "event": event}) is None


def test_a_stager_that_a_new_job_joins_is_not_back() -> None:
    assert alert_for({"role": "stager", "event": "stager_ready", "attempt": 1}, is_unsupervised=True) is None
