"""Parse SkyPilot's files and commands by SkyPilot itself: {"files": texts, "lines": texts} on stdin.

Run by the Python of `toolbox.sky_python`. On stdout for each line its fault or "", and for each file: `faults`, `hosts`
(the name of each task's first machine), `strategies` (which class restarts each task), and `restarts` (for each task,
which exit codes of its two machines restart it, tried in a row). Fields are checked as the API server does it; a client
accepts some unknown ones. The network is not used: a connection is an error.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from typing import Any

os.environ["IS_SKYPILOT_SERVER"] = "true"  # read where the schemas are made

import click
from sky import optimizer  # type: ignore[import-not-found]
from sky.backends import CloudVmRayBackend  # type: ignore[import-not-found]
from sky.client.cli.command import cli  # type: ignore[import-not-found]
from sky.jobs import job_group_networking, recovery_strategy  # type: ignore[import-not-found]
from sky.server import plugins  # type: ignore[import-not-found]
from sky.utils import dag_utils  # type: ignore[import-not-found]

# Secrets that a user gives on the command line.
SECRETS = [(name, "secret") for name in ("HOLDFAST_KEY", "STAGER_CERT", "STAGER_KEY", "STAGER_CA")]
ENVS = [("HOLDFAST_STAGER", "10.0.0.1:29411")]
ENDS = {"lost": [75, 137], "bug": [137, 1], "again": [0, 75]}


class Warnings(logging.Handler):
    """Collects SkyPilot's warnings about unknown fields in a group's header, which it ignores."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def checked(text: str, warnings: Warnings) -> dict[str, Any]:
    warnings.said.clear()
    try:
        dag = dag_utils.load_dag_from_yaml_str(text, ENVS, SECRETS)
        dag_utils.fill_default_config_in_dag_for_job_launch(dag)
        optimizer._validate_inter_connection_pins(dag, quiet=True)
    except Exception as error:  # noqa: BLE001 - a user would read its message
        return {"faults": [f"{type(error).__name__}: {error}"]}
    group = dag.name if dag.is_job_group() else ""
    # Call it once: it removes the strategy from the task.
    executors = {task.name: executor_of(task) for task in dag.tasks}
    return {
        "faults": list(warnings.said),
        "hosts": {task.name: job_group_networking._get_job_address(task.name, group) for task in dag.tasks}
        if group
        else {},
        "restarts": {name: restarts(executor) for name, executor in executors.items()},
        "strategies": {name: type(executor).__name__ for name, executor in executors.items()},
    }


def executor_of(task: Any) -> Any:
    return recovery_strategy.StrategyExecutor.make(
        "cluster", CloudVmRayBackend(), task, 1, 0, None, set(), None, None
    )


def restarts(executor: Any) -> list[bool]:
    ends = [ENDS["lost"]] * 9 + [ENDS["bug"]] * 4 + [ENDS["again"]]
    return [executor.should_restart_on_failure(exit_codes=codes) for codes in ends]


def fault_of(line: str) -> str:
    """The error message of `sky`'s parser for a command, or ""; does not run the command."""
    _, *words = shlex.split(line)
    command: click.Command | None = cli
    name: str | None = "sky"
    try:
        while isinstance(command, click.Group):
            name, command, words = command.resolve_command(click.Context(command), words)
        assert command is not None
        command.make_context(name, words)
    except click.ClickException as error:
        return error.format_message()
    return ""


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        raise OSError(f"SkyPilot connects to {arguments[1]}")


if __name__ == "__main__":
    sys.addaudithook(refuse_network)
    plugins.load_plugins(plugins.ExtensionContext(plugins.PluginContext.CONTROLLER))
    heard = Warnings()
    for name in ("sky.utils.dag_utils", "sky.optimizer", "sky.task", "sky.resources"):
        logging.getLogger(name).addHandler(heard)
    given = json.load(sys.stdin)
    found = {
        "files": [checked(text, heard) for text in given["files"]],
        "lines": [fault_of(line) for line in given["lines"]],
    }
    print(json.dumps(found))
