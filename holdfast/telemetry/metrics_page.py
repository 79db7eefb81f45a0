"""Serves `/metrics` to Prometheus where `metrics_port` is set: the stager on that port, the flusher on the next one.

No failure here stops a checkpoint: a port in use or a bug in the counting only logs a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.telemetry.events import EventLog

if TYPE_CHECKING:
    from holdfast.config import FlusherConfig, StagerConfig
    from holdfast.ring.ring import Ring
    from holdfast.store.base import Store


_log = logging.getLogger("holdfast.metrics")


@contextmanager
def serve_metrics(
    config: StagerConfig | FlusherConfig,
    events: EventLog,
    *,
    ring: Ring | None = None,
    store: Store | None = None,
) -> Iterator[None]:
    """Count events and serve metrics inside the block, if `metrics_port` is set. `ring` must stay mapped meanwhile."""
    if config.metrics_port is None:
        yield
        return
    # Import here, so that a process without metrics does not load the library and the HTTP server.
    from prometheus_client import make_wsgi_app

    from holdfast.telemetry.metrics import Metrics, RingChunks, StoreRetries
    from holdfast.telemetry.metrics_server import start_server

    port = config.metrics_port + (config.role == "flusher")
    metrics = Metrics(config.role, config.store)
    chunks = None if ring is None else RingChunks(ring)
    if chunks is not None:
        metrics.registry.register(chunks)
    failures = getattr(store, "failures", None)
    if failures is not None:
        metrics.registry.register(StoreRetries(failures))
    events.add_listener(metrics.handle_event)
    try:
        server = start_server(config.metrics_address, port, make_wsgi_app(metrics.registry))
    except OSError as error:
        _log.warning(
            "no metrics are served at %s, port %d: %s; checkpoints continue without them. Set metrics_port to another "
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
