"""`holdfast ls URL`: the checkpoints of a run."""

from __future__ import annotations

from typing import Any

import click

from holdfast.checkpoints.catalog import CatalogItem
from holdfast.checkpoints.slice_sets import SliceSet
from holdfast.command.examples import examples
from holdfast.command.output import age, console, json_option, plain, print_json, seconds, size, table
from holdfast.errors import StoreMissing
from operator_side.commands.target import URL, Target


@click.command(
    short_help="List the checkpoints of a run, newest first.",
    epilog=examples(
        "holdfast ls s3://bucket/run",
        "holdfast ls /mnt/run --json | jq '.checkpoints[0].step'",
    ),
)
@click.argument("target", metavar="URL", type=URL)
@json_option
def ls(as_json: bool, target: Target) -> None:
    """List the checkpoints of the run at URL, newest first.

    \b
    State: verified  published, read back and found good
           durable   published, not read back yet
           drifted   published, but the replicas of the ranks differed; restore prefers the one before
           bad       published, read back and found bad
           damaged   its manifest or its file is missing or broken
           slices    complete, as slices that ranks wrote: `holdfast assemble` makes a file of them
           partial   slices, of which some are missing

    JSON: {"url", "checkpoints": [{"step", "attempt", "state", "fault", "file", "file_bytes", "ranks", "created",
    "pgt1_seconds", "pgt2_seconds", "drift", "nonfinite"}], "slices": [{"step", "attempt", "state": "slices|partial",
    "fault", "ranks", "sealed", "nbytes"}]}. Values that a damaged manifest does not have are null. pgt1_seconds is the
    time from save() until the checkpoint was staged, pgt2_seconds until it was durable. drift says which replicas
    differed; it is empty where none did. nonfinite is the number of values in floating tensors that are NaN or
    infinite, counted when the checkpoint was read back; null: not counted.
    """  # noqa: D301 - the character itself is what tells click not to wrap the paragraph
    catalog = target.catalog()
    items = catalog.list()
    if not items and not catalog.store.list():
        raise StoreMissing(f"{catalog.store.url}: there is nothing at this URL; check the URL")
    published = {item.manifest.order for item in items if item.manifest}
    sets = [found for found in catalog.slices() if found.order not in published]
    if as_json:
        documents = [_document(item) for item in items]
        print_json({"url": catalog.store.url, "checkpoints": documents, "slices": [_slices(s) for s in sets]})
        return
    out = console()
    if not items and not sets:
        out.print(f"{catalog.store.url}: the run has no checkpoint yet", markup=False)
        return
    rows = table(
        "STEP",
        "SIZE",
        "STATE",
        "AGE",
        "RANKS",
        "DURABLE IN",
        "FILE",
        right=("STEP", "SIZE", "AGE", "RANKS", "DURABLE IN"),
    )
    for found in sets:
        rows.add_row(*_slice_cells(found), style="yellow")
    for item in items:
        rows.add_row(
            *_cells(item), style="red" if item.fault else "yellow" if item.drift or _broken(item) else ""
        )
    out.print(rows)
    for item in items:
        if item.fault:
            out.print(plain(item.fault), markup=False, style="red", soft_wrap=True)
        elif item.drift:
            out.print(plain(f"{item.name}: {item.drift}"), markup=False, style="yellow", soft_wrap=True)
        if _broken(item) and not item.fault:
            out.print(plain(f"{item.name}: {_broken(item)}"), markup=False, style="yellow", soft_wrap=True)


def _broken(item: CatalogItem) -> str:
    """Its numbers that are not finite; empty where none is, or none was counted."""
    counted = item.manifest.nonfinite if item.manifest else None
    return counted.told() if counted and counted.values else ""


def _cells(item: CatalogItem) -> tuple[str, ...]:
    manifest = item.manifest
    if manifest is None:
        return (str(item.step), size(item.file_bytes), item.state, "-", "-", "-", item.name)
    return (
        str(item.step),
        size(item.file_bytes),
        item.state,
        age(manifest),
        str(manifest.ranks),
        seconds(manifest.pgt2_seconds),
        manifest.file,
    )


def _slice_cells(found: SliceSet) -> tuple[str, ...]:
    where = f"{len(found.seals)} of {found.ranks} slices, attempt {found.attempt}"
    return (str(found.step), size(found.nbytes), _state(found), "-", str(found.ranks), "-", where)


def _state(found: SliceSet) -> str:
    return "slices" if found.complete else "partial"


def _slices(found: SliceSet) -> dict[str, Any]:
    return {
        "step": found.step,
        "attempt": found.attempt,
        "state": _state(found),
        "fault": found.fault,
        "ranks": found.ranks,
        "sealed": len(found.seals),
        "nbytes": found.nbytes,
    }


def _document(item: CatalogItem) -> dict[str, Any]:
    manifest = item.manifest
    return {
        "step": item.step,
        "attempt": manifest.attempt if manifest else None,
        "state": item.state,
        "fault": item.fault,
        "file": manifest.file if manifest else None,
        "file_bytes": item.file_bytes,
        "ranks": manifest.ranks if manifest else None,
        "created": manifest.created if manifest else None,
        "pgt1_seconds": manifest.pgt1_seconds if manifest else None,
        "pgt2_seconds": manifest.pgt2_seconds if manifest else None,
        "drift": item.drift,
        "nonfinite": manifest.nonfinite.values if manifest and manifest.nonfinite else None,
    }
