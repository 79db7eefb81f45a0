"""Declares options and exit codes of commands, and the options that several commands share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from holdfast.config import parse_size
from holdfast.errors import ConfigError

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def count(
    names: str,
    meaning: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int | None = None,
    **more: Any,
) -> Option:
    """Declare an option that takes an integer; `names` are separated by blanks."""
    return _option(names, click.IntRange(least, most), meaning, default, more)


def number(
    names: str,
    meaning: str,
    default: float | None = None,
    *,
    least: float = 0,
    above: float | None = None,
    **more: Any,
) -> Option:
    """Declare an option that takes a number of at least `least`, or of more than `above`, up to `most`."""
    low = least if above is None else above
    kind = click.FloatRange(low, more.pop("most", None), min_open=above is not None)
    return _option(names, kind, meaning, default, more)


def file(names: str, meaning: str, default: str | Path | None = None, **more: Any) -> Option:
    return _option(names, click.Path(path_type=Path), meaning, default, more)


def text(names: str, meaning: str, default: str | None = None, **more: Any) -> Option:
    """Declare an option that takes a text. With `multiple` it is repeatable."""
    return _option(names, click.STRING, meaning, default, more)


def choice(
    names: str, values: Sequence[str], meaning: str, default: str | None = None, **more: Any
) -> Option:
    return _option(names, click.Choice(values), meaning, default, more)


def flag(names: str, meaning: str) -> Option:
    """Declare an option without a value."""
    return click.option(*names.split(), is_flag=True, help=meaning)


def _option(
    names: str, kind: click.ParamType[Any], meaning: str, default: Any, more: dict[str, Any]
) -> Option:
    shown = default not in {None, ""}
    return click.option(*names.split(), type=kind, default=default, show_default=shown, help=meaning, **more)


def exit_codes(*meanings: str) -> str:
    """Format a command's own exit codes for its epilog; each argument is the code, a blank and the meaning."""
    codes = [one.partition(" ") for one in meanings]
    width = max(len(code) for code, _, _ in codes) + 4
    lines = [
        textwrap.fill(meaning, 78, initial_indent=f"  {code}".ljust(width), subsequent_indent=" " * width)
        for code, _, meaning in codes
    ]
    return "\b\nExit codes:\n" + "\n".join(lines) + "\n\n"


def parse_size_argument(option: str, text: str) -> int:
    """Parse the value of an option, such as 16MiB, to bytes. Raises `ConfigError`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected {error}") from None


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """Parse the stager's settings given by `--set`. Raises `ConfigError`."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or name == "store":
            raise ConfigError(
                f"--set {pair}: expected NAME=VALUE with a setting of the stager, such as ring_bytes=4GiB"
            )
        found[name.replace("-", "_")] = value
    return found


def check_dollars_per_hour(dollars: float | None) -> None:
    if dollars is not None and not math.isfinite(dollars):
        raise ConfigError(f"--dollars-per-hour {dollars}: expected a price in US dollars")


WRAPS_COMMAND = {"allow_interspersed_args": False}
"""Context settings of a command that starts COMMAND: options after its name are COMMAND's."""
COMMAND = click.argument("command", nargs=-1, required=True)
SETTINGS = text(
    "--set settings",
    "Setting of the stager, such as keep_last=5; repeatable.",
    metavar="NAME=VALUE",
    multiple=True,
)
ULFM = click.option(
    "--ulfm/--no-ulfm", default=True, show_default=True, help="Ask MPI to survive the death of a rank."
)
MPIRUN_OPTIONS = text("--mpirun-options", 'More options for mpirun, such as "--mca btl tcp,self".', "")
DOLLARS_PER_HOUR = number(
    "--dollars-per-hour",
    "Price of all machines of the run in US dollars per hour, to show losses in dollars.",
    envvar="HOLDFAST_DOLLARS_PER_HOUR",
)
PROFILE = file(
    "--profile",
    "JSON file of measured costs of checkpoints. Default: the figures that holdfast's benchmarks measured.",
)
OVERHEAD_MAX = number(
    "--overhead-max",
    "Largest share of training time that checkpoints may cost; 0.03 means 3 %.",
    0.03,
    above=0,
)
SPOT_PRICE = number("--spot-price", "Price of one spot machine in US dollars per hour.")
ON_DEMAND_PRICE = number(
    "--on-demand-price", "Price of one on-demand training machine in US dollars per hour."
)
STAGER_PRICE = number("--stager-price", "Price of the stager's machine in US dollars per hour.", 0.0)


def force_flag(what: str) -> Option:
    return flag("--force", f"Replace {what} if it exists.")
