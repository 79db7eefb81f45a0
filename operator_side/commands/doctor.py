"""`holdfast doctor`: check whether this machine is fit for a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, print_json, print_line, table
from holdfast.config import RING_BYTES, RING_CHUNKS_MIN, default_runtime_dir
from holdfast.errors import ConfigError
from holdfast.image.layout import CHUNK_BYTES
from operator_side.commands.options import exit_codes, file, parse_size_argument, text
from operator_side.doctor import examine

_STYLE = {
    CheckState.OK: "green",
    CheckState.WARN: "yellow",
    CheckState.FAIL: "bold red",
    CheckState.SKIPPED: "dim",
}


@click.command(
    short_help="Check this machine, its MPI and the store before a run.",
    epilog=exit_codes(
        "0 fit for a run, perhaps with warnings", "2 something must be fixed first; the output says what"
    )
    + examples(
        "holdfast doctor                                           # this machine",
        "holdfast doctor --store s3://bucket/run                   # and the store, as the flusher will use it",
        "holdfast doctor --hostfile hosts --store s3://bucket/run  # and the network between two hosts",
    ),
)
@text("--store", "URL of the planned run: a path, or s3://bucket/run. Without it no store is checked.")
@text(
    "--ring-bytes",
    "Size of the ring: shared memory for checkpoints on their way to the store. Default: it grows to hold two "
    "checkpoints, and the check says how large it can become.",
)
@text("--chunk-bytes", "Size of a chunk, such as 16MiB.", f"{CHUNK_BYTES >> 20}MiB")
@file("--runtime-dir", "Directory in which the ring will be. Default: /dev/shm/holdfast-UID.")
@click.option(
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Hostfile of the MPI job; the network between two of its hosts is measured with a rank on each.",
)
@json_option
def doctor(
    as_json: bool,
    store: str | None,
    ring_bytes: str | None,
    chunk_bytes: str,
    runtime_dir: Path | None,
    hostfile: Path | None,
) -> None:
    """Check by trial whether a run would work here: memory for the ring, MPI and its fault tolerance (one test process
    is killed to see that another one notices), permissions and speed of the store, clocks, and network.

    The command takes about ten seconds and leaves nothing behind.

    JSON: {"fit": bool, "findings": [{"check", "state": "ok|warn|fail|skipped", "seen", "fix"}]}.
    """
    chunk_size = parse_size_argument("--chunk-bytes", chunk_bytes)
    smallest = max(RING_BYTES, RING_CHUNKS_MIN * chunk_size)
    plan = CheckPlan(
        store=store,
        runtime_dir=(runtime_dir or default_runtime_dir()).absolute(),
        ring_bytes=smallest if ring_bytes is None else parse_size_argument("--ring-bytes", ring_bytes),
        chunk_bytes=chunk_size,
        hostfile=hostfile,
        ring_grows=ring_bytes is None,
    )
    if plan.ring_bytes < RING_CHUNKS_MIN * plan.chunk_bytes:
        raise ConfigError(
            f"--ring-bytes {ring_bytes}: expected at least {RING_CHUNKS_MIN} chunks, "
            f"each of {plan.chunk_bytes} bytes"
        )
    findings = []
    for finding in examine(plan):
        findings.append(finding)
        if not as_json:
            _show(finding)
    counts = Counter(finding.state for finding in findings)
    is_fit = not counts[CheckState.FAIL]
    if as_json:
        print_json({"fit": is_fit, "findings": [asdict(finding) for finding in findings]})
    else:
        summary = ", ".join(f"{counts[state]} {state}" for state in CheckState if counts[state])
        print_line(f"{'fit' if is_fit else 'not fit'}: {summary}")
    if not is_fit:
        click.get_current_context().exit(ConfigError.exit_code)


def _show(finding: Finding) -> None:
    row = table("", "", "")
    row.show_header = False
    row.columns[0].width, row.columns[1].width = 7, 18
    row.columns[2].no_wrap = False
    row.add_row(f"[{_STYLE[finding.state]}]{finding.state}[/]", finding.check, escape(finding.seen))
    if finding.fix:
        row.add_row("", "", escape(f"-> {finding.fix}"))
    console().print(row)
