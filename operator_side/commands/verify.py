"""`holdfast verify URL[@STEP]`: reads a checkpoint and checks every byte of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import VerifyReport, verify_file
from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json, print_line, progress_bar
from holdfast.errors import ConfigError, DamageError
from holdfast.image.manifest import Manifest
from operator_side.commands.options import count, exit_codes, flag
from operator_side.commands.target import TARGET, Target

_FAULTS_SHOWN = 20


@click.command(
    short_help="Read a checkpoint and check every byte of it.",
    epilog=exit_codes("6 the checkpoint is damaged; the message names the tensors and the place in the file")
    + examples("holdfast verify s3://bucket/run@1000", "holdfast verify /mnt/run --all --threads 8"),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@flag("--all check_all", "Check every checkpoint of the run.")
@count(
    "--threads",
    "Number of threads that read at the same time. Default: 2 from a directory; from S3 as many as help.",
    most=128,
)
@json_option
def verify(as_json: bool, target: Target, check_all: bool, threads: int | None) -> None:
    """Read a checkpoint of the run at URL, and check the CRC of each chunk, of each entry of the file and of the whole
    file.

    Without @STEP the command checks the newest checkpoint, even a bad one. It changes nothing, not even the state
    in the manifest.

    A checkpoint can be whole although the replicas of its ranks differed, or although it may be torn: the command then
    says that it is drifted or doubtful, and exits with 0.

    JSON: {"url", "ok", "checkpoints": [{"step", "file", "ok", "checked_bytes", "fault", "drift", "doubt", "damage":
    [{"what", "offset", "nbytes", "expected", "got", "tensors": [path]}]}]}; fault says why a checkpoint could not be
    read, drift which replicas differed, doubt why it may be torn.
    """
    if check_all and target.step is not None:
        raise ConfigError(f"--all checks every step, and @{target.step} names one; leave one of the two out")
    catalog = target.catalog()
    documents, faults = [], []
    for manifest, name, fault in _choose(catalog, target, check_all=check_all):
        report = None
        if manifest is not None:
            with progress_bar(manifest.file, manifest.image_bytes, hidden=as_json) as advance:
                report = verify_file(catalog.store, manifest, threads=threads, progress=advance)
        documents.append(_document(name, manifest, report, fault))
        if report is None or not report.ok:
            faults.append(fault if report is None else report.summary())
        if not as_json:
            _print(name, report, manifest)
    if as_json:
        print_json({"url": catalog.store.url, "ok": not faults, "checkpoints": documents})
        if faults:  # an error would print a second document
            click.get_current_context().exit(DamageError.exit_code)
    elif faults:
        raise DamageError("\n".join(faults))


def _choose(
    catalog: Catalog, target: Target, *, check_all: bool
) -> Iterator[tuple[Manifest | None, str, str]]:
    """Yield the checkpoints to check: manifest (None if unreadable), name, and why it is unreadable."""
    if target.step is not None:
        manifest = catalog.get(target.step)
        yield manifest, manifest.file, ""
        return
    # Check the newest one even if it is bad: the user asked about it, not about an older good one.
    found = False
    for item in itertools.islice(catalog.newest_first(), None if check_all else 1):
        found = True
        yield item.manifest, item.manifest.file if item.manifest else item.name, item.fault
    if not found:
        catalog.get()  # raises: the run is missing, or has no checkpoint


def _print(name: str, report: VerifyReport | None, manifest: Manifest | None) -> None:
    if report is not None and report.ok:
        caveat = manifest.caveat if manifest is not None else ""
        kind = "drifted" if manifest is not None and manifest.drift else "doubtful"
        good = f"whole, but {kind}" if caveat else "good"
        print_line(f"{name}: {good}, {report.checked_bytes} bytes checked")
        if caveat:
            print_line(f"  {caveat}", "yellow")
        return
    print_line(f"{name}: damaged", "red")
    damages = report.damage if report is not None else ()
    for damage in damages[:_FAULTS_SHOWN]:
        print_line(f"  {damage}")
    if len(damages) > _FAULTS_SHOWN:
        print_line(f"  and {len(damages) - _FAULTS_SHOWN} more faults (--json shows all of them)")


def _document(
    name: str, manifest: Manifest | None, report: VerifyReport | None, fault: str
) -> dict[str, Any]:
    return {
        "step": manifest.step if manifest else None,
        "file": name,
        "ok": report is not None and report.ok,
        "checked_bytes": report.checked_bytes if report else 0,
        "fault": "" if report else fault,
        "drift": manifest.drift if manifest else "",
        "doubt": manifest.doubt if manifest else "",
        "damage": [asdict(damage) for damage in (report.damage if report else ())],
    }
