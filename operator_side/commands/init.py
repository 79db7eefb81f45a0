"""`holdfast init`: print what a training script needs, and how to start it."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json
from holdfast.errors import ConfigError

_LAUNCHERS = ("mpirun", "torchrun", "slurm", "kubernetes", "skypilot")


@click.command(
    short_help="Print the lines that a training script needs, and the line that starts it.",
    epilog=examples(
        "holdfast init train.py",
        "holdfast init train.py | patch -p1",
        "holdfast init train.py --launcher slurm --ranks 8 --store s3://bucket/run",
    ),
)
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.option(
    "--launcher",
    type=click.Choice(_LAUNCHERS),
    default="mpirun",
    show_default=True,
    help="Launcher of the job, for the line that starts it.",
)
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Number of training ranks; those of one machine where the launcher is for one machine.",
)
@click.option(
    "--store",
    default="s3://bucket/run",
    show_default=True,
    help="URL of the run, for the line that starts it.",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Training steps from one checkpoint to the next.",
)
@json_option
def init(as_json: bool, script: Path | None, launcher: str, ranks: int, store: str, every: int) -> None:
    """Print the lines that holdfast needs in SCRIPT as a diff, and the lines that start the job. Nothing is written.

    The training loop is found by reading the script, which is not run. Where it cannot be found, or is of a kind that
    cannot be changed by itself (`while`, gradients that are accumulated over turns, Lightning), and without SCRIPT, the
    lines are printed with the places where they belong. Lines that begin with `note:` on stderr name what a person
    should look at.

    JSON: {"diff", "by_hand", "notes": [text], "start": [{"where", "line"}]}; of `diff` and `by_hand` one is empty.
    """
    from operator_side.onboarding.script_edits import BY_HAND, ScriptEdits, edits_of
    from operator_side.onboarding.start_lines import Launcher, start_lines

    if script is None:
        edits = ScriptEdits("", BY_HAND.replace("100", str(every)), [])
    else:
        edits = edits_of(_read(script), str(script), every=every)
    start = start_lines(Launcher(launcher), str(script or "train.py"), ranks=ranks, store=store)
    if as_json:
        lines = [{"where": where, "line": line} for where, line in start]
        print_json({"diff": edits.diff, "by_hand": edits.by_hand, "notes": edits.notes, "start": lines})
        return
    click.echo(edits.diff or edits.by_hand)
    for where, line in start:
        click.echo(f"# {where}:\n{line}")
    for note in edits.notes:
        click.echo(f"note: {note}", err=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: this script cannot be read: {error}") from error
