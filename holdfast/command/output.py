"""The output of the tools: tables for people, one JSON document for programs, progress bars on a terminal.

stdout carries only the result; everything else goes to stderr. With `--json` stdout is exactly one document: the
result, or `{"error": {"code", "message", "help"}}` (holdfast/errors.py).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from holdfast.errors import HoldfastError
from holdfast.image.manifest import Manifest

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNIT = 1024
_SIZE_MAX = 1 << 80  # a manifest is input from outside, and may claim any number
_PIPED_COLUMNS = 200  # wide enough that cells are not cut or wrapped, for `grep` and `cut`


def print_stderr(text: str) -> None:
    """Write a line to stderr. Ignore errors, as of a closed terminal: output must not change a command's exit code."""
    with suppress(OSError):
        click.echo(escape_controls(text), err=True)


def console() -> Console:
    """Return a console on stdout: coloured on a terminal, plain and wide when piped."""
    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    return Console(width=width, highlight=False, soft_wrap=False)


def print_line(text: str, style: str = "") -> None:
    """Write a line of the result to stdout, without interpreting markup or control characters."""
    console().print(escape_controls(text), style=style, markup=False, soft_wrap=True)


def print_json(document: Any) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    # A path that is not UTF-8 has lone surrogates, which cannot be encoded; escaped they are valid JSON.
    click.echo(text.encode(errors="backslashreplace"))


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option `--json` as the parameter `as_json`. With it, an error is also printed as a document."""

    @click.option(
        "--json", "as_json", is_flag=True, help="Print the result as one JSON document, as described above."
    )
    @functools.wraps(command)
    def with_json(*, as_json: bool, **parameters: Any) -> None:
        try:
            command(as_json=as_json, **parameters)
        except HoldfastError as error:
            if as_json:
                print_json({"error": {"code": error.code, "message": str(error), "help": error.help}})
            raise

    return with_json


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a compact table; the columns named in `right` are aligned right, for numbers."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return result


@contextmanager
def progress_bar(what: str, total_bytes: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal. Yields a function that adds a number of bytes to it."""
    on_stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    disabled = hidden or not on_stderr.is_terminal
    with Progress(*columns, console=on_stderr, transient=True, disable=disabled) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)


def format_size(nbytes: int | None) -> str:
    """Format as `1.4 GiB`; `-` for None."""
    if nbytes is None:
        return "-"
    if abs(nbytes) > _SIZE_MAX:
        return f"{nbytes:.3e} B" if abs(nbytes) < 10**300 else "over 1e300 B"
    value, unit = float(nbytes), 0
    while value >= _UNIT and unit < len(_UNITS) - 1:
        value, unit = value / _UNIT, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def escape_controls(text: str) -> str:
    """Escape the control characters of `text`: text from a manifest or a store must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def format_seconds(value: float) -> str:
    """Format as `0.28 s`, `12.3 s`, `4 min`, `3 h`, `5 d`."""
    for limit, unit_seconds, text in ((10, 1, "{:.2f} s"), (100, 1, "{:.1f} s"), (7200, 60, "{:.0f} min")):
        if value < limit:
            return text.format(value / unit_seconds)
    return f"{value / 3600:.0f} h" if value < 172800 else f"{value / 86400:.0f} d"


def format_age(manifest: Manifest) -> str:
    """Format the age of the manifest; `-` if its creation time is not ISO 8601."""
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        return "-"
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    passed_seconds = (datetime.now(UTC) - created).total_seconds()
    # Clocks of two machines differ, and an age must not be negative.
    return format_seconds(max(0.0, passed_seconds))
