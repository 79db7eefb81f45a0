"""A real flusher sends its spans to a real receiver, and ends even if the receiver is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from holdfast.telemetry.spans import root_ids
from tests.support.collector import Collector, collecting
from tests.support.images import Image, from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient

CHUNK_BYTES = 64 * 1024


@pytest.fixture
def image(tmp_path: Path) -> Image:
    torch.manual_seed(1)
    torch.save({"weight": torch.randn(400, 101)}, tmp_path / "original.pt")
    return from_torch_file(tmp_path / "original.pt", chunk_bytes=CHUNK_BYTES, ranks=2)


def send_to(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)


def test_spans_of_a_real_flusher_say_what_its_manifest_says(
    tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        send_to(collector, monkeypatch)
        flusher = FlusherProcess(tmp_path)
        stager = StagerClient(flusher.directory)
        run = str(stager.welcome["store_url"])
        stager.save(image, 1)
        stager.save(image, 2, flip=(1, 100))
        stager.wait("failed", step=2)
        stager.finish()
        assert flusher.wait() == 0
    assert collector.services == {"holdfast-flusher"}
    whole, broken = (collector.traces[root_ids(run, stager.attempt, step)[0]] for step in (1, 2))

    assert whole.keys() == {"checkpoint", "flush", "read_back"}
    root, manifest = whole["checkpoint"], flusher.manifest(1)
    saved_at_unix = manifest["record"]["ranks"]["0"]["saved_at_unix"]
    assert root.start_time_unix_nano / 1e9 == pytest.approx(saved_at_unix, rel=0, abs=1e-3)
    duration_seconds = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert duration_seconds == pytest.approx(manifest["pgt2_seconds"], abs=1e-5)
    assert not root.parent_span_id
    assert {whole[name].parent_span_id for name in ("flush", "read_back")} == {root.span_id}

    assert broken.keys() == {"flush"}, "that the checkpoint failed is the stager's to say"
    assert broken["flush"].status.code == Status.STATUS_CODE_ERROR
    assert broken["flush"].status.message.startswith("damage; step 2 (attempt 1): chunk 1 from rank")


def test_a_collector_that_hangs_or_refuses_keeps_no_flusher_from_its_end(
    tmp_path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself the exporter would go on for an hour, and the library wait for it half a minute.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    flushers: list[FlusherProcess] = []
    with socket.create_server(("127.0.0.1", 0)) as hangs, socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))  # and does not listen
        for name, place in (("hangs", hangs), ("refuses", refuses)):
            send_to(Collector(place.getsockname()[1]), monkeypatch)
            (tmp_path / name).mkdir()
            flushers.append(FlusherProcess(tmp_path / name))
        for flusher in flushers:
            stager = StagerClient(flusher.directory)
            stager.save(image, 1)
            stager.finish()
        for flusher in flushers:
            assert flusher.wait() == 0
            assert flusher.manifest(1)["state"] == "verified"
            assert flusher.happened("flusher_ended")
    for name in ("hangs", "refuses"):
        said = (tmp_path / name / "flusher.log").read_text()
        assert "did not take the last spans" in said, name
