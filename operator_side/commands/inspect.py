"""`holdfast inspect URL[@STEP]`: shows one checkpoint, from its manifest alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from holdfast.command.examples import examples
from holdfast.command.output import (
    console,
    escape_controls,
    format_age,
    format_seconds,
    format_size,
    json_option,
    print_json,
    table,
)
from holdfast.image.manifest import Manifest
from operator_side.commands.options import flag
from operator_side.commands.target import TARGET, Target

_ROWS_SHOWN = 40
_SECONDS_MAX = 1e15
_NUMBER_MAX = 10**300


@click.command(
    short_help="Show one checkpoint: its summary, its tensors, its phases.",
    epilog=examples(
        "holdfast inspect s3://bucket/run",
        "holdfast inspect s3://bucket/run@1000 --all",
    ),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@flag("--all show_all", f"Show all rows of each table, not only the first {_ROWS_SHOWN}.")
@json_option
def inspect(as_json: bool, target: Target, show_all: bool) -> None:
    """Show one checkpoint of the run at URL: its summary, its tensors, and how long each phase of it took.

    The command reads only the manifest. Without @STEP it shows the newest good checkpoint. PLACEMENT says how a tensor
    was split among the ranks when it was saved; the file has it whole.

    JSON: {"url", "manifest": {…}}, the manifest as docs/format.md describes it.
    """
    catalog, manifest = target.find()
    url = catalog.store.url
    if as_json:
        print_json({"url": url, "manifest": manifest.model_dump(mode="json")})
        return
    out = console()
    out.print(_summary(url, manifest))
    _print_tensors(out, manifest, show_all=show_all)
    _print_phases(out, manifest, show_all=show_all)


def _summary(url: str, manifest: Manifest) -> Table:
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    caveats = (("drift", manifest.drift), ("doubt", manifest.doubt))
    for name, value in (
        ("run", url),
        ("step", f"{manifest.step} (attempt {manifest.attempt})"),
        ("file", f"{manifest.file}, {format_size(manifest.image_bytes)} ({manifest.image_bytes} bytes)"),
        ("state", manifest.state.value + (f": {manifest.note}" if manifest.note else "")),
        *(caveat for caveat in caveats if caveat[1]),
        *((_plain(f"metric {name}"), f"{value:.9g}") for name, value in manifest.metrics.items()),
        ("created", f"{manifest.created} ({format_age(manifest)} ago)"),
        ("ranks", str(manifest.ranks)),
        ("staged after", format_seconds(manifest.pgt1_seconds)),
        ("durable after", format_seconds(manifest.pgt2_seconds)),
        ("chunks", f"{len(manifest.chunk_crc32s)} of {format_size(manifest.chunk_bytes)}"),
        ("CRC-32", f"{manifest.image_crc32:08x}"),
    ):
        rows.add_row(name, _plain(value))
    return rows


def _plain(text: str) -> str:
    return escape_controls(text).replace("[", r"\[")  # rich reads brackets in a path or note as markup


def _print_tensors(out: Console, manifest: Manifest, *, show_all: bool) -> None:
    if not manifest.tensors:
        out.print("\nno tensors")
        return
    splits = [one.describe() for one in manifest.splits]
    placement = ("PLACEMENT",) if splits else ()
    rows = table("TENSOR", "DTYPE", "SHAPE", *placement, "STORAGE", right=("STORAGE",))
    rows.columns[0].no_wrap = False
    rows.columns[0].overflow = "fold"
    shown = manifest.tensors if show_all else manifest.tensors[:_ROWS_SHOWN]
    for tensor in shown:
        shape = " x ".join(str(extent) for extent in tensor.shape) or "scalar"
        split = ("" if tensor.split is None else splits[tensor.split],) if splits else ()
        nbytes = manifest.entries[tensor.entry].nbytes
        rows.add_row(_plain(tensor.path), _plain(tensor.dtype), shape, *split, format_size(nbytes))
    out.print()
    out.print(rows)
    storages = {tensor.entry for tensor in manifest.tensors}
    held = sum(manifest.entries[entry].nbytes for entry in storages)
    left_out = len(manifest.tensors) - len(shown)
    more = f", of which {left_out} are not shown (--all)" if left_out else ""
    out.print(f"{len(manifest.tensors)} tensors{more} in {len(storages)} storages, {format_size(held)}")


def _print_phases(out: Console, manifest: Manifest, *, show_all: bool) -> None:
    leaves = list(_leaves("", manifest.record))
    if not leaves:
        return
    rows = table("PHASE", "VALUE", right=("VALUE",))
    shown = leaves if show_all else leaves[:_ROWS_SHOWN]
    for name, value in shown:
        rows.add_row(_plain(name), _plain(value))
    out.print()
    out.print(rows)
    if len(leaves) > len(shown):
        out.print(f"{len(leaves) - len(shown)} more are not shown (--all)")


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Flatten the record to pairs such as `ranks.0.copy` and `0.012 s`."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            yield from _leaves(f"{prefix}.{index}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool) and prefix.endswith("_seconds"):
        shown = f"{value:.3f} s" if abs(value) < _SECONDS_MAX else "not a time"
        yield prefix.removesuffix("_seconds"), shown
    elif isinstance(value, int) and not isinstance(value, bool) and prefix.endswith("_bytes"):
        yield prefix.removesuffix("_bytes"), format_size(value)
    elif isinstance(value, int) and abs(value) > _NUMBER_MAX:
        yield prefix, "a number that is too long to show"
    else:
        yield prefix, str(value)
