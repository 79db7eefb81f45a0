"""The ports of `/metrics`; test_watched_job checks the content for a job."""

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
from tests.support.free_port import free_port
from tests.support.images import from_torch_file
from tests.support.stager_client import FlusherProcess, StagerClient


def two_free_ports() -> int:
    """A port that is free, as is the next one."""
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    return first


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
    assert f"no metrics are served at 127.0.0.1, port {port + 1}: Address already in use" in said
    assert "Traceback" not in said
