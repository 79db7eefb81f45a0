"""Generates docs/cli.md from the commands' help: `python docs/site/reference.py docs/cli.md`.

each command ─► synopsis, description, options (defaults, environment), examples      settings of roles, exit codes
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic_settings import BaseSettings

from holdfast import errors
from holdfast.command.cli import cli
from holdfast.command.settings import format_default, setting_descriptions
from holdfast.config import FlusherConfig, StagerConfig, TrainerConfig
from holdfast.errors import HoldfastError

_ROLES: dict[str, type[BaseSettings]] = {"stager": StagerConfig, "flusher": FlusherConfig}
_STORE_OF = {"run": StagerConfig}  # commands whose --store is the role's setting
_HEAD = """\
# The command line

`python docs/site/reference.py docs/cli.md` makes this page from the help of each command, which `--help` shows as well.

```text
holdfast [-v|-vv] COMMAND [OPTIONS] ARGUMENTS...
```

URL names a run: a path, `s3://bucket/run`, or any other URL that fsspec knows. `URL@STEP` names the checkpoint of one
step, `URL@latest` the newest good checkpoint. A command prints its result on stdout and everything else on stderr. With
`--json`, stdout is one JSON document, also for an error: `{"error": {"code", "message", "help"}}`. `-v` logs more on
stderr, `-vv` everything.

Stager, flusher and trainers take their settings from arguments, from `HOLDFAST_*` in the environment, and from
`holdfast.toml` (in the working directory, or the file that `HOLDFAST_CONFIG` names), in this order. Credentials for a
store come from where the store's own tools look for them.
"""


def reference() -> str:
    context = click.Context(cli, info_name="holdfast")
    parts = [_HEAD]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        parts += _sections(command, ["holdfast", name])
    parts.append(_settings("Settings of the trainers", TrainerConfig, TrainerConfig.model_fields.keys()))
    parts.append(_exit_codes())
    return "\n".join(parts)


def _sections(command: click.Command, path: list[str]) -> Iterator[str]:
    yield f"## {' '.join(path)}\n"
    pieces = command.collect_usage_pieces(click.Context(command, info_name=path[-1]))
    yield f"```text\n{' '.join([*path, *pieces])}\n```\n"
    yield _prose(command.help or "") + "\n"
    rows = list(_options(command, path))
    if rows:
        yield "| option | default | environment | meaning |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"
    if path[-1] in _ROLES:
        config = _ROLES[path[-1]]
        named = {parameter.name for parameter in command.params}
        rest = [name for name in config.model_fields if name not in named]
        if rest:
            yield _settings("Settings without an option", config, rest, level=3)
    if command.epilog:
        yield _prose(command.epilog) + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from _sections(command.commands[name], [*path, name])


def _prose(text: str) -> str:
    """Return help text as Markdown. Paragraphs that click must not wrap become code blocks."""
    parts = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        rest = paragraph.removeprefix("\b\n")
        if rest.startswith("Examples:\n"):
            parts.append(f"Examples:\n\n```sh\n{textwrap.dedent(rest.partition(chr(10))[2])}\n```")
        elif rest != paragraph:
            parts.append(f"```text\n{textwrap.dedent(rest)}\n```")
        else:
            parts.append(_escaped(paragraph))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    return re.sub(r"<(?=\w)", r"\\<", text)  # Markdown would read it as an HTML tag


def _options(command: click.Command, path: list[str]) -> Iterator[str]:
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            names += f" {_cell(parameter.metavar or _kind(parameter))}"
        default, variable = _default(parameter), ""
        config = _ROLES.get(path[-1]) or (_STORE_OF.get(path[-1]) if parameter.name == "store" else None)
        if config is not None and parameter.name in config.model_fields:
            default = _cell_of_default(config, parameter.name)
            variable = f"`{_variable(parameter.name)}`"
        meaning = re.sub(r"  \[default: .*\]$", "", parameter.help or "")  # the default has its own column
        yield f"| {names} | {default} | {variable} | {_cell(meaning)} |"


def _kind(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "\\|".join(map(str, option.type.choices))
    return option.type.name.upper().replace(" RANGE", "")


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    value = option.to_info_dict()["default"]
    if value in (None, "", ()) or (option.is_flag and not option.secondary_opts):
        return ""
    if option.is_flag:
        return f"`{(option.opts if value else option.secondary_opts)[0]}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _settings(title: str, config: type[BaseSettings], names: Any, *, level: int = 2) -> str:
    described = setting_descriptions(config)
    rows = [
        f"| `{name}` | {_cell_of_default(config, name)} | `{_variable(name)}` | {_cell(described[name])} |"
        for name in names
    ]
    head = f"{'#' * level} {title}\n\n| setting | default | environment | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _variable(name: str) -> str:
    return f"HOLDFAST_{name.upper()}"


def _cell_of_default(config: type[BaseSettings], name: str) -> str:
    if config.model_fields[name].is_required():
        return "required"
    default = format_default(config, name)
    return f"`{default}`" if default else ""


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|").replace("\\\\|", "\\|")


def _exit_codes() -> str:
    found = [getattr(errors, name) for name in errors.__all__]  # not their subclasses elsewhere
    kinds: list[type[HoldfastError]] = [kind for kind in found if kind is not HoldfastError]
    rows = ["| 0 | | done |", "| 1 | | a bug in holdfast, with a traceback |"]
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        meaning = (kind.__doc__ or "").split("\n\n")[0].partition(". ")[0].rstrip(".")
        rows.append(f"| {kind.exit_code} | `{kind.code}` | {_cell(meaning)} |")
    rows.append("| 130 | | interrupted (Ctrl-C) |")
    head = "## Exit codes\n\n| code | in `--json` | meaning |\n|---|---|---|\n"
    return (
        f"{head}{chr(10).join(rows)}\n\nA command with codes of its own lists them. "
        "`holdfast run` ends with the exit code of the process that crashed, and `holdfast rank` with 75 where another "
        "start may help.\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
