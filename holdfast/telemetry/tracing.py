"""Sends spans of stager and flusher to OpenTelemetry, if its own environment variables (OTEL_*) ask for spans.

Holdfast has no settings for this. No failure here stops a checkpoint: a missing library or a wrong variable logs one
warning, and a collector that does not answer delays the end of the process by a few seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from os import environ
from typing import TYPE_CHECKING, Any, Literal

from holdfast.extras import install_line

if TYPE_CHECKING:
    from holdfast.telemetry.events import EventLog
    from holdfast.telemetry.spans import Spans


_log = logging.getLogger("holdfast.tracing")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_EXPORTERS = "opentelemetry_traces_exporter"  # entry-point group in which packages register exporters


def exporter_names(environment: Mapping[str, str]) -> list[str]:
    """Return the exporters that OTEL_* variables name. An endpoint alone means `otlp`, which defaults to HTTP."""
    requested = environment.get("OTEL_TRACES_EXPORTER", "")
    if not requested.strip() and any(environment.get(name) for name in _ENDPOINTS):
        requested = "otlp"
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        requested = ""
    protocol = next(filter(None, (environment.get(name, "").strip() for name in _PROTOCOLS)), "http/protobuf")
    names = [name.strip() for name in requested.split(",")]
    return [
        _OTLP.get(protocol, f"otlp {protocol}") if name == "otlp" else name
        for name in names
        if name not in {"", "none"}
    ]


@contextmanager
def export_spans(role: Literal["stager", "flusher"], run: str, events: EventLog) -> Iterator[None]:
    """Turn events into spans inside the block. Imports nothing unless the environment asks for spans."""
    names = exporter_names(environ)
    spans = _make_spans(role, run, names) if names else None
    if spans is None:
        yield
        return
    _log.info("spans go to %s", ", ".join(names))
    events.add_listener(spans.handle_event)
    try:
        yield
    finally:
        spans.close()


def _make_spans(role: str, run: str, names: list[str]) -> Spans | None:
    try:
        # Import here: the library is needed, and installed, only where spans are wanted.
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        from holdfast.telemetry.spans import Spans

        exporters: list[Any] = []
        for name in names:
            found = entry_points(group=_EXPORTERS, name=name)
            if not found:
                raise ImportError(f"no installed package has the exporter {name}")
            # A flusher's stdout carries one line to the stager, which then stops reading.
            is_console = name == "console"
            exporters.append(ConsoleSpanExporter(out=sys.stderr) if is_console else found[name].load()())
        return Spans(role, run, [BatchSpanProcessor(exporter) for exporter in exporters])
    except ImportError as error:
        _log.warning(
            "no spans are sent: %s; checkpoints continue without them. For OTLP over HTTP run %s; or unset the OTEL_* "
            "variables that ask for spans",
            error,
            install_line("otel"),
        )
    except Exception as error:  # noqa: BLE001 - a wrong variable must not end a flusher
        _log.warning(
            "no spans are sent: %s; checkpoints continue without them. Check the OTEL_* variables", error
        )
    return None
