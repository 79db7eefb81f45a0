"""`holdfast status`: shows a run in the terminal or in a browser, or prints its state once, or as JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
from rich.console import Group
from rich.live import Live

from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, print_json
from holdfast.errors import ConfigError
from operator_side.commands import options as option
from operator_side.commands.status_output import render
from operator_side.status.run_status import RunStatus
from operator_side.status.run_watch import RunWatches

_ROWS_LEAST = 14  # of one run in a window: its head, levels and loss


@click.command(
    short_help="Watch a run: its progress, and the loss if it were killed now.",
    epilog=option.exit_codes("5 there is no such run on this machine or in the store")
    + examples(
        "holdfast status",
        "ssh -t stager holdfast status --dollars-per-hour 12.40",
        "holdfast status --web",
        "holdfast status s3://bucket/run --json",
    ),
)
@click.argument("run", metavar="[RUN]", required=False)
@option.flag("--once", "Print the state once and end; this is the default where stdout is not a terminal.")
@option.flag("--web", "Serve the status as a live page on 127.0.0.1 until Ctrl-C.")
@option.count("--port", "Port of the page; 0 takes any that is free.", 8765, least=0, most=65535)
@option.file(
    "--events events",
    "With --web and RUN: event log, or log directory of `holdfast run`; repeatable. Default: where `holdfast run` of "
    "this machine and user puts them.",
    metavar="FILE",
    multiple=True,
)
@option.number("--interval-seconds", "Seconds between two updates.", 1.0, least=0.1, most=3600)
@option.DOLLARS_PER_HOUR
@option.file("--runtime-dir", "Directory with the rings of this machine. Default: /dev/shm/holdfast-UID.")
@json_option
def status(
    as_json: bool,
    run: str | None,
    once: bool,
    web: bool,
    port: int,
    events: tuple[Path, ...],
    interval_seconds: float,
    dollars_per_hour: float | None,
    runtime_dir: Path | None,
) -> None:
    """Show the progress of a run, and the loss if it were killed now. The run is not slowed down.

    RUN is the URL of the run or its runtime directory; without RUN the command shows all runs of this machine. Start it
    on the stager's machine: `ssh stager holdfast status`. It asks the stager and the flusher while they run, and reads
    the ring and, without a flusher, the store.

    With --web a browser shows the status: the command prints the URL, and an ssh command for a browser on another
    machine. The page loads nothing from other hosts. Goodput, losses and kills come from the event logs.

    JSON: {"runs": [{"run", "attempt", "is_running", "levels", "loss_trainers", "loss_node", "flights", "ring",
    "ranks", …}]}; docs/status.md describes every field.
    """
    option.check_dollars_per_hour(dollars_per_hour)
    if web and (once or as_json):
        raise ConfigError(
            "--web serves a page: leave out --once and --json; the page has a link to its JSON document"
        )
    if events and not (web and run):
        raise ConfigError("--events: expected with --web and RUN, whose logs they are")
    watches = RunWatches(run, runtime_dir, dollars_per_hour)
    found = watches.poll()
    if web:
        from operator_side.commands.status_web import StatusWeb, serve_web

        serve_web(StatusWeb(watches, interval_seconds, events, dollars_per_hour), port)
        return
    if as_json:
        print_json({"runs": [one.document() for one in found]})
        return
    out = console()
    if once or not out.is_terminal or out.is_dumb_terminal:
        out.print(*(render(one, ascii_only=out.options.ascii_only) for one in found), sep="\n")
        return
    _live(watches, found, interval_seconds)


def _live(watches: RunWatches, found: list[RunStatus], interval_seconds: float) -> None:
    """Show the runs until Ctrl-C; then leave the last output in the terminal."""
    out = console()

    def drawn(height: int | None) -> Group:
        count = len(found) if height is None else min(len(found), max(1, height // _ROWS_LEAST))
        older = len(found) - count
        rows = None if height is None else (height - bool(older)) // count
        shown = [render(one, ascii_only=out.options.ascii_only, height=rows) for one in found[:count]]
        return Group(*shown, *([f"and {older} older runs: holdfast status --once"] if older else []))

    try:
        with Live(drawn(out.height), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_seconds)
                found = watches.poll()
                live.update(drawn(out.height), refresh=True)
    except KeyboardInterrupt:
        sys.stdout.flush()
    out.print(drawn(None))
