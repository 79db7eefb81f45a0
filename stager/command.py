"""`holdfast stager`: one process of the MPI job, on the node that stays when the others are taken away.

mpirun --with-ft ulfm -n 8 python train.py : -n 1 holdfast stager --store s3://bucket/run
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from holdfast.config import StagerConfig
from holdfast.errors import HoldfastError
from holdfast.events import EventLog

__all__ = ["stager"]

_JOIN_SECONDS_MAX = 300.0  # before the settings are known: all trainers import torch first


@click.command()
@click.option("--store", help="URL of the run: a path, or s3://bucket/run.")
@click.option(
    "--ring-bytes", help="Memory for the ring, such as 1GiB. A larger checkpoint streams through it."
)
@click.option("--chunk-bytes", help="Size of a chunk, such as 16MiB.")
@click.option("--keep-last", type=int, help="How many of the newest good checkpoints to keep; 0 keeps all.")
@click.option("--keep-every", type=int, help="Keep each step that this divides as well; 0 is off.")
@click.option("--verify/--no-verify", default=None, help="Read every checkpoint back after it was published.")
@click.option(
    "--linger/--no-linger", default=None, help="Leave the flusher running after the training has ended."
)
@click.option("--writers", type=int, help="How many threads of the flusher write parts.")
@click.option(
    "--runtime-dir", type=click.Path(path_type=Path), help="Where the ring lies; wants to be in memory."
)
@click.option("--offer-seconds-max", type=float, help="How long the slowest rank of a step is waited for.")
@click.option("--chunk-seconds-max", type=float, help="How long a granted chunk may take to arrive.")
@click.option(
    "--start-seconds-max", type=float, help="How long to wait for trainers and flusher at the start."
)
@click.option(
    "--events", type=click.Path(path_type=Path), help="File to append events to, one JSON line each."
)
def stager(**arguments: Any) -> None:
    """Receive the checkpoints of this MPI job. Add it to the mpirun line as one more program, once.

    Starts the flusher if none serves the store yet. Ends when all trainers have left, and all is in the store.
    """
    # Here and not above: importing it starts MPI, which `holdfast --help` must not.
    from stager.flusher_process import attach
    from stager.mpi import Port
    from stager.service import Service, refuse_start

    config, problem = None, None
    try:
        config = StagerConfig.from_sources(**arguments)
    except HoldfastError as error:
        problem = error  # the trainers must be told, so join them first
    port = Port.join(config.start_seconds_max if config else _JOIN_SECONDS_MAX)
    try:
        if config is None:
            assert problem is not None
            raise problem
        flusher = attach(config)
    except HoldfastError as error:
        refuse_start(port, error)
        raise
    events = EventLog(config.events, role="stager")
    try:
        events.emit(
            "stager_ready", {"attempt": flusher.attempt, "ranks": port.ranks, "flusher_pid": flusher.pid}
        )
        service = Service(config, port, flusher, events=events)
        service.run()
        events.emit("stager_ended")
    finally:
        flusher.close()
        events.close()
    if service.lost_ranks:
        # MPI_Finalize waits for dead ranks, now and then for ever, and all is done that this process is for.
        logging.shutdown()
        os._exit(0)
