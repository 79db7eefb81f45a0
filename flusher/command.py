"""`holdfast flusher`: the process that owns the ring. Usually the stager starts it.

Prints one line of JSON on stdout: `{"ready": true, "directory": …, "attempt": …}` when stagers may connect, or
`{"error": {"code": …, "message": …, "help": …}}` before it exits with the error class's exit code.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from flusher.lifetime import run_flusher
from holdfast.command.examples import examples
from holdfast.command.settings import setting_options
from holdfast.config import FlusherConfig
from holdfast.errors import HoldfastError
from holdfast.faultpoint import identify
from holdfast.process import yield_to_training

_GC_THRESHOLD_OBJECTS = 200_000
_log = logging.getLogger("holdfast.flusher")


@click.command(
    short_help="Write, publish, verify and prune the checkpoints of one run.",
    epilog=examples("holdfast flusher --store s3://bucket/run --ring-bytes 8GiB --linger"),
)
@setting_options(
    FlusherConfig,
    store=str,
    create=bool,
    chunk_bytes=str,
    ring_bytes=str,
    keep_last=int,
    keep_every=int,
    keep_hourly=int,
    keep_daily=int,
    keep_best=int,
    best_metric=str,
    best_mode=click.Choice(["min", "max"]),
    on_nonfinite=click.Choice(["warn", "refuse"]),
    niceness=int,
    share=str,
    verify=bool,
    reuse=bool,
    linger=bool,
    writers=int,
    runtime_dir=click.Path(path_type=Path),
    grace_seconds=float,
    held_seconds_max=float,
    heartbeat_seconds=float,
    events=click.Path(path_type=Path),
    metrics_port=int,
    metrics_address=str,
)
def flusher(**arguments: Any) -> None:
    """Write the checkpoints of one run from the ring to the store: write, publish, verify and prune them.

    The flusher runs outside the MPI job and outlives it; usually the stager starts it. It ends when the stager says
    that training is over, or --grace-seconds after it lost the stager; with --linger it waits for the next job. After a
    flusher was killed, the next one takes over its ring and publishes what is staged there.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    is_ready = False

    def ready(details: dict[str, Any]) -> None:
        nonlocal is_ready
        is_ready = True
        _print_json({"ready": True, **details})
        # Lower the priority only now: until then the stager waits for this process, and the ranks for the stager.
        yield_to_training(config.niceness)

    try:
        identify("flusher")
        config = FlusherConfig.from_sources(**arguments)
        # A manifest has a few objects per tensor, and no cycles. With tens of thousands of tensors the cyclic garbage
        # collector would take half of the time.
        gc.set_threshold(_GC_THRESHOLD_OBJECTS)
        run_flusher(config, ready)
    except HoldfastError as error:
        _log.error("%s", error)
        _log.error("help: %s", error.help)
        if not is_ready:
            _print_json({"error": {"code": error.code, "message": str(error), "help": error.help}})
        sys.exit(error.exit_code)


def _print_json(document: dict[str, Any]) -> None:
    try:
        click.echo(json.dumps(document))
        sys.stdout.flush()
    except BrokenPipeError:  # the process that started this one is gone; keep serving the ring
        _log.warning("the process that started this flusher does not read its output any more: %s", document)
