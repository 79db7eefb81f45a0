"""`holdfast ls URL`: the checkpoints of a run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from holdfast.checkpoints.best_finder import BestFinder
from holdfast.checkpoints.branches import Branches
from holdfast.checkpoints.catalog import CatalogItem
from holdfast.command.examples import examples
from holdfast.command.output import (
    console,
    escape_controls,
    format_age,
    format_size,
    json_option,
    print_json,
    print_line,
    progress_bar,
    table,
)
from operator_side.commands.target import URL, Target

_COLUMNS = ("STEP", "SIZE", "STATE", "AGE", "RANKS", "PROOF", "FILE", "METRICS")
_NUMBERS = ("STEP", "SIZE", "AGE", "RANKS")
_ROWS_FIRST = 40  # the first table holds a short run whole
_ROWS_NEXT = 200


@click.command(
    short_help="List the checkpoints of a run, newest first.",
    epilog=examples("holdfast ls s3://bucket/run", "holdfast ls /mnt/run --json | jq '.checkpoints[0].step'"),
)
@click.argument("target", metavar="URL", type=URL)
@json_option
def ls(as_json: bool, target: Target) -> None:
    """List the checkpoints of the run at URL, newest first. Rows are printed while the manifests are read.

    \b
    State: verified  published, read back and found good
           durable   published, not read back yet
           drifted   published, but the replicas of the ranks differed; restore prefers the one before
           doubtful  published, but it may be torn; restore prefers the one before
           bad       published, read back and found bad
           damaged   its manifest or its file is missing or broken

    Proof: whether there is a record of what the next step used, so that a resume from the checkpoint can be proven.

    After `holdfast rewind` the checkpoints of older branches are dim, and their file is followed by the branch.

    JSON: {"url", "checkpoints": [{"step", "attempt", "state", "fault", "file", "file_bytes", "ranks", "created",
    "pgt1_seconds", "pgt2_seconds", "drift", "doubt", "proof", "nonfinite", "metrics": {name: value}, "branch",
    "current", "is_best"}], "old_slices"}. Values that a damaged manifest does not have are null. pgt1_seconds is the
    time from save() until the checkpoint was staged, pgt2_seconds until it was durable. drift says which replicas
    differed, and doubt why a checkpoint may be torn; else they are empty. nonfinite is the number of values in floating
    tensors that are NaN or infinite, counted when the checkpoint was read back; null: not counted. is_best is true for
    the best good checkpoint by the run's best_metric. branch is the number of the branch that wrote it, from 1; current
    is false if `holdfast rewind` has left the checkpoint behind, so that restore skips it. old_slices names the steps
    that exist only as slices of an older holdfast, and is else empty.
    """  # noqa: D301 - click needs this very character to leave the paragraph unwrapped
    listing = target.read_listing()
    # Rows on a terminal show the progress themselves.
    hidden = sys.stdout.isatty() and not as_json
    documents, finder, branches = [], BestFinder(), listing.branches or Branches()
    with progress_bar("manifests", sum(one.nbytes for one in listing.manifests), hidden=hidden) as advance:
        items = _track_best(listing.items(progress=advance), finder, branches)
        if as_json:
            documents = [_document(item, branches) for item in items]
        else:
            _print(listing.url, items, branches, listing.old_slices)
    best = finder.best()
    if as_json:  # one document, printed when every item has been read
        for one in documents:
            one["is_best"] = best is not None and best.order == (one["attempt"], one["step"])
        print_json({"url": listing.url, "checkpoints": documents, "old_slices": listing.old_slices})
    elif best is not None:
        place = f"step {best.order.step} of attempt {best.order.attempt}"
        print_line(f"best {best.rule.describe()}: {best.value:.6g}, {place}", "green")


def _track_best(
    items: Iterator[CatalogItem], finder: BestFinder, branches: Branches
) -> Iterator[CatalogItem]:
    for item in items:
        if branches.is_current(item.order):
            finder.add(item)
        yield item


def _print(url: str, items: Iterator[CatalogItem], branches: Branches, old_slices: str) -> None:
    """Print the rows while they are read, a few at a time, then the notes on some of them."""
    out = console()
    rows = _read_rows(items, _ROWS_FIRST, branches)
    notes: list[tuple[str, str]] = [(old_slices, "yellow")] if old_slices else []
    if not rows:
        notes.insert(0, (f"{url}: the run has no checkpoint yet", ""))
    columns: tuple[str, ...] = _COLUMNS
    is_first = True
    widths = [len(name) for name in columns]
    while rows:
        if is_first and not any(row.cells[-1] for row in rows):  # no checkpoint has metrics
            columns = _COLUMNS[:-1]
        widths = [max(*at) for at in zip(widths, *(map(len, row.cells) for row in rows), strict=True)]
        shown = table(*columns, right=_NUMBERS)
        shown.show_header = is_first
        for column, width in zip(shown.columns, widths, strict=False):
            column.min_width = width  # align the rows of all tables
        for row in rows:
            shown.add_row(*row.cells[: len(columns)], style=row.style)
            notes += row.notes
        out.print(shown)
        rows, is_first = _read_rows(items, _ROWS_NEXT, branches), False
    if branches.rewinds:
        notes.append((branches.sentence(), ""))
    for text, style in notes:
        print_line(text, style)


class _ListedRow(NamedTuple):
    """One checkpoint; `notes`: text and style of the lines below the table."""

    cells: tuple[str, ...]
    style: str
    notes: tuple[tuple[str, str], ...]


def _read_rows(items: Iterator[CatalogItem], count: int, branches: Branches) -> list[_ListedRow]:
    rows = []
    for item in itertools.islice(items, count):
        row = _row(item)
        if not branches.is_current(item.order):
            *cells, file, metrics = row.cells
            cells.append(f"{file} (branch {branches.number(item.attempt)})")
            row = row._replace(cells=(*cells, metrics), style=row.style or "dim")
        rows.append(row)
    return rows


def _row(item: CatalogItem) -> _ListedRow:
    if item.fault:
        return _ListedRow(_cells(item), "red", ((item.fault, "red"),))
    counted = item.manifest.nonfinite if item.manifest else None
    broken = counted.describe() if counted and counted.values else ""
    notes = tuple((f"{item.name}: {text}", "yellow") for text in (item.caveat, broken) if text)
    return _ListedRow(_cells(item), "yellow" if notes else "", notes)


def _cells(item: CatalogItem) -> tuple[str, ...]:
    manifest = item.manifest
    if manifest is None:
        return (str(item.step), format_size(item.file_bytes), item.state, "-", "-", "-", item.name, "")
    return (
        str(item.step),
        format_size(item.file_bytes),
        item.state,
        format_age(manifest),
        str(manifest.ranks),
        "yes" if item.has_proof else "no",
        manifest.file,
        escape_controls("  ".join(f"{name} {value:.6g}" for name, value in manifest.metrics.items())),
    )


def _document(item: CatalogItem, branches: Branches) -> dict[str, Any]:
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
        "doubt": item.doubt,
        "proof": item.has_proof,
        "nonfinite": manifest.nonfinite.values if manifest and manifest.nonfinite else None,
        "metrics": manifest.metrics if manifest else {},
        "branch": branches.number(item.attempt),
        "current": branches.is_current(item.order),
    }
