"""Events of a stager's log are sent to people, and no process waits for the delivery."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.notify.notifier import LogWatch, Notifier
from holdfast.notify.webhook import Webhook
from holdfast.telemetry.events import EventLog
from tests.support.post_server import PostServer

STOPPED = {"role": "stager", "event": "stopped", "message": "told to"}


def test_lines_of_stager_and_flusher_are_told_in_order_and_older_lines_are_not(tmp_path: Path) -> None:
    path, server = tmp_path / "logs" / "events.jsonl", PostServer()
    flusher, stager = EventLog(path, role="flusher"), EventLog(path, role="stager")
    try:
        flusher.emit("fenced", {"message": "of the job before"})
        watch = LogWatch(path, Notifier([Webhook(server.url)], run="run", is_unsupervised=True))
        stager.emit("rank_lost", {"lost_rank": 1, "reason": "silent"})
        flusher.emit("flush_held", {"message": "503"}, step=3)
        flusher.emit("durable", {"attempt": 1}, step=3)
        watch.close(STOPPED)
        assert not watch.is_alive()
        assert [one["event"] for one in server.said()] == ["lost", "store_failing", "over"]
    finally:
        server.close()
        flusher.close()
        stager.close()


def test_a_log_that_begins_later_is_told_whole(tmp_path: Path) -> None:
    path, server = tmp_path / "events.jsonl", PostServer()
    try:
        watch = LogWatch(path, Notifier([Webhook(server.url)], run="run", is_unsupervised=True))
        log = EventLog(path, role="stager")
        for rank in range(3000):  # more than one look reads
            log.emit("rank_lost", {"lost_rank": rank, "reason": "x" * 500})
        log.emit("stager_ended", {"lost_ranks": [1]})
        log.close()
        watch.close()
        assert [one["event"] for one in server.said()] == ["lost", "job_ended"]
    finally:
        server.close()


def test_a_bug_in_the_words_ends_no_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, server = tmp_path / "events.jsonl", PostServer()
    notifier = Notifier([Webhook(server.url)], run="run", is_unsupervised=True)
    notify, log = notifier.notify, EventLog(path, role="stager")
    failed = list[object]()

    def broken_once(said: object) -> None:
        if not failed:
            failed.append(said)
            raise RuntimeError("a bug")
        notify(said)  # type: ignore[arg-type]

    monkeypatch.setattr(notifier, "notify", broken_once)
    try:
        watch = LogWatch(path, notifier)
        log.emit("rank_lost", {"lost_rank": 1})
        deadline = time.monotonic() + 30
        while not failed and time.monotonic() < deadline:
            time.sleep(0.01)
        watch.close(STOPPED)
        assert [one["event"] for one in server.said()] == ["over"]
        assert "an event could not be reported" in caplog.text
    finally:
        log.close()
        server.close()
