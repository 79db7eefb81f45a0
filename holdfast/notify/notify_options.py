"""`--notify` and `--notify-command`, for every command that sends messages about a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from holdfast.notify.notifier import Destination


def notify_options(command: Callable[..., Any]) -> Any:
    """Add the options; the command gets tuples of texts in `notify` and `notify_command`."""
    for option in (_COMMAND, _URL):
        command = option(command)
    return command


_URL = click.option(
    "--notify",
    multiple=True,
    metavar="URL",
    envvar="HOLDFAST_NOTIFY",
    help="URL that gets a POST for each preemption, resumption and problem: a webhook of Slack or Discord, "
    "https://ntfy.sh/TOPIC, ntfy://HOST/TOPIC, or any other for JSON; repeatable. The variable HOLDFAST_NOTIFY keeps "
    "it out of the list of processes.",
)
_COMMAND = click.option(
    "--notify-command",
    multiple=True,
    metavar="COMMAND",
    help="Shell command to run for each of them, with the message as JSON on stdin and in HOLDFAST_EVENT and "
    "HOLDFAST_TEXT; repeatable.",
)


def destinations(urls: Sequence[str], commands: Sequence[str]) -> list[Destination]:
    """Return the destinations that the options name. Raises `ConfigError`: a URL is not supported."""
    from holdfast.notify.webhook import AlertCommand, Webhook

    return [*map(Webhook, urls), *map(AlertCommand, commands)]
