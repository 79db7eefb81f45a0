"""`holdfast doctor`: check whether this machine is fit for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, print_json, table
from holdfast.config import RING_BYTES, RING_CHUNKS_MIN, default_runtime_dir, parse_size
from holdfast.errors import ConfigError
from holdfast.image.layout import CHUNK_BYTES
from operator_side.commands.options import exit_codes, file
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
@click.option(
    "--store", help="URL of the planned run: a path, or s3://bucket/run. Without it no store is checked."
)
@click.option(
    "--ring-bytes",
    help="Size of the ring: shared memory for checkpoints on their way to the store. Default: it grows to hold two "
    "checkpoints, and the check says how large it can become.",
)
@click.option(
    "--chunk-bytes", default=str(CHUNK_BYTES), show_default="16MiB", help="Size of a chunk, such as 16MiB."
)
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
    chunk_size = _size("--chunk-bytes", chunk_bytes)
    plan = CheckPlan(
        store=store,
        runtime_dir=(runtime_dir or default_runtime_dir()).absolute(),
        ring_bytes=_ring_bytes(ring_bytes, chunk_size),
        chunk_bytes=chunk_size,
        hostfile=hostfile,
        ring_grows=ring_bytes is None,
    )
    if plan.ring_bytes < RING_CHUNKS_MIN * plan.chunk_bytes:
        raise ConfigError(
            f"--ring-bytes {ring_bytes}: expected at least {RING_CHUNKS_MIN} chunks, "
            f"each of {plan.chunk_bytes} bytes"
        )
    findings = list(_show(plan, quiet=as_json))
    bad = [finding for finding in findings if finding.state is CheckState.FAIL]
    if as_json:
        print_json({"fit": not bad, "findings": [_document(finding) for finding in findings]})
    if bad:
        click.get_current_context().exit(ConfigError.exit_code)


def _ring_bytes(said: str | None, chunk_bytes: int) -> int:
    return max(RING_BYTES, RING_CHUNKS_MIN * chunk_bytes) if said is None else _size("--ring-bytes", said)


def _show(plan: CheckPlan, *, quiet: bool) -> list[Finding]:
    findings = []
    out = console()
    for finding in examine(plan):
        findings.append(finding)
        if not quiet:
            row = table("", "", "")
            row.show_header = False
            row.columns[0].width, row.columns[1].width = 7, 18
            row.columns[2].no_wrap = False
            row.add_row(f"[{_STYLE[finding.state]}]{finding.state}[/]", finding.check, _plain(finding.seen))
            if finding.fix:
                row.add_row("", "", _plain(f"-> {finding.fix}"))
            out.print(row)
    if not quiet:
        counts = {state: sum(finding.state is state for finding in findings) for state in CheckState}
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        out.print(f"{'not fit' if counts[CheckState.FAIL] else 'fit'}: {said}")
    return findings


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "state": finding.state.value,
        "seen": finding.seen,
        "fix": finding.fix,
    }


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected {error}") from None
