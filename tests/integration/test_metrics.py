"""A real small job is scraped while it runs: what `/metrics` says is what the event log says, and so do its traces."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from holdfast.telemetry.spans import root_ids
from tests.integration.jobs import train
from tests.support.cluster import SMALL, Cluster, wait_until
from tests.support.collector import Collector, collecting
from tests.support.images import from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient

STEPS, EVERY, PAUSE_AT, SAVED = 14, 4, 9, 7
PHASES = {"checkpoint", "save", "copy", "stage", "flush", "read_back"}
OUTCOMES = {"staged", "declined", "failed", "durable", "verified", "bad", "verify_failed", "flush_failed"}


def two_free_ports() -> int:
    """A port that is free, as is the next one."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two free ports side by side")


def scrape(port: int) -> dict[str, Metric]:
    # No proxy of the environment: it is this machine that is asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [s.value for f in families.values() for s in f.samples if s.name == sample and s.labels == labels]
    assert len(found) == 1, (sample, labels, found)
    return float(found[0])


def events_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.mark.mpi
def test_what_a_scrape_counts_is_what_the_event_log_has(tmp_path: Path, collector: Collector) -> None:
    port, log = two_free_ports(), tmp_path / "events.jsonl"
    options = (*SMALL, "--events", str(log), "--metrics-port", str(port))
    store = str(tmp_path / "store")
    cluster = Cluster(tmp_path, store, collector.environment, script=train.__file__, stager=options)
    with cluster.start(2, str(STEPS), str(EVERY), str(PAUSE_AT)) as job:
        wait_until(
            lambda: sum(line["event"] == "verified" for line in events_of(log)) == 2,
            120,
            f"two checkpoints are not verified:\n{job.output()}",
        )
        flusher, stager = scrape(port + 1), scrape(port)
        lines = events_of(log)
        counts = Counter((line["role"], line["event"]) for line in lines)
        seen = {
            (role, sample.labels["outcome"]): sample.value
            for role, families in (("stager", stager), ("flusher", flusher))
            for sample in families["holdfast_checkpoints"].samples
        }
        assert {outcome for _, outcome in seen} == OUTCOMES
        assert seen == {key: counts[key] for key in seen}
        assert counts["flusher", "durable"] == 2
        durable_bytes = sum(line["image_bytes"] for line in lines if line["event"] == "durable")  # type: ignore[misc]
        assert durable_bytes > 0
        assert value(flusher, "holdfast_checkpoint_bytes_total", outcome="durable") == durable_bytes
        assert value(stager, "holdfast_checkpoint_bytes_total", outcome="staged") == durable_bytes
        assert value(flusher, "holdfast_newest_step", level="durable") == SAVED
        assert value(flusher, "holdfast_newest_step", level="verified") == SAVED
        durable_at = max(float(str(line["time"])) for line in lines if line["event"] == "durable")
        newest_at = value(flusher, "holdfast_newest_timestamp_seconds", level="durable")
        assert abs(newest_at - durable_at) < 5  # two readings of the clock around one write
        assert (
            durable_at - 60
            < value(flusher, "holdfast_newest_saved_timestamp_seconds", level="durable")
            < durable_at
        )
        assert value(flusher, "holdfast_stall_seconds_count") == 2
        assert value(flusher, "holdfast_stall_seconds_sum") > 0
        pgt2_seconds = sum(line["pgt2_seconds"] for line in lines if line["event"] == "durable")  # type: ignore[misc]
        assert value(flusher, "holdfast_stage_seconds_sum", stage="to_durable") == pytest.approx(pgt2_seconds)
        chunks = {s.labels["state"]: s.value for s in flusher["holdfast_ring_chunks"].samples}
        assert chunks == {"free": 64, "filling": 0, "full": 0}  # 4 MiB in chunks of 64 KiB
        assert value(flusher, "holdfast_stager_attached") == 1
        (cluster.out(1) / "go-on").touch()
        job.succeed(120)
    cluster.wait_for_flusher()
    # Each process has told its part of each checkpoint, under ids that nobody handed over.
    durable = [line for line in events_of(log) if line["event"] == "durable" and line["role"] == "flusher"]
    expected = {root_ids(store, line["attempt"], line["step"])[0]: PHASES for line in durable}  # type: ignore[arg-type]
    wait_until(
        lambda: {trace: spans.keys() for trace, spans in collector.traces.items()} == expected,
        120,
        "traces are missing",
    )
    assert collector.services == {"holdfast-stager", "holdfast-flusher"}
    with pytest.raises(urllib.error.URLError):
        scrape(port + 1)


def test_a_port_in_use_is_a_warning_and_checkpoints_go_on(tmp_path: Path) -> None:
    port = two_free_ports()
    torch.save({"weight": torch.randn(400, 101)}, tmp_path / "original.pt")
    image = from_torch_file(tmp_path / "original.pt", chunk_bytes=64 * 1024, ranks=2)
    with socket.create_server(("127.0.0.1", port + 1)):
        flusher = FlusherProcess(tmp_path, "--metrics-port", str(port))
        stager = StagerClient(flusher.directory)
        stager.save(image, 1)
        stager.finish()
        assert flusher.wait() == 0
    assert flusher.manifest(1)["state"] == "verified"
    said = (tmp_path / "flusher.log").read_text()
    assert f"no metrics: 127.0.0.1, port {port + 1}: Address already in use" in said
    assert "Traceback" not in said
