"""The options of `holdfast stager` that are checked before anything starts."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from holdfast.errors import ConfigError
from operator_side.commands.run import run
from stager.command import stager

STORE = ("--store", "/nowhere/run")


def refusal(*options: str) -> str:
    done = CliRunner().invoke(stager, [*STORE, *options])
    assert isinstance(done.exception, ConfigError), done
    return str(done.exception)


def test_a_url_that_takes_no_messages_is_refused_without_its_secret() -> None:
    said = refusal("--listen", "127.0.0.1:0", "--notify", "ftp://example.org/secret")
    assert "expected a URL that begins with https://HOST/" in said
    assert "secret" not in said


def test_the_environment_names_destinations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_NOTIFY", "https://example.org/hook ftp://example.org/secret")
    assert "--notify: expected a URL" in refusal("--listen", "127.0.0.1:0")


def test_once_is_refused_without_an_address() -> None:
    assert "give --listen HOST:PORT as well" in refusal("--once")


@pytest.mark.parametrize("name", ["notify", "notify_command"])
def test_run_and_stager_have_the_same_option(name: str) -> None:
    def described(command: click.Command) -> tuple[object, ...]:
        (found,) = [one for one in command.params if one.name == name]
        assert isinstance(found, click.Option)
        return found.opts, found.help, found.envvar, found.multiple

    assert described(run) == described(stager)
