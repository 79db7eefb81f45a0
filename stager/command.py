"""`holdfast stager`: the process of the MPI job on the on-demand node, which stays when spot nodes are taken away.

mpirun --with-ft ulfm -n 8 python train.py : -n 1 holdfast stager --store s3://bucket/run
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.command.settings import setting_options
from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError
from holdfast.faultpoint import identify
from holdfast.process import yield_to_training
from holdfast.telemetry.board import Board
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.metrics_page import serve_metrics
from holdfast.telemetry.status_socket import serve_status
from holdfast.telemetry.tracing import export_spans

if TYPE_CHECKING:
    from stager.trainers_port import TrainersPort


_log = logging.getLogger("holdfast.stager")

_JOIN_SECONDS_MAX = 300.0  # before the settings are known: all trainers import torch first


@click.command(
    short_help="Receive the checkpoints of an MPI job, on the on-demand node.",
    epilog=examples(
        "mpirun --with-ft ulfm -n 8 python train.py : -n 1 holdfast stager --store s3://bucket/run",
        "mpirun -n 8 python train.py : -n 1 holdfast stager --store /mnt/nfs/run --ring-bytes 8GiB --keep-last 5",
    ),
)
@setting_options(
    StagerConfig,
    store=str,
    create=bool,
    ring_bytes=str,
    chunk_bytes=str,
    keep_last=int,
    keep_every=int,
    keep_hourly=int,
    keep_daily=int,
    on_nonfinite=click.Choice(["warn", "refuse"]),
    niceness=int,
    verify=bool,
    reuse=bool,
    linger=bool,
    writers=int,
    runtime_dir=click.Path(path_type=Path),
    offer_seconds_max=float,
    chunk_seconds_max=float,
    rank_seconds_max=float,
    start_seconds_max=float,
    on_divergence=click.Choice(["warn", "refuse", "off"]),
    events=click.Path(path_type=Path),
    metrics_port=int,
    metrics_address=str,
)
def stager(**arguments: Any) -> None:
    """Receive the checkpoints of an MPI job and pass them to the flusher, which writes them to the store.

    The stager is one process of the job: add it to the mpirun line once, after the training script. It starts the
    flusher if none serves the run yet. It ends when every training rank has left and every staged checkpoint is in the
    store.
    """
    # Here and not above: importing it starts MPI, which `holdfast --help` must not.
    from stager.mpi import MpiTrainersPort

    # mpirun passes this signal on to every process of the job; for trainers that watch it, it is a preemption notice.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config, problem = None, None
    try:
        identify("stager")
        config = StagerConfig.from_sources(**arguments)
        yield_to_training(config.niceness)
    except HoldfastError as error:
        problem = error  # the trainers must be told, so join them first
    port = MpiTrainersPort.join(config.start_seconds_max if config else _JOIN_SECONDS_MAX)
    try:
        lost_ranks = _serve(port, config, problem)
    except (HoldfastError, click.exceptions.Exit):
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the trainers must not wait for it
        # Told by a death that MPI sees at once: at the end of MPI the trainers would wait for us, and we for them.
        _log.exception("the stager ends by an unexpected error; the flusher still writes what is staged")
        logging.shutdown()
        os._exit(1)
    if lost_ranks:
        # MPI_Finalize waits for dead ranks, now and then for ever, and all is done that this process is for.
        logging.shutdown()
        os._exit(0)


def _serve(port: TrainersPort, config: StagerConfig | None, problem: HoldfastError | None) -> set[int]:
    """Receive until the trainers have left; return the ranks that were lost. Without settings, tell them why."""
    from stager.flusher_process import attach
    from stager.refusal import refuse_start
    from stager.segments import SegmentList
    from stager.service import StagerService

    segments = None
    try:
        if config is None:
            assert problem is not None
            raise problem
        segments = SegmentList(config.runtime_dir)
        flusher = attach(config)
    except HoldfastError as error:
        is_told = refuse_start(port, error)
        if segments is not None:
            segments.close()
        if is_told:  # the lowest rank says it: once for the job
            _log.debug("the start was refused", exc_info=error)
            click.get_current_context().exit(error.exit_code)
        raise
    events = EventLog(config.events, role="stager")
    service = StagerService(config, port, flusher, events=events)
    with export_spans("stager", flusher.store_url, events):  # around all else: it may take seconds to end
        try:
            board = Board("stager", flusher.store_url, ranks=service.ranks_said)
            events.listen(board.hear)
            with serve_metrics(config, events), serve_status(flusher.ring.directory, "stager", board.said):
                events.emit(
                    "stager_ready",
                    {"attempt": flusher.attempt, "ranks": port.ranks, "flusher_pid": flusher.pid},
                )
                service.run()
                events.emit("stager_ended")
        finally:
            service.close()
            events.close()
            segments.close()
    return service.lost_ranks
