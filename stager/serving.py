"""One job, from its flusher to its end: the same however its ranks are reached."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError
from holdfast.process import yield_to_training
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.metrics_page import serve_metrics
from holdfast.telemetry.status_document import Transport
from holdfast.telemetry.status_socket import serve_status
from holdfast.telemetry.status_state import StatusState
from holdfast.telemetry.tracing import export_spans
from stager.flusher_process import Flusher, FlusherAhead, attach
from stager.refusal import refuse_start
from stager.segments import SegmentList
from stager.service import StagerService
from stager.trainers_port import TrainersPort

_log = logging.getLogger("holdfast.stager")


class StartRefused(Exception):
    """The ranks have been told why there is no stager for them, and one of them says it."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


def serve(
    port: TrainersPort,
    config: StagerConfig | None,
    problem: HoldfastError | None = None,
    attached: Flusher | None = None,
    ahead: FlusherAhead | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> set[int]:
    """Receive until the ranks have left, or the stager is stopping, and all that is staged is in the store.

    Args:
        port: The ranks.
        config: Settings; None if they are wrong.
        problem: What is wrong with them.
        attached: The flusher, if this stager has attached to it already.
        ahead: A flusher that waits to begin.
        is_stopping: Whether the stager was told to stop; asked again and again.

    Returns:
        The ranks that were lost, or are left alone.

    Raises:
        StartRefused: There is no flusher, or there are no settings, and the ranks were told.
        HoldfastError: The same, and no rank has asked; or staged checkpoints could not be written.
    """
    segments = None
    try:
        if config is None:
            assert problem is not None
            raise problem
        segments = SegmentList(config.runtime_dir)
        flusher = attached or attach(config, ahead=ahead)
    except HoldfastError as error:
        is_told = refuse_start(port, error, is_stopping)
        if segments is not None:
            segments.close()
        if is_told:  # the lowest rank says it: once for the job
            _log.debug("the start was refused", exc_info=error)
            raise StartRefused(error) from None
        raise
    events = EventLog(config.events, role="stager")
    service = StagerService(config, port, flusher, events=events, is_stopping=is_stopping)
    with export_spans("stager", flusher.store_url, events):  # around all else: it may take seconds to end
        try:
            state = StatusState("stager", flusher.store_url, ranks=service.ranks_said)
            events.listen(state.hear)
            with serve_metrics(config, events), serve_status(flusher.ring.directory, "stager", state.said):
                events.emit(
                    "stager_ready",
                    {
                        "attempt": flusher.attempt,
                        "ranks": port.ranks,
                        "flusher_pid": flusher.pid,
                        "transport": _transport(config),
                    },
                )
                # Not before: the ranks wait for all of this, and would keep the cores from it.
                yield_to_training(config.niceness)
                service.run()
                events.emit("stager_ended")
        finally:
            service.close()
            events.close()
            segments.close()
    return service.lost_ranks


def _transport(config: StagerConfig) -> Transport:
    if config.listen is None:
        return "mpi"
    return "tcp" if config.tls_cert is None else "tls"
