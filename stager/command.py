"""`holdfast stager`: the process on the on-demand node, which survives the preemption of spot nodes.

mpirun --with-ft ulfm -n 8 python train.py : -n 1 holdfast stager --store s3://bucket/run
holdfast stager --store s3://bucket/run --listen 0.0.0.0:29411
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
from holdfast.errors import ConfigError, HoldfastError
from holdfast.faultpoint import identify
from holdfast.mpirun import is_under_mpirun
from holdfast.net.key import new_key as make_key
from holdfast.notify.notify_options import destinations, notify_options
from holdfast.own_stager import report_error
from holdfast.ring.directory import run_key
from holdfast.supervised import ATTEMPT_VARIABLE, KEPT_VARIABLE
from holdfast.telemetry.event_files import EVENTS_NAME, log_directory

if TYPE_CHECKING:
    from holdfast.image.shares import ShareNumber
    from holdfast.notify.notifier import Destination, LogWatch
    from stager.flusher_process import Flusher, PreloadedFlusher
    from stager.mpi import MpiStagers
    from stager.standing import StandingStager

_log = logging.getLogger("holdfast.stager")

_JOIN_SECONDS_MAX = 300.0  # before the settings are known: all trainers import torch first
_METRICS_PORTS = 2  # the stager's own, and the next one for its flusher


@click.command(
    short_help="Receive the checkpoints of a job, on the on-demand node.",
    epilog=examples(
        "mpirun --with-ft ulfm -n 8 python train.py : -n 1 holdfast stager --store s3://bucket/run",
        "mpirun -n 8 python train.py : -n 1 holdfast stager --store /mnt/nfs/run --ring-bytes 8GiB --keep-last 5",
        "mpirun --with-ft ulfm -n 8 python train.py : -n 2 holdfast stager --store s3://bucket/run",
        "holdfast stager --store s3://bucket/run --listen 0.0.0.0:29411 --key-file key",
        "holdfast stager --store s3://bucket/run --listen 0.0.0.0:29411 --key-file key --share 1/2",
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
    keep_best=int,
    best_metric=str,
    best_mode=click.Choice(["min", "max"]),
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
    listen=str,
    share=str,
    ranks=int,
    key_file=click.Path(path_type=Path),
    tls_cert=click.Path(path_type=Path),
    tls_key=click.Path(path_type=Path),
    reconnect_seconds_max=float,
    idle_seconds_max=float,
)
@notify_options
@click.option("--once", is_flag=True, help="With --listen: end after one job.")
@click.option(
    "--own", metavar="HOST", hidden=True, help="Started by rank 0 of a job, whose ranks connect to HOST."
)
@click.option("--new-key", is_flag=True, help="Print a new key for HOLDFAST_KEY, and do nothing else.")
def stager(
    once: bool,
    own: str | None,
    new_key: bool,
    notify: tuple[str, ...],
    notify_command: tuple[str, ...],
    **arguments: Any,
) -> None:
    """Receive the checkpoints of a job and pass them to the flusher, which writes them to the store.

    Under mpirun the stager is a process of the job: add it to the mpirun line, after the training script. It ends when
    every training rank has left and every staged checkpoint is in the store.

    With --listen it stands alone, for ranks that torchrun or another launcher starts with HOLDFAST_STAGER=HOST:PORT. It
    serves one job after the other and keeps the newest checkpoints in memory between them, until it is told to stop.

    Several stagers receive and write each checkpoint together: with -n S under mpirun, where the K-th of them has share
    K/S; with --share K/S beside --listen.

    The stager starts the flusher if none serves the run yet.

    --notify and --notify-command follow the event log of stager and flusher. Under `holdfast run` they have no effect
    here, because `holdfast run` has the same options.
    """
    if new_key:
        click.echo(make_key())
        return
    # mpirun passes this signal on to every process of the job; for trainers that watch it, it is a preemption notice.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config, problem = None, None
    recipients: list[Destination] = []
    try:
        identify("stager")
        recipients = destinations(notify, notify_command)
        config = StagerConfig.from_sources(**arguments)
        if recipients and config.events is None and not _is_supervised():
            config = config.model_copy(update={"events": _default_events(config)})
    except HoldfastError as error:
        if own is not None:
            report_error(error)
        if not is_under_mpirun():
            raise
        problem = error  # join the trainers first: they must be told
    if once and (config is None or config.listen is None):
        raise ConfigError("--once is for a stager that listens: give --listen HOST:PORT as well")
    log_watch = None if config is None or _is_supervised() else _start_log_watch(config, recipients)
    try:
        if config is not None and config.listen is not None:
            _serve_standalone(config, once=once, own_host=own)
        else:
            _serve_in_mpi_job(config, problem, log_watch)
    except HoldfastError as error:
        if own is not None:
            report_error(error)
        _close_log_watch(log_watch, {"event": "gave_up", "message": str(error)})
        raise
    except Exception:  # includes click's Exit, which carries the exit code
        _close_log_watch(log_watch, None)
        raise
    # A second signal raises SystemExit and so skips this.
    _close_log_watch(log_watch, None if config is None or config.listen is None or once else _STOPPED)


_STOPPED = {"event": "stopped", "message": "the stager was told to stop, and has ended"}


def _is_supervised() -> bool:
    """Whether `holdfast run` has started this stager; it then sends the notifications."""
    return ATTEMPT_VARIABLE in os.environ or KEPT_VARIABLE in os.environ


def _default_events(config: StagerConfig) -> Path:
    return log_directory(run_key(config.store)) / EVENTS_NAME


def _start_log_watch(config: StagerConfig, recipients: list[Destination]) -> LogWatch | None:
    if not recipients or config.events is None:
        return None
    from holdfast.notify.notifier import LogWatch, Notifier

    return LogWatch(config.events, Notifier(recipients, run=config.store, is_unsupervised=True))


def _close_log_watch(log_watch: LogWatch | None, last_event: dict[str, str] | None) -> None:
    if log_watch is not None:
        log_watch.close(None if last_event is None else {"role": "stager", **last_event})


def _serve_in_mpi_job(
    config: StagerConfig | None, problem: HoldfastError | None, log_watch: LogWatch | None
) -> None:
    """Serve as a process of an MPI job."""
    # Importing `stager.mpi` starts MPI, which waits for all ranks; `holdfast --help` must not.
    from stager.flusher_process import PreloadedFlusher
    from stager.service import StartRefused, send_end, serve

    preloaded = PreloadedFlusher(config) if config else None
    from stager.mpi import MpiTrainersPort

    port = MpiTrainersPort.join(config.start_seconds_max if config else _JOIN_SECONDS_MAX)
    if config is not None:
        config = _with_share(config, port.stagers.share)
    try:
        flusher, problem = _attach_flusher(config, problem, port.stagers, preloaded)
        lost_ranks = serve(port, config, problem, flusher)
    except StartRefused as refused:
        _close_log_watch(log_watch, {"event": "gave_up", "message": str(refused.error)})
        click.get_current_context().exit(refused.error.exit_code)
    except HoldfastError as error:
        if problem is not None or port.stagers.share.writers == 1:
            raise
        # Ranks may still be running, and MPI_Finalize would wait for them.
        send_end(port, error)
        _log.error("%s", error)
        _close_log_watch(log_watch, {"event": "gave_up", "message": str(error)})
        logging.shutdown()
        os._exit(error.exit_code)
    except Exception:  # noqa: BLE001 - any bug: the trainers must not wait for a dead stager
        # Skip MPI_Finalize: trainers and stager would wait for each other. MPI reports this death at once.
        message = "the stager ends by an unexpected error; the flusher still writes what is staged"
        _log.exception("%s", message)
        _close_log_watch(log_watch, {"event": "gave_up", "message": message})
        logging.shutdown()
        os._exit(1)
    if lost_ranks:
        # Skip MPI_Finalize: it sometimes waits for dead ranks forever.
        _close_log_watch(log_watch, None)
        logging.shutdown()
        os._exit(0)


def _with_share(config: StagerConfig, share: ShareNumber) -> StagerConfig:
    """Return the settings with this stager's share, and a metrics port that no other stager of the machine uses."""
    port = config.metrics_port
    update = {"share": share, "metrics_port": None if port is None else port + _METRICS_PORTS * share.index}
    return config.model_copy(update=update)


