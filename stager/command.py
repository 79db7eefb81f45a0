"""`holdfast stager`: one process of the MPI job, on the node that stays when the others are taken away.

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
    from stager.mpi import TrainersPort


_log = logging.getLogger("holdfast.stager")

_JOIN_SECONDS_MAX = 300.0  # before the settings are known: all trainers import torch first


@click.command(
    epilog=examples(
        "mpirun --with-ft ulfm -n 8 python train.py : -n 1 holdfast stager --store s3://bucket/run",
        "mpirun -n 8 python train.py : -n 1 holdfast stager --store /mnt/nfs/run --ring-bytes 8GiB --keep-last 5",
    ),
)
@click.option("--store", help="URL of the run: a path, or s3://bucket/run.")
@click.option(
    "--ring-bytes", help="Memory for the ring, such as 1GiB. A larger checkpoint streams through it."
)
@click.option("--chunk-bytes", help="Size of a chunk, such as 16MiB.")
@click.option("--keep-last", type=int, help="How many of the newest good checkpoints to keep; 0 keeps all.")
@click.option("--keep-every", type=int, help="Keep each step that this divides as well; 0 is off.")
@click.option(
    "--niceness", type=int, help="CPU priority given up: 10 yields to training on the same machine."
)
@click.option("--verify/--no-verify", default=None, help="Read every checkpoint back after it was published.")
@click.option(
    "--reuse/--no-reuse", default=None, help="Write over checkpoints that are no longer kept (ext4, XFS)."
)
@click.option(
    "--linger/--no-linger", default=None, help="Leave the flusher running after the training has ended."
)
@click.option("--writers", type=int, help="How many threads of the flusher write parts.")
@click.option(
    "--runtime-dir", type=click.Path(path_type=Path), help="Where the ring lies; wants to be in memory."
)
@click.option("--offer-seconds-max", type=float, help="How long the slowest rank of a step is waited for.")
@click.option("--chunk-seconds-max", type=float, help="How long a granted chunk may take to arrive.")
@click.option("--rank-seconds-max", type=float, help="How long a rank may give no sign of life.")
@click.option(
    "--start-seconds-max", type=float, help="How long to wait for trainers and flusher at the start."
)
@click.option(
    "--on-divergence",
    type=click.Choice(["warn", "refuse", "off"]),
    help="What to do when replicas that should be the same on all ranks are not.",
)
@click.option(
    "--events", type=click.Path(path_type=Path), help="File to append events to, one JSON line each."
)
@click.option(
    "--metrics-port",
    type=int,
    help="Serve /metrics to Prometheus: the stager on this port, the flusher on the next.",
)
@click.option("--metrics-address", help="Address for that; by default this machine alone reaches it.")
def stager(**arguments: Any) -> None:
    """Receive the checkpoints of this MPI job. Add it to the mpirun line as one more program, once.

    Starts the flusher if none serves the store yet. Ends when all trainers have left, and all is in the store.
    """
    # Here and not above: importing it starts MPI, which `holdfast --help` must not.
    from stager.mpi import TrainersPort

    # mpirun passes it on to every process of the job; trainers that watch for it are told by it that the end is near.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config, problem = None, None
    try:
        identify("stager")
        config = StagerConfig.from_sources(**arguments)
        yield_to_training(config.niceness)
    except HoldfastError as error:
        problem = error  # the trainers must be told, so join them first
    port = TrainersPort.join(config.start_seconds_max if config else _JOIN_SECONDS_MAX)
    try:
        lost_ranks = _serve(port, config, problem)
    except HoldfastError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the trainers must not wait for it
        # Told by a death that MPI sees at once: at the end of MPI the trainers would wait for us, and we for them.
        _log.exception("the stager failed in a way nobody foresaw; it ends, what is staged is the flusher's")
        logging.shutdown()
        os._exit(1)
    if lost_ranks:
        # MPI_Finalize waits for dead ranks, now and then for ever, and all is done that this process is for.
        logging.shutdown()
        os._exit(0)


def _serve(port: TrainersPort, config: StagerConfig | None, problem: HoldfastError | None) -> set[int]:
    """Receive until the trainers have left; the ranks that were lost. Without settings: tell them why."""
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
        refuse_start(port, error)
        if segments is not None:
            segments.close()
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
