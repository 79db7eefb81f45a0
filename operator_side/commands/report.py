"""`holdfast report RUN`: what happened in a run, as one HTML file."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast import __version__
from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json
from holdfast.command.place import place, write_whole
from holdfast.errors import ConfigError, StoreError, StoreMissing
from operator_side.commands.target import URL, Target

if TYPE_CHECKING:
    from holdfast.telemetry.rows import StoredCheckpoint


_FILE = "holdfast-report.html"
_FAULTS_SHOWN = 20


@click.command(
    short_help="Write what happened in a run as one HTML page, for who was asleep.",
    epilog=examples(
        "holdfast report s3://bucket/run --events ~/.local/state/holdfast/runs/logs",
        "holdfast report /mnt/run --events rank-0.jsonl --events stager.jsonl --output night.html",
    ),
)
@click.argument("target", metavar="RUN", type=URL)
@click.option(
    "--events",
    "events",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="An event log, or the log directory of `holdfast run`; may be given several times.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path(_FILE),
    show_default=True,
    help="The page, or the directory it goes into.",
)
@click.option("--force", is_flag=True, help="Replace the page if it is there.")
@click.option(
    "--dollars-per-hour",
    type=click.FloatRange(0),
    envvar="HOLDFAST_DOLLARS_PER_HOUR",
    help="What all machines of the run cost, to show losses in money.",
)
@json_option
def report(
    as_json: bool,
    target: Target,
    events: tuple[Path, ...],
    output: Path,
    force: bool,
    dollars_per_hour: float | None,
) -> None:
    """Write one HTML page about the run at URL: what happened, what it cost, and what to look at.

    It is made of the manifests in the store and of event logs, and needs no server: the file loads nothing and can be
    sent to anybody. Without event logs it has the checkpoints alone; with them a store that is not there is no error.

    JSON: {"file", "nbytes", "happened": [sentence, …], "look_at": [{"text", "section"}], "unknown": […], "checkpoints",
    "interruptions", "goodput"}; goodput is null where it is not known.

    Exit code 5: there is no such run, and no event log was given.
    """
    from holdfast.telemetry.event_reading import read_logs
    from operator_side.report.facts import gather
    from operator_side.report.page import page
    from operator_side.report.sentences import look_at, what_happened

    if dollars_per_hour is not None and not math.isfinite(dollars_per_hour):
        raise ConfigError(f"--dollars-per-hour {dollars_per_hour}: expected a price")
    path = place(output, _FILE, force=force)
    log = read_logs(events)
    notes: list[str] = []
    stored = _stored(target, notes, may_fail=not events)
    facts = gather(target.url, log, stored, dollars_per_hour=dollars_per_hour, notes=notes)
    made = page(facts, made_at_unix=time.time(), version=__version__)

    def fill(fd: int) -> None:
        rest = memoryview(made)
        while rest:
            rest = rest[os.write(fd, rest) :]

    write_whole(path, len(made), fill)
    if as_json:
        print_json(
            {
                "file": str(path),
                "nbytes": len(made),
                "happened": what_happened(facts),
                "look_at": [one._asdict() for one in look_at(facts)],
                "unknown": facts.unknown,
                "checkpoints": len(facts.rows),
                "interruptions": len(facts.interruptions),
                "goodput": None if facts.goodput is None else facts.goodput.share,
            }
        )
        return
    from holdfast.command.output import console, plain

    out = console()
    for sentence in what_happened(facts):
        out.print(plain(sentence), markup=False, soft_wrap=True)
    out.print(plain(f"{path}: {len(made)} bytes"), markup=False, soft_wrap=True)


def _stored(target: Target, notes: list[str], *, may_fail: bool) -> list[StoredCheckpoint]:
    """The manifests; notes what cannot be read. Raises as `Catalog.list` where there is nothing else to tell of."""
    from holdfast.telemetry.rows import StoredCheckpoint

    try:
        catalog = target.catalog()
        items = catalog.list()
        if not items and not catalog.store.list():
            raise StoreMissing(
                f"{catalog.store.url}: there is no run here (nothing at all); is the URL right?"
            )
    except (StoreError, StoreMissing) as error:
        if may_fail:
            raise
        notes.append(f"The store told nothing: {error}")
        return []
    found: list[StoredCheckpoint] = []
    faults: list[str] = []
    for item in items:
        stored = None if item.manifest is None else StoredCheckpoint.of(item.manifest)
        if stored is not None:
            found.append(stored)
        if item.fault or stored is None:
            faults.append(item.fault or f"{item.name}: does not say when it was made; left out")
    notes += [f"In the store: {fault}" for fault in faults[:_FAULTS_SHOWN]]
    if len(faults) > _FAULTS_SHOWN:
        notes.append(f"And {len(faults) - _FAULTS_SHOWN} more faults in the store: `holdfast ls` names them.")
    return found
