"""The environment enables spans; a mistake in it is a warning, and events continue."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast.telemetry.events import EventLog
from holdfast.telemetry.tracing import export_spans, exporter_names

ENDPOINT = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the user's own variables from the environment."""
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without the library."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "holdfast.telemetry.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_EXPORTER": ""}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_SDK_DISABLED": "true"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            ["otlp_proto_http"],
        ),
        ({"OTEL_TRACES_EXPORTER": "console, zipkin"}, ["console", "zipkin"]),
    ],
)
def test_the_environment_decides(environment: dict[str, str], names: list[str]) -> None:
    assert exporter_names(environment) == names


def emitted(path: Path) -> list[int]:
    """The steps in the log, after two events around which spans may have been made."""
    events = EventLog(path, role="stager")
    with export_spans("stager", "s3://bucket/run", events):
        events.emit("staged", {"pgt1_seconds": 1.0, "image_bytes": 1}, step=1)
    events.emit("staged", {"pgt1_seconds": 1.0, "image_bytes": 1}, step=2)
    events.close()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("without_library")
def test_tracing_imports_and_logs_nothing_unless_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert emitted(tmp_path / "events.jsonl") == [1, 2]
    assert caplog.text == ""


@pytest.mark.usefixtures("without_library")
def test_a_library_that_is_not_there_is_one_warning_that_says_what_to_install(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    assert emitted(tmp_path / "events.jsonl") == [1, 2]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "pip install 'opentelemetry-api>=" in record.getMessage()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin9", "has the exporter zipkin9"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier/pigeon", "has the exporter otlp carrier/pigeon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1", "max_queue_size must be a positive integer"),
    ],
)
def test_a_variable_that_is_wrong_is_one_warning(
    name: str,
    value: str,
    says: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp" if name == "OTEL_EXPORTER_OTLP_PROTOCOL" else "console")
    monkeypatch.setenv(name, value)
    assert emitted(tmp_path / "events.jsonl") == [1, 2]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert says in record.getMessage()


def test_the_console_is_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert emitted(tmp_path / "events.jsonl") == [1, 2]
    written = capsys.readouterr()
    assert '"name": "stage"' in written.err
    assert written.out == ""
