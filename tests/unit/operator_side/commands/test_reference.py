"""docs/cli.md equals the commands' help, and every command has examples."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from holdfast.command.cli import cli

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = DOCS / "cli.md"


def commands() -> Iterator[tuple[str, click.Command]]:
    pending: list[tuple[str, click.Command]] = [("holdfast", cli)]
    while pending:
        path, command = pending.pop()
        if command is not cli:
            yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                pending.append((f"{path} {name}", found))


COMMANDS = dict(commands())


def test_the_page_is_what_the_commands_say(tmp_path: Path) -> None:
    made = tmp_path / "cli.md"
    subprocess.run([sys.executable, str(DOCS / "site" / "reference.py"), str(made)], check=True, timeout=120)
    assert PAGE.read_text() == made.read_text(), "run: python docs/site/reference.py docs/cli.md"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_ends_with_examples(path: str) -> None:
    command = COMMANDS[path]
    said = command.get_help(click.Context(command, info_name=path))
    _, _, examples = said.partition("  Examples:\n")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines, said
    assert any(line.startswith(path) or f" {path} " in line for line in lines)


@pytest.mark.parametrize("path", COMMANDS)
def test_the_page_has_every_command_and_option(path: str) -> None:
    section = PAGE.read_text().partition(f"## {path}\n")[2].partition("\n## ")[0]
    options = [option for option in COMMANDS[path].params if isinstance(option, click.Option)]
    for option in (one for one in options if not one.hidden):
        assert option.help, option.name
        assert all(f"`{name}`" in section for name in (*option.opts, *option.secondary_opts)), option.name


def test_settings_have_their_default_and_variable() -> None:
    page = PAGE.read_text()
    assert re.search(r"\| `--keep-last` INTEGER \| `3` \| `HOLDFAST_KEEP_LAST` \|", page)
    assert re.search(r"\| `on_full` \| `skip` \| `HOLDFAST_ON_FULL` \| Behaviour of `save\(\)`", page)
    assert re.search(r"\| 6 \| `damage` \| Bytes differ from those that were written", page)
    assert "`/dev/shm/holdfast-UID`" in page, "no number of this machine's user"