def _attach_flusher(
    config: StagerConfig | None,
    problem: HoldfastError | None,
    stagers: MpiStagers,
    preloaded: PreloadedFlusher | None,
) -> tuple[Flusher | None, HoldfastError | None]:
    """Attach to the flusher; return it, or the error. The other stagers wait here for the lead's attempt."""
    from stager.flusher_process import attach

    try:
        if problem is not None:
            raise problem
        assert config is not None
        lead_attempt = stagers.receive_attempt(config.start_seconds_max)
        flusher = attach(config, preloaded=preloaded, lead_attempt=lead_attempt)
    except HoldfastError as error:
        stagers.send_attempt(error)
        return None, error
    stagers.send_attempt(flusher.attempt)
    return flusher, None


def _serve_standalone(config: StagerConfig, *, once: bool, own_host: str | None) -> None:
    from stager.standing import StandingStager

    if is_under_mpirun():
        raise ConfigError(
            "stager setting listen: mpirun has started this stager as a process of its job, whose ranks reach it over "
            "MPI; leave --listen out, or start the stager by itself"
        )
    if own_host is not None:
        from stager.own import OwnStager

        OwnStager(config, own_host).run()
        return
    standing = StandingStager(config)
    if KEPT_VARIABLE not in os.environ:  # otherwise `holdfast run` starts the ranks
        _print_rank_command(config, standing)
    standing.run(jobs=1 if once else None)


def _print_rank_command(config: StagerConfig, standing: StandingStager) -> None:
    click.echo(f"the stager of {config.store} listens at {standing.address}; start the ranks with", err=True)
    click.echo(f"  {standing.rank_command}", err=True)
