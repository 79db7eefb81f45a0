"""`holdfast init`: prints what a training script needs, and how to start it."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json
from holdfast.errors import ConfigError
from operator_side.commands.options import choice, count, text
from operator_side.script_lines import Launcher, script_lines, start_lines


@click.command(
    short_help="Print the lines that a training script needs, and the line that starts it.",
    epilog=examples(
        "holdfast init train.py",
        "holdfast init train.py --launcher slurm --ranks 8 --store s3://bucket/run",
    ),
)
@click.argument("script", required=False, type=click.Path(path_type=Path))
@choice(
    "--launcher",
    [one.value for one in Launcher],
    "Launcher of the job, for the line that starts it.",
    Launcher.MPIRUN.value,
)
@count("-n --ranks", "Number of training ranks; per machine, for single-machine launchers.", 2)
@text("--store", "URL of the run, for the line that starts it.", "s3://bucket/run")
@count("--every", "Training steps between two checkpoints.", 100)
@json_option
def init(as_json: bool, script: Path | None, launcher: str, ranks: int, store: str, every: int) -> None:
    """Print the lines that SCRIPT needs, with their places, and the lines that start the job. Nothing is written.

    The command reads which framework SCRIPT imports, to print its lines, and does not run it. Without SCRIPT it prints
    the lines for a training loop of your own. A line on stderr that begins with `note:` names the page that says more.

    JSON: {"by_hand": text, "notes": [text], "start": [{"where", "line"}]}.
    """
    lines, note = script_lines("" if script is None else _read(script), every=every)
    start = start_lines(Launcher(launcher), str(script or "train.py"), ranks=ranks, store=store)
    if as_json:
        begin = [{"where": where, "line": line} for where, line in start]
        print_json({"by_hand": lines, "notes": [note], "start": begin})
        return
    click.echo(lines)
    for where, line in start:
        click.echo(f"# {where}:\n{line}")
    click.echo(f"note: {note}", err=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this script cannot be read: {error}") from error
