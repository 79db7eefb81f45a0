"""Serves `/metrics` to Prometheus where `metrics_port` is set: the stager on that port, the flusher on the next one.

Whatever happens here never ends a checkpoint: a port in use is a warning, and a bug in the counting, too.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from holdfast.telemetry.events import EventLog

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from holdfast.config import FlusherConfig, StagerConfig
    from holdfast.ring.ring import Ring
    from holdfast.store.base import Store


_log = logging.getLogger("holdfast.metrics")
# one Prometheus asks over one; each costs a descriptor, which the ring and the store need, too
_CONNECTIONS_MAX = 8
_SILENT_SECONDS_MAX = 5.0  # a connection that says nothing, or takes nothing, is closed after that
_NO_DESCRIPTOR_SECONDS = 0.5


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS_MAX

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as its base
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and few of them: what comes beyond is closed at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(
                _NO_DESCRIPTOR_SECONDS
            )  # the connection still waits, and would be taken up again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody hung up in the middle, or said nothing for too long."""


def _serve(host: str, port: int, application: WSGIApplication) -> _Server:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    server = _Server((str(address[0]), int(address[1])), family)
    server.set_app(application)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


@contextmanager
def serve_metrics(
    config: StagerConfig | FlusherConfig,
    events: EventLog,
    *,
    ring: Ring | None = None,
    store: Store | None = None,
) -> Iterator[None]:
    """Count from here on, and answer until the block is left. Does nothing without `metrics_port`.

    Args:
        config: The settings.
        events: What is counted.
        ring: Its chunks are counted at each scrape; it must stay mapped until the block is left.
        store: Its retries are counted.
    """
    if config.metrics_port is None:
        yield
        return
    # Here and not above: who does not want metrics does not wait for the library.
    from prometheus_client import make_wsgi_app

    from holdfast.telemetry.metrics import Metrics, RingChunks, StoreRetries

    port = config.metrics_port + (config.role == "flusher")
    metrics = Metrics(config.role, config.store)
    chunks = None if ring is None else RingChunks(ring)
    if chunks is not None:
        metrics.registry.register(chunks)
    failures = getattr(store, "failures", None)
    if failures is not None:
        metrics.registry.register(StoreRetries(failures))
    events.listen(metrics.hear)
    try:
        server = _serve(config.metrics_address, port, make_wsgi_app(metrics.registry))
    except OSError as error:
        _log.warning(
            "no metrics are served at %s, port %d: %s; checkpoints go on without them. Set metrics_port to another "
            "port (the stager takes it, the flusher the next one), or metrics_address to another address",
            config.metrics_address,
            port,
            error.strerror or error,
        )
        yield
        return
    _log.info("metrics are at http://%s:%d/metrics", config.metrics_address, port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        if chunks is not None:
            chunks.close()
