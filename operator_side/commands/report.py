"""`holdfast report RUN`: writes one HTML page about a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json, print_line
from holdfast.command.place import check_file_place, write_all, write_atomically
from holdfast.errors import StoreError, StoreMissing
from operator_side.commands.options import (
    DOLLARS_PER_HOUR,
    check_dollars_per_hour,
    exit_codes,
    file,
    force_flag,
)
from operator_side.commands.target import URL, Target

if TYPE_CHECKING:
    from holdfast.telemetry.rows import StoredCheckpoint


_FILE = "holdfast-report.html"
_FAULTS_SHOWN = 20


@click.command(
    short_help="Write one HTML page about a run: what happened, and what it cost.",
    epilog=exit_codes("5 there is no such run, and no event log was given")
    + examples(
        "holdfast report s3://bucket/run --events ~/.local/state/holdfast/runs/logs",
        "holdfast report /mnt/run --events rank-0.jsonl --events stager.jsonl --output night.html",
    ),
)
@click.argument("target", metavar="RUN", type=URL)
@file(
    "--events events",
    "Event log, or log directory of `holdfast run`; repeatable.",
    metavar="FILE",
    multiple=True,
)
@file("--output", "File to write, or the directory for it.", Path(_FILE))
@force_flag("the file of --output")
@DOLLARS_PER_HOUR
@json_option
def report(
    as_json: bool,
    target: Target,
    events: tuple[Path, ...],
    output: Path,
    force: bool,
    dollars_per_hour: float | None,
) -> None:
    """Write one HTML page about RUN, the URL of a run: what happened, what it cost, and what needs attention.

    The command reads the manifests in the store and the event logs. The page is one file that loads nothing else, so it
    can be sent to anybody. Without event logs the page shows only the checkpoints; with event logs the store may be
    unreachable.

    JSON: {"file", "nbytes", "happened": [sentence, …], "look_at": [{"text", "section"}], "unknown": […], "checkpoints",
    "interruptions", "goodput"}; goodput is null if unknown.
    """
    from holdfast.telemetry.event_reading import read_logs
    from operator_side.report.facts import gather_facts
    from operator_side.report.page import report_page
    from operator_side.report.sentences import find_hints, summarize_run

    check_dollars_per_hour(dollars_per_hour)
    path = check_file_place(output, _FILE, force=force)
    log = read_logs(events)
    notes: list[str] = []
    stored = _read_stored(target, notes, may_fail=not events)
    facts = gather_facts(target.url, log, stored, dollars_per_hour=dollars_per_hour, notes=notes)
    html = report_page(facts, made_at_unix=time.time())
    write_atomically(path, len(html), lambda fd: write_all(fd, memoryview(html)))
    happened = summarize_run(facts)
    if as_json:
        hints = [one._asdict() for one in find_hints(facts)]
        counts = {"checkpoints": len(facts.rows), "interruptions": len(facts.interruptions)}
        goodput = None if facts.goodput is None else facts.goodput.share
        known = {"happened": happened, "look_at": hints, "unknown": facts.unknown}
        print_json({"file": str(path), "nbytes": len(html), **known, **counts, "goodput": goodput})
        return
    for sentence in happened:
        print_line(sentence)
    print_line(f"{path}: {len(html)} bytes")


def _read_stored(target: Target, notes: list[str], *, may_fail: bool) -> list[StoredCheckpoint]:
    """Read the manifests of the run; append faults to `notes`. `may_fail`: raise if the store cannot be read."""
    from holdfast.telemetry.rows import StoredCheckpoint

    try:
        found: list[StoredCheckpoint] = []
        faults: list[str] = []
        for item in target.read_listing().items():
            stored = None if item.manifest is None else StoredCheckpoint.from_manifest(item.manifest)
            if stored is not None:
                found.append(stored)
            if item.fault or stored is None:
                undated = f"{item.name}: its manifest does not say when it was made; it is left out"
                faults.append(item.fault or undated)
    except (StoreError, StoreMissing) as error:
        if may_fail:
            raise
        notes.append(f"The store could not be read: {error}")
        return []
    notes += [f"In the store: {fault}" for fault in faults[:_FAULTS_SHOWN]]
    if len(faults) > _FAULTS_SHOWN:
        notes.append(f"The store has {len(faults) - _FAULTS_SHOWN} more faults: `holdfast ls` names them.")
    return found
