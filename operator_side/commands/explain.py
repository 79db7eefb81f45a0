"""`holdfast explain CODE`: prints the section on an error from docs/troubleshooting.md, without a network.

    docs/troubleshooting.md ◄─ holdfast/troubleshooting.md, a link to it; a wheel has a copy at this path
        ## config ─► everything up to the next heading

The page is the only source of these texts.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import click

from holdfast import errors
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, print_json, table
from holdfast.errors import HoldfastError

_PAGE = "troubleshooting.md"
_ALL: list[type[HoldfastError]] = [getattr(errors, name) for name in errors.__all__]
_KINDS = sorted((kind for kind in _ALL if kind is not HoldfastError), key=lambda kind: kind.exit_code)
_RUN = "run"
_MEANING_OF_RUN = "Messages of `holdfast run` when it ends"


class _CodeType(click.Choice[str]):
    """An error code, or the exit code of such an error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        by_exit_code = {str(kind.exit_code): kind.code for kind in _KINDS}
        return super().convert(by_exit_code.get(str(value), value), param, ctx)


@click.command(
    short_help="Explain an error: its meaning, its usual causes, and what to do.",
    epilog=examples(
        "holdfast explain", "holdfast explain config", "holdfast explain 3", "holdfast explain store --json"
    ),
)
@click.argument(
    "code", metavar="[CODE]", required=False, type=_CodeType([*(kind.code for kind in _KINDS), _RUN])
)
@json_option
def explain(as_json: bool, code: str | None) -> None:
    """Explain an error: its meaning, its usual causes, and what to do, from docs/troubleshooting.md.

    The last line of an error names its CODE (`help: holdfast explain config`). CODE may be an exit code as well, and
    without CODE the command lists all. In quoted messages, … stands for text that varies. The output
    is formatted on a terminal, and Markdown elsewhere.

    JSON: {"code", "exit_code", "text"}, without CODE a list of {"code", "exit_code", "meaning"}; `exit_code` is null
    for `run`.
    """
    if code is None:
        _list(as_json)
        return
    text = section(code)
    if as_json:
        exit_codes = {kind.code: kind.exit_code for kind in _KINDS}
        print_json({"code": code, "exit_code": exit_codes.get(code), "text": text})
        return
    out = console()
    if out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(text, hyperlinks=False))
    else:
        click.echo(text)


def section(code: str) -> str:
    page = resources.files("holdfast").joinpath(_PAGE).read_text(encoding="utf-8")
    _, heading, rest = f"\n{page}".partition(f"\n## {code}\n")
    assert heading, f"{_PAGE} has no section {code}"
    return f"## {code}\n{rest.partition(chr(10) + '## ')[0]}".rstrip()


def _list(as_json: bool) -> None:
    rows: list[tuple[str, int | None, str]] = [(kind.code, kind.exit_code, _meaning(kind)) for kind in _KINDS]
    rows.append((_RUN, None, _MEANING_OF_RUN))
    if as_json:
        print_json([dict(zip(("code", "exit_code", "meaning"), row, strict=True)) for row in rows])
        return
    listed = table("CODE", "EXIT CODE", "MEANING", right=("EXIT CODE",))
    for code, exit_code, meaning in rows:
        listed.add_row(code, "" if exit_code is None else str(exit_code), meaning)
    console().print(listed)


def _meaning(kind: type[HoldfastError]) -> str:
    return (kind.__doc__ or "").split("\n")[0].partition(". ")[0].rstrip(".")
