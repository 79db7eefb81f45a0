"""The `holdfast` command: finds the subcommands, and turns every error into one message and an exit code.

    holdfast ls|inspect|verify|pull URL[@STEP]     tools, in holdfast/commands/; need neither torch nor MPI
    holdfast export|import                         from and to files of other tools; torch comes by entry point
    holdfast assemble URL[@STEP]                   makes a file of slices in the store; takes the run's claim
    holdfast status [RUN]                          watches a run on this machine, in holdfast/status/
    holdfast report RUN                            what happened in a run, as a page; in holdfast/report/
    holdfast doctor                                looks at a machine; the roles add what they need of it
    holdfast simulate TRACE...                     replays preemptions, in holdfast/simulate/; needs no run at all
    holdfast tune [TRACE]                          settings with their reasons, from what was measured
    holdfast run                                   a supervised job, in holdfast/supervise/
    holdfast drill                                 the same, killed at random points, in holdfast/drill/
    holdfast cluster up|status|down                its machines on AWS, in holdfast/cluster/
    holdfast explain [CODE]                        causes and cures of an error, from docs/troubleshooting.md
    holdfast completion bash|zsh|fish              what a shell needs to complete all this
    holdfast stager|flusher …                      roles, from the entry-point group `holdfast.commands`

Commands are imported only when named (or all of them for --help). A role whose dependency is not installed
stays in the list, says what to install, and breaks nothing else. Exit codes are those of holdfast/errors.py;
130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import logging
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

__all__ = ["cli", "main"]

_GROUP = "holdfast.commands"
_TOOLS = {
    "ls": "operator_side.commands.ls:ls",
    "inspect": "operator_side.commands.inspect:inspect",
    "verify": "operator_side.commands.verify:verify",
    "pull": "operator_side.commands.pull:pull",
    "export": "operator_side.commands.export:export",
    "import": "operator_side.commands.import_state:import_state",
    "assemble": "operator_side.commands.assemble:assemble_command",
    "status": "operator_side.commands.status:status",
    "report": "operator_side.commands.report:report",
    "doctor": "operator_side.commands.doctor:doctor",
    "simulate": "operator_side.commands.simulate:simulate",
    "tune": "operator_side.commands.tune:tune",
    "run": "operator_side.commands.run:run",
    "drill": "operator_side.commands.drill:drill",
    "cluster": "operator_side.commands.cluster:cluster",
    "explain": "operator_side.commands.explain:explain",
    "completion": "operator_side.commands.completion:completion",
}
_EXTRA_OF_PACKAGE = {"trainer_side": "trainer", "stager": "stager", "flusher": "flusher"}
_INTERRUPTED_EXIT_CODE = 130  # what a shell gives a command that ended by SIGINT

_log = logging.getLogger("holdfast.cli")


class _CommandGroup(click.Group):
    """Tools by name, roles by entry point, both imported late."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [*_TOOLS, *sorted(_roles().keys() - _TOOLS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name in _TOOLS:
            module, _, attribute = _TOOLS[cmd_name].partition(":")
            command = getattr(importlib.import_module(module), attribute)
        elif cmd_name in _roles():
            command = _role_command(_roles()[cmd_name])
        else:
            return None
        assert isinstance(command, click.Command), cmd_name
        return command


def _roles() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _role_command(point: EntryPoint) -> click.Command:
    try:
        command = point.load()
    except (ImportError, AttributeError) as error:
        return _unavailable(point, error)
    if not isinstance(command, click.Command):
        return _unavailable(point, TypeError(f"{point.value} is not a click command"))
    return command


def _unavailable(point: EntryPoint, error: Exception) -> click.Command:
    """Stands in for a role that cannot be imported here: the tool goes on working, and calling it says
    why.
    """
    package = point.module.partition(".")[0]
    missing = getattr(error, "name", None) or ""
    extra = _EXTRA_OF_PACKAGE.get(package)
    if isinstance(error, ModuleNotFoundError) and extra and missing.partition(".")[0] != package:
        hint = f"needs holdfast[{extra}]"
        message = f"{point.name}: {missing} is not installed; run: pip install 'holdfast[{extra}]'"
    else:
        hint = "cannot be loaded"
        message = f"{point.name}: {point.value} cannot be loaded: {error}"

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
@click.option("-v", "--verbose", count=True, help="Say more on stderr; -vv for everything.")
def cli(verbose: int) -> None:
    """Checkpoints of distributed PyTorch training that survive spot VMs.

    Exit codes: 0 done, 1 a bug of ours, 2 wrong setting or usage, 3 state cannot be saved, 4 store failed,
    5 not found, 6 damaged, 7 a process broke the protocol, 8 another writer owns the run, 9 a process is gone
    or too late, 10 no room or still busy, 130 interrupted. `holdfast explain` says what to do about each.
    """
    _set_up_logging((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


class _PlainFormatter(logging.Formatter):
    """What a manifest or a store said must not steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return _plain(super().format(record))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is stderr when something is said, not to what was when it was made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _set_up_logging(level: int) -> None:
    """Log to stderr, so that stdout stays what the command puts out. Calling it again only changes the
    level.
    """
    logger = logging.getLogger("holdfast")
    if not logger.handlers:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        handler: logging.Handler
        if console.is_terminal:
            handler = RichHandler(console=console, show_path=False, markup=False)
            handler.setFormatter(_PlainFormatter("%(message)s"))
        else:  # a file or another program: one line for one message, whatever the width
            handler = _StderrHandler()
            handler.setFormatter(_PlainFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. The entry point of the `holdfast` script."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = cli.main(args=arguments, prog_name="holdfast", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # the first is click's word for the second
        _say("interrupted")
        return _INTERRUPTED_EXIT_CODE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except HoldfastError as error:
        _log.debug("traceback of the error", exc_info=error)
        _say(str(error))
        _say(error.help, "help")
        return error.exit_code
    return result if isinstance(result, int) else 0


def _say(message: str, who: str = "holdfast") -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"{who}:", "bold red" if who == "holdfast" else "bold"), end=" ")
    console.print(_plain(message), markup=False)


def _plain(text: str) -> str:
    from holdfast.command.output import plain  # brings pydantic: not for --help

    return plain(text)
