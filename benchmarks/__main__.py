"""`python -m benchmarks EXPERIMENT`: measure holdfast beside its peers on this machine.

Tables on the terminal, JSON in benchmarks/results/. `all` runs every experiment, `figures` draws from the JSON and
fills the tables of docs/performance.md.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from benchmarks import machine, results, targets
from benchmarks.cluster import Clusters
from benchmarks.experiments import EXPERIMENTS, Options, experiment

_WIDTH = 130


def _console() -> Console:
    console = Console()
    return (
        console if console.is_terminal else Console(width=_WIDTH)
    )  # the tables need a width, and a pipe has none


@click.group(help=__doc__)
def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as after Ctrl-C


def _run(name: str, options: Options, out: Path | None, console: Console) -> None:
    begun, stolen = time.monotonic(), machine.stolen()
    with console.status("starting") as status:
        asked = dataclasses.replace(
            options,
            progress=lambda text: _say(console, status, f"{name}, {time.monotonic() - begun:.0f} s: {text}"),
        )
        document = {**experiment(name).measure(asked), "stolen_share": stolen()}
    path = out or results.RESULTS / f"{name}{'-quick' if options.quick else ''}.json"
    results.write(path, document)
    written = results.read(path.stem, path.parent)
    assert written is not None
    for grid in experiment(name).grids(written):
        console.print(grid.table())
    judged = targets.grid({name: written}, only=name)
    if judged.rows:
        console.print(judged.table())
    console.print(f"{name}: {time.monotonic() - begun:.0f} s, written to {path}", highlight=False)


def _say(console: Console, status: Status, text: str) -> None:
    """Show the current activity: on one line of a terminal, else in a log."""
    if console.is_terminal:
        status.update(text)
    else:
        click.echo(text, err=True)


def _options(command: click.Command) -> click.Command:
    for option in (
        click.option("--quick", is_flag=True, help="A toy size: tries it, measures nothing that counts."),
        click.option("--rounds", type=click.IntRange(min=0), default=0, help="Instead of its own number."),
        click.option(
            "--folder",
            type=click.Path(path_type=Path, file_okay=False, exists=True),
            help="Where everything is written. It must be there.",
        ),
    ):
        command = option(command)
    return command


def _add(name: str, what: str) -> None:
    @click.option("--model", default="", help="Another model; see benchmarks/workload.py.")
    @click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the JSON goes.")
    def command(quick: bool, rounds: int, folder: Path | None, model: str, out: Path | None) -> None:
        try:
            with Clusters() as clusters:
                options = Options(quick, rounds, model, folder, clusters=clusters)
                _run(name, options, out, _console())
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error

    main.add_command(_options(click.command(name, help=what + ".")(command)))


for _name, _what in EXPERIMENTS.items():
    _add(_name, _what)


@main.command("all")
@click.option("--without", multiple=True, type=click.Choice(list(EXPERIMENTS)), help="Leave out; repeatable.")
@click.option("--quick", is_flag=True, help="Toy sizes.")
@click.option("--rounds", type=click.IntRange(min=0), default=0, help="Instead of each one's own number.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where everything is written. It must be there.",
)
def everything(without: tuple[str, ...], quick: bool, rounds: int, folder: Path | None) -> None:
    """Every experiment, one after the other; one that fails does not keep the others from running."""
    console = _console()
    failed = []
    with Clusters() as clusters:
        for name in EXPERIMENTS:
            if name in without:
                continue
            try:
                _run(name, Options(quick, rounds, folder=folder, clusters=clusters), None, console)
            except Exception as error:  # noqa: BLE001 - said at the end, with the exit code
                console.print(f"{name} failed: {error}", highlight=False, markup=False)
                failed.append(name)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


@main.command()
def figures() -> None:
    """Take the newest results into docs/figures/data, draw docs/figures, and fill performance.md, papers.md, gpu.md."""
    from benchmarks import document, drawing
    from benchmarks.gpu import page

    for path in (*document.adopt(), *drawing.draw_all(), *document.fill(), page.fill()):
        click.echo(f"written: {path}")


@main.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gpu(arguments: tuple[str, ...]) -> None:
    """Measure on a CUDA device, in phases with a limit each, as `make gpu` does. `gpu --help` lists its options."""
    from benchmarks.gpu.__main__ import main as on_the_device

    raise SystemExit(on_the_device(arguments))


if __name__ == "__main__":
    main()
