"""`holdfast flusher`: start the process that owns the ring. Usually the stager does this itself.

Says one line of JSON on stdout when stagers may connect, `{"ready": true, "directory": …, "attempt": …}`, or
`{"error": {"code": …, "message": …, "help": …}}` and ends with the exit code of the error's class.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from flusher.lifetime import live
from holdfast.command.examples import examples
from holdfast.config import FlusherConfig
from holdfast.errors import HoldfastError
from holdfast.faultpoint import identify
from holdfast.process import yield_to_training

_log = logging.getLogger("holdfast.flusher")


@click.command(
    short_help="Write, publish, verify and prune the checkpoints of one run.",
    epilog=examples("holdfast flusher --store s3://bucket/run --ring-bytes 8GiB --linger"),
)
@click.option("--store", help="URL of the run: a path, or s3://bucket/run.")
@click.option("--chunk-bytes", help="Size of a chunk, such as 16MiB.")
@click.option("--ring-bytes", help="Memory for the ring, such as 1GiB.")
@click.option("--keep-last", type=int, help="How many of the newest good checkpoints to keep; 0 keeps all.")
@click.option("--keep-every", type=int, help="Keep each step that this divides as well; 0 is off.")
@click.option(
    "--niceness", type=int, help="CPU priority given up: 10 yields to training on the same machine."
)
@click.option("--verify/--no-verify", default=None, help="Read every checkpoint back after it was published.")
@click.option(
    "--reuse/--no-reuse", default=None, help="Write over checkpoints that are no longer kept (ext4, XFS)."
)
@click.option("--linger/--no-linger", default=None, help="Stay after the training has ended.")
@click.option("--writers", type=int, help="How many threads write parts.")
@click.option(
    "--runtime-dir", type=click.Path(path_type=Path), help="Where the ring lies; wants to be in memory."
)
@click.option("--grace-seconds", type=float, help="How long to wait for a stager that vanished to come back.")
@click.option(
    "--held-seconds-max",
    type=float,
    help="How long to go on, without a stager, with a store that takes nothing.",
)
@click.option("--heartbeat-seconds", type=float, help="How often the claim on the run is renewed.")
@click.option(
    "--events", type=click.Path(path_type=Path), help="File to append events to, one JSON line each."
)
@click.option(
    "--metrics-port",
    type=int,
    help="Serve /metrics to Prometheus: the stager on this port, the flusher on the next.",
)
@click.option("--metrics-address", help="Address for that; by default this machine alone reaches it.")
def flusher(**arguments: Any) -> None:
    """Own the ring of one run: write, publish, verify and prune its checkpoints.

    Runs outside the MPI job and outlives it. Ends when a stager says that the training is over, or some time after one
    vanished; with --linger it waits for the next job. One that finds the ring of a flusher that was killed goes on with
    it: what is staged there is published.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    is_ready = False

    def ready(said: dict[str, Any]) -> None:
        nonlocal is_ready
        is_ready = True
        _say({"ready": True, **said})

    try:
        identify("flusher")
        config = FlusherConfig.from_sources(**arguments)
        yield_to_training(config.niceness)
        live(config, ready)
    except HoldfastError as error:
        _log.error("%s", error)
        _log.error("help: %s", error.help)
        if not is_ready:
            _say({"error": {"code": error.code, "message": str(error), "help": error.help}})
        sys.exit(error.exit_code)


def _say(document: dict[str, Any]) -> None:
    try:
        click.echo(json.dumps(document))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever started us is gone; the ring is worth keeping all the same
        _log.warning("nobody reads what this flusher says: %s", document)
