"""Connections to the metrics page use few descriptors, even many silent ones."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import FlusherConfig
from holdfast.telemetry import metrics_server
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.metrics_page import serve_metrics
from tests.support.free_port import free_port

DEADLINE_SECONDS = 60.0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.2)
    port = free_port()
    config = FlusherConfig(
        store=str(tmp_path), metrics_port=port - 1, metrics_address="127.0.0.1", runtime_dir=tmp_path
    )
    events = EventLog(None, role="flusher")
    with serve_metrics(config, events):
        yield port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_idle_connections_do_not_use_up_the_descriptors(port: int) -> None:
    assert "holdfast" in scrape(port)
    before = descriptors()
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(60)]
    until = time.monotonic() + DEADLINE_SECONDS
    closed = 0
    for one in idle:  # all but eight at once, those when they have said nothing for a while
        one.settimeout(max(0.1, until - time.monotonic()))
        closed += one.recv(1) == b""
        assert descriptors() - before <= len(idle) + metrics_server._CONNECTIONS_MAX + 2
    assert closed == len(idle)
    for one in idle:
        one.close()
    while True:  # a slot is free again when its thread has ended
        try:
            assert "holdfast" in scrape(port)
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_page_on_a_port_in_use_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        config = FlusherConfig(
            store=str(tmp_path), metrics_port=port - 1, metrics_address="127.0.0.1", runtime_dir=tmp_path
        )
        with serve_metrics(config, EventLog(None, role="flusher")):
            pass
    assert "no metrics" in caplog.text
