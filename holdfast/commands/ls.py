"""`holdfast ls URL`: the checkpoints of a run."""

from __future__ import annotations

from typing import Any

import click

from holdfast.catalog import CatalogItem
from holdfast.commands.output import age, console, json_option, print_json, seconds, size, table
from holdfast.commands.target import URL, Target
from holdfast.errors import StoreMissing

__all__ = ["ls"]


@click.command(short_help="List the checkpoints of a run, newest first.")
@click.argument("target", metavar="URL", type=URL)
@json_option
def ls(as_json: bool, target: Target) -> None:
    """List the checkpoints of the run at URL, newest first.

    \b
    State: verified  published, read back and found good
           durable   published, not read back yet
           bad       published, read back, and not good
           damaged   manifest or file are not whole

    JSON: {"url", "checkpoints": [{"step", "attempt", "state", "fault", "file", "file_bytes", "ranks",
    "created", "pgt1_seconds", "pgt2_seconds"}]}. What a damaged manifest cannot say is null.

    PGT-2 is the time from save() to durable.
    """  # noqa: D301 - the character itself is what tells click not to wrap the paragraph
    catalog = target.catalog()
    items = catalog.list()
    if not items and not catalog.store.list():
        raise StoreMissing(f"{catalog.store.url}: there is no run here (nothing at all); is the URL right?")
    if as_json:
        print_json({"url": catalog.store.url, "checkpoints": [_document(item) for item in items]})
        return
    out = console()
    if not items:
        out.print(f"{catalog.store.url}: no checkpoint yet", markup=False)
        return
    rows = table(
        "STEP",
        "SIZE",
        "STATE",
        "AGE",
        "RANKS",
        "PGT-2",
        "FILE",
        right=("STEP", "SIZE", "AGE", "RANKS", "PGT-2"),
    )
    for item in items:
        rows.add_row(*_cells(item), style="" if not item.fault else "red")
    out.print(rows)
    for item in items:
        if item.fault:
            out.print(item.fault, markup=False, style="red", soft_wrap=True)


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
    }
