"""The `holdfast` command: finds the subcommands, and turns every error into one message and an exit code.

    holdfast ls|run|doctor|… ─► operator_side      for people      ┐ found by the entry-point
    holdfast stager|flusher  ─► stager, flusher    for jobs        ┘ group `holdfast.commands`

Only the named command is imported, or all for --help. A command whose dependency is not installed stays in the list and
says what to install. Exit codes are those of holdfast/errors.py; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TextIO

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from holdfast import __version__
from holdfast.errors import ConfigError, HoldfastError
from holdfast.extras import install_line

_GROUP = "holdfast.commands"
_EXTRA_OF_PACKAGE = {"trainer_side": "trainer", "stager": "stager", "flusher": "flusher"}
_INTERRUPTED_EXIT_CODE = 130  # a shell's code for a command that ended by SIGINT

_log = logging.getLogger("holdfast.cli")


class _CommandGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_subcommands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        point = _subcommands().get(cmd_name)
        return None if point is None else _load_command(point)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], _subcommands(), n=3)
            if not near:
                raise
            raise click.UsageError(f"{error.message} (Did you mean {' or '.join(near)}?)", ctx) from None


def _subcommands() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _load_command(point: EntryPoint) -> click.Command:
    try:
        command = point.load()
    except (ImportError, AttributeError) as error:
        return _unavailable_command(point, error)
    if not isinstance(command, click.Command):
        return _unavailable_command(point, TypeError(f"{point.value} is not a click command"))
    return command


def _unavailable_command(point: EntryPoint, error: Exception) -> click.Command:
    """Return a substitute for a command that cannot be imported. Its error says why; the other commands work."""
    package = point.module.partition(".")[0]
    missing = getattr(error, "name", None) or ""
    extra = _EXTRA_OF_PACKAGE.get(package)
    if isinstance(error, ModuleNotFoundError) and extra and missing.partition(".")[0] != package:
        hint = f"needs holdfast[{extra}]"
        message = f"{point.name}: {missing} is not installed; run: {install_line(extra)}"
    else:
        hint = "cannot be loaded"
        message = (
            f"{point.name}: {point.value} cannot be loaded: {error}; install the package that "
            "provides it again"
        )

    def fail() -> None:
        raise ConfigError(message) from error

    return click.Command(
        point.name,
        callback=fail,
        help=f"({hint})",
        short_help=f"({hint})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(
    cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="holdfast", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Log more on stderr; -vv logs everything.")
def cli(verbose: int) -> None:
    """Checkpoints of distributed PyTorch training that survive the loss of spot VMs.

    Exit codes: 0 success, 1 a bug in holdfast, 2 wrong setting or usage, 3 the state cannot be saved, 4 the store
    failed, 5 not found, 6 damaged, 7 a process broke the protocol, 8 another writer owns the run, 9 a process died or
    was too late, 10 no room or still busy, 11 the last checkpoint is not durable, 12 a resume differs from the run
    before, 130 interrupted. `holdfast explain` says what to do about each.
    """
    _set_up_logging((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


class _PlainFormatter(logging.Formatter):
    """Escapes control characters: text from a manifest or a store must not steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return _escape_controls(super().format(record))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which may have been replaced since the handler was created."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _set_up_logging(level: int) -> None:
    """Log to stderr: stdout is for the command's result. A second call only changes the level."""
    logger = logging.getLogger("holdfast")
    if not logger.handlers:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        handler: logging.Handler
        if console.is_terminal:
            handler = RichHandler(console=console, show_path=False, markup=False)
            handler.setFormatter(_PlainFormatter("%(message)s"))
        else:  # a file or another program: one line for each message, of any width
            handler = _StderrHandler()
            handler.setFormatter(_PlainFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `holdfast` script."""
    code = _run(arguments)
    _discard_output_to_closed_terminal()
    sys.exit(code)


def _discard_output_to_closed_terminal() -> None:
    """Drop output for a closed terminal: Python would write it again on exit, and the error would replace the exit
    code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            with open(os.devnull, "w") as nothing:  # noqa: PTH123 - only its descriptor is used
                os.dup2(nothing.fileno(), stream.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = cli.main(args=arguments, prog_name="holdfast", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click turns KeyboardInterrupt into Abort
        _print_error("interrupted")
        return _INTERRUPTED_EXIT_CODE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except HoldfastError as error:
        _log.debug("traceback of the error", exc_info=error)
        _print_error(str(error))
        _print_error(error.help, "help")
        return error.exit_code
    return result if isinstance(result, int) else 0


def _print_error(message: str, prefix: str = "holdfast") -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with contextlib.suppress(OSError):  # the terminal was closed
        console.print(Text(f"{prefix}:", "bold red" if prefix == "holdfast" else "bold"), end=" ")
        console.print(_escape_controls(message), markup=False)


def _escape_controls(text: str) -> str:
    from holdfast.command.output import escape_controls  # imports pydantic, which --help does not need

    return escape_controls(text)
