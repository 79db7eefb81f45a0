"""Serves `/metrics` to Prometheus where `metrics_port` is set: the stager on that port, the flusher on the next one.

Whatever happens here never ends a checkpoint: a port in use is a warning, and a bug in the counting, too.
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
    from prometheus_client import start_http_server

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
        server, _ = start_http_server(port, config.metrics_address, metrics.registry)
    except OSError as error:
        _log.warning(
            "no metrics: %s, port %d: %s; checkpoints go on without. metrics_port names another one (the stager takes "
            "it, the flusher the next), metrics_address another address",
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
