"""`holdfast doctor` and the metadata service: which cloud answers, or what blocks it; no answer is no fault."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.store.file_system import IN_MEMORY, file_system_of
from tests.support.fake_metadata import (
    AWS_ROOT,
    AWS_TOKEN,
    AZURE_EVENTS,
    AZURE_NAME,
    GCP_PREEMPTED,
    FakeMetadata,
)
from trainer_side.checks import metadata, tiers

PLAN = CheckPlan(None, Path("/nowhere"), 1, 1)
CLOSED: tuple[int, str, dict[str, str]] = (404, "", {})


@pytest.fixture
def server() -> Iterator[FakeMetadata]:
    with FakeMetadata() as fake:
        yield fake


def found(environ: dict[str, str]) -> Finding:
    (finding,) = metadata(PLAN, environ)
    return finding


def test_aws_answers_with_a_token(server: FakeMetadata) -> None:
    finding = found(server.environ)
    assert (finding.state, finding.fix) == (CheckState.OK, "")
    assert "aws answers" in finding.seen
    assert server.tokens > 0


def test_a_notice_that_is_there_already_is_told(server: FakeMetadata) -> None:
    server.interrupt(100)
    finding = found(server.environ)
    assert finding.state is CheckState.WARN
    assert "terminate" in finding.seen


@pytest.mark.parametrize("how", ["no answer", "refused"])
def test_a_token_that_does_not_come_is_the_hop_limit(server: FakeMetadata, how: str) -> None:
    if how == "no answer":  # as when the answer to PUT dies one hop too early
        server.silent.add(AWS_TOKEN)
    else:
        server.forced[AWS_TOKEN] = (403, "", {})
    finding = found(server.environ)
    assert finding.state is CheckState.WARN
    assert "no session token" in finding.seen
    assert "hop limit must be 2" in finding.fix
    assert server.asked[AWS_ROOT] == 1


@pytest.mark.parametrize("cloud", ["gcp", "azure"])
def test_other_clouds_are_recognised_by_their_metadata_server(server: FakeMetadata, cloud: str) -> None:
    server.forced.update({AWS_TOKEN: CLOSED, AWS_ROOT: CLOSED})
    if cloud == "azure":
        server.forced[GCP_PREEMPTED] = CLOSED
    finding = found(server.environ)
    assert finding.state is CheckState.OK, finding
    assert f"{cloud} answers" in finding.seen


def test_a_server_that_is_nobodys(server: FakeMetadata) -> None:
    server.forced.update(
        dict.fromkeys((AWS_TOKEN, AWS_ROOT, GCP_PREEMPTED, AZURE_EVENTS, AZURE_NAME), CLOSED)
    )
    finding = found(server.environ)
    assert finding.state is CheckState.SKIPPED
    assert "sigterm" in finding.fix


def test_no_cloud_is_said_and_is_no_fault() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    finding = found(
        {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}",
            "GCE_METADATA_HOST": f"127.0.0.1:{port}",
            "HOLDFAST_AZURE_METADATA_URL": f"http://127.0.0.1:{port}",
        }
    )
    assert finding.state is CheckState.SKIPPED
    assert "no machine of theirs" in finding.seen


def test_a_variable_that_is_no_url_is_named() -> None:
    finding = found({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "https://elsewhere"})
    assert finding.state is CheckState.FAIL
    assert "https://elsewhere" in finding.seen


@pytest.mark.parametrize("device", [False, True])
def test_a_memory_tier_on_a_disk_is_found(
    tmp_path: Path, tmpfs: Path, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file_system_of(tmp_path) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is in memory here")
    monkeypatch.setenv("HOLDFAST_TIERS", f"memory,memory:{tmpfs},memory:{tmp_path},file:{tmp_path}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    *fine, wrong = [finding for finding in tiers(PLAN) if finding.check != "memory tier pages"]
    assert [finding.state for finding in fine] == [CheckState.OK, CheckState.OK]
    assert [finding.fix for finding in fine] == ["", ""]
    assert wrong.state is (CheckState.FAIL if device else CheckState.WARN)
    assert wrong.seen == f"{tmp_path} is on {file_system_of(tmp_path)}"
    assert "mount -t tmpfs" in wrong.fix
