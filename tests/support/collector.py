"""An OpenTelemetry collector on this machine that receives spans: OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

__all__ = ["Collector", "collecting"]


class Collector:
    """The spans received so far.

    Attributes:
        environment: Variables that make a process send its spans here, past any proxy.
    """

    def __init__(self, port: int) -> None:
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        self._received: list[ResourceSpans] = []

    def receive(self, body: bytes) -> None:
        """Take the body of one request."""
        self._received += ExportTraceServiceRequest.FromString(body).resource_spans

    @property
    def services(self) -> set[str]:
        """Names of the services that have sent spans."""
        return {
            attribute.value.string_value
            for one in self._received
            for attribute in one.resource.attributes
            if attribute.key == "service.name"
        }

    @property
    def traces(self) -> dict[int, dict[str, Span]]:
        """Trace id → name → span; no trace has two of one name."""
        found: dict[int, dict[str, Span]] = {}
        for span in [span for one in self._received for scope in one.scope_spans for span in scope.spans]:
            of_trace = found.setdefault(int.from_bytes(span.trace_id, "big"), {})
            assert span.name not in of_trace, span
            of_trace[span.name] = span
        return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that answers until the block is left."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.receive(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as its parent calls it
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        collector = Collector(server.server_port)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
