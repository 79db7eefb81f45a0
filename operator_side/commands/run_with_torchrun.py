"""`holdfast run --launcher torchrun`: its options, its job, and the commands for several machines."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from holdfast.command.output import print_stderr
from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.extras import install_line
from operator_side.script_lines import lines_for_several_machines
from operator_side.supervise.kept_stager import KeptStager
from operator_side.supervise.supervisor import job_environment
from operator_side.supervise.torchrun_job import TorchrunJob, torchrun_arguments, torchrun_line

RESTARTS_MAX = 3  # torchrun counts all restarts, not only those in a row without progress
_REFUSED = {
    *("min_ranks", "stagers", "hosts", "slurm", "cluster", "agent", "stager_host", "exported"),
    *("ulfm", "mpirun_options", "hosts_seconds_max", "silent_seconds_max", "stall_seconds_max"),
    *("poll_seconds", "crashes_max", "set_aside_max"),
}
_OF_STANDING = ("listen", "ranks", "key", "key_file", "tls_cert", "tls_key")


def check_options(settings: dict[str, str]) -> None:
    """Refuse what torchrun on one machine cannot do: mpirun's options, settings for several machines, a second stager.
    Refuse also if torch is missing. `settings`: as `--set` names them. Raises `ConfigError`.
    """
    context = click.get_current_context()
    for one in context.command.params:
        if one.name in _REFUSED and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE:
            name = "/".join([one.opts[0], *one.secondary_opts])
            raise ConfigError(
                f"{name}: expected no such option with --launcher torchrun, which starts the ranks of this machine "
                "and restarts them itself; leave it out, or leave --launcher torchrun out"
            )
    for name in _OF_STANDING:
        if name in settings:
            raise ConfigError(
                f"--set {name}={settings[name] if name != 'key' else '...'}: expected no such setting with --launcher "
                "torchrun, whose stager is for this machine alone; leave it out, or start `holdfast stager --listen` "
                "and torchrun by themselves (docs/torchrun.md)"
            )
    if (stager := TrainerConfig.from_sources().stager) is not None:
        raise ConfigError(
            f"trainer setting stager: expected none with --launcher torchrun, got {stager!r}: the command starts a "
            "stager of its own; unset it (HOLDFAST_STAGER), or start torchrun by itself"
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"--launcher torchrun: torch is not installed for this Python; run {install_line('torchrun')}"
        )


def torchrun_job(
    command: Sequence[str],
    stager: KeptStager,
    options: dict[str, Any],
    *,
    events: Path,
    newest_step: int,
    on_event: Callable[[Mapping[str, Any]], None],
) -> TorchrunJob:
    """Make the job that starts torchrun once the stager listens."""
    restarts_max, grace_seconds = max_restarts(options), options["grace_seconds"]
    notice_seconds = min(TrainerConfig.from_sources().watch_grace_seconds, max(1.0, grace_seconds))
    return TorchrunJob(
        stager,
        torchrun_line(command, ranks=options["ranks"], restarts_max=restarts_max),
        {**job_environment(), "HOLDFAST_WATCH_GRACE_SECONDS": f"{notice_seconds:g}"},
        events=events,
        newest_step=newest_step,
        grace_seconds=grace_seconds,
        on_event=on_event,
    )


def max_restarts(options: dict[str, Any]) -> int:
    """Return torchrun's --max-restarts."""
    source = click.get_current_context().get_parameter_source("restarts_max")
    return RESTARTS_MAX if source is ParameterSource.DEFAULT else int(options["restarts_max"])


def print_multi_machine_commands(command: Sequence[str], store: str, options: dict[str, Any]) -> None:
    """Print the commands that replace this one on several machines."""
    lines = lines_for_several_machines(
        torchrun_arguments(command),
        ranks=options["ranks"],
        restarts_max=max_restarts(options),
        store=store,
        host=socket.gethostname(),
    )
    print_stderr(
        "holdfast run: all ranks are on this machine; on several machines, run in place of this command"
    )
    for place, line in lines:
        print_stderr(f"  {place}:\n    {line}")
