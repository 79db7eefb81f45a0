"""Messages arrive at a real server; if not, the run continues without them."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.notify.alert import Alert, Severity
from holdfast.notify.notifier import AlertRateLimiter, Destination, Notifier
from holdfast.notify.webhook import AlertCommand, Undelivered, Webhook
from tests.support.post_server import SECRET, PostServer

HELD = {"role": "flusher", "event": "flush_held", "step": 3, "message": "503"}
OVER = {"role": "supervisor", "event": "over", "cause": "done", "message": "the job is done"}


@pytest.fixture
def server() -> Iterator[PostServer]:
    made = PostServer()
    yield made
    made.close()


def notified(*destinations: Destination, events: list[dict[str, Any]], **more: Any) -> None:
    notifier = Notifier(destinations, run="s3://bucket/run", **more)
    for one in events:
        notifier.notify(one)
    notifier.close()


def test_messages_arrive_in_order_and_other_events_do_not(server: PostServer) -> None:
    notified(Webhook(server.url), events=[HELD, {"role": "flusher", "event": "durable"}, OVER])
    held, over = server.said()
    assert (held["event"], held["severity"]) == ("store_failing", "warning")
    assert held["text"] == "step 3: 503 [s3://bucket/run]"
    assert (over["event"], over["title"], over["run"]) == ("over", "done", "s3://bucket/run")
    assert held["host"] == socket.gethostname()


@pytest.mark.parametrize(("status", "tries"), [(503, 2), (429, 2), (404, 1), (301, 1)])
def test_an_error_that_may_pass_is_retried(status: int, tries: int, caplog: pytest.LogCaptureFixture) -> None:
    failing = PostServer(status)
    notifier = Notifier([Webhook(failing.url)], run="run", pauses_seconds=(0.01,))
    try:
        notifier.notify(HELD)
        deadline = time.monotonic() + 30
        while len(failing.bodies) < tries and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        notifier.close()
        failing.close()
    assert len(failing.bodies) == tries
    assert (f"HTTP status {status}" in caplog.text) == (tries == 1)


def test_a_refused_connection_is_logged_once_without_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://me:{SECRET}@127.0.0.1:{taken.getsockname()[1]}/{SECRET}?{SECRET}"
        with caplog.at_level(logging.DEBUG):
            notified(Webhook(url), events=[HELD, OVER], pauses_seconds=())
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "http://127.0.0.1/… was not delivered: Connection refused; the run continues" in warnings[0]
    assert SECRET not in caplog.text


def test_a_slow_server_holds_up_neither_the_run_nor_another_destination(server: PostServer) -> None:
    slow = PostServer()
    slow.go_on.clear()
    notifier = Notifier([Webhook(slow.url), Webhook(server.url)], run="run")
    try:
        for _ in range(200):  # more than are queued
            notifier.notify(OVER)
        notifier.close(0.2)
        assert len(slow.bodies) <= 1
        assert server.bodies, "the other one has got its messages"
    finally:
        slow.close()


def test_a_server_that_does_not_answer_is_left_after_the_limit() -> None:
    slow = PostServer()
    slow.go_on.clear()
    try:
        problem = Webhook(slow.url, timeout_seconds=0.05).send(Alert("k", "t", "x", Severity.INFO), {})
    finally:
        slow.close()
    assert problem == Undelivered("TimeoutError")


def test_a_command_gets_the_message(tmp_path: Path) -> None:
    out = tmp_path / "out"
    notified(AlertCommand(f'{{ cat; echo; echo "$HOLDFAST_EVENT|$HOLDFAST_TEXT"; }} > {out}'), events=[HELD])
    document, told = out.read_text().splitlines()
    assert json.loads(document)["event"] == "store_failing"
    assert told == "store_failing|store is failing: step 3: 503 [s3://bucket/run]"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    written = tmp_path / "pid"
    command = AlertCommand(f"sleep 60 & echo $! > {written}; wait", timeout_seconds=0.3)
    problem = command.send(Alert("k", "t", "x", Severity.INFO), {})
    assert problem == Undelivered("killed after 0.3 s", may_retry=False)
    child = Path(f"/proc/{int(written.read_text())}/stat")
    deadline = time.monotonic() + 30
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_that_fails_or_does_not_read_is_no_error_of_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = f"exec <&-; : {SECRET}; exit 3"
    notified(AlertCommand(secret), events=[HELD, OVER])
    assert caplog.text.count("--notify-command was not delivered: exit code 3") == 1
    assert SECRET not in caplog.text


def test_a_bug_in_a_destination_does_not_end_its_messages(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"
        calls = 0

        def send(self, *_: Any) -> None:
            self.calls += 1
            raise RuntimeError(os.strerror(5))

    broken = Broken()
    notified(broken, events=[HELD, OVER])
    assert broken.calls == 2
    assert "RuntimeError" in caplog.text


def test_a_kind_is_sent_once_within_the_window_and_the_next_message_counts_the_rest() -> None:
    rare = AlertRateLimiter(300.0)
    alert = Alert("killed", "killed", "it was killed", Severity.WARNING)
    other = alert._replace(kind="resumed")
    assert rare.admit(alert, 0.0) == alert
    assert rare.admit(other, 1.0) == other
    assert [rare.admit(alert, at) for at in (2.0, 299.0)] == [None, None]
    later = rare.admit(alert, 300.0)
    assert later is not None
    assert later.text == "it was killed (2 more of this kind were not sent)"
    assert rare.admit(alert, 301.0) is None
    over = rare.admit(alert._replace(kind="over", text="it is done"), 302.0)
    assert over is not None
    assert over.text == "it is done (not sent: 1 × killed)"


def test_without_destinations_nothing_is_started() -> None:
    before = threading.active_count()
    notifier = Notifier([], run="run")
    notifier.notify(OVER)
    notifier.close()
    assert threading.active_count() == before
