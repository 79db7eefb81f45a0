"""`python -m benchmarks`: measure holdfast beside its peers on this machine.

Tables on the terminal, JSON in benchmarks/results/. About three minutes on two cores by default.
"""

from __future__ import annotations

import signal
from pathlib import Path

import click
from rich.console import Console

from benchmarks import report
from benchmarks.peers import PEERS
from benchmarks.schedule import Settings, run
from holdfast.config import parse_size

_RESULTS = Path(__file__).parent / "results"
_WIDTH = 110


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds that count.")
@click.option(
    "--model",
    type=click.Choice(["small", "tiny"]),
    default="small",
    show_default=True,
    help="GPT-2 small, or a toy.",
)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Training ranks.")
@click.option(
    "--compute-seconds",
    type=float,
    default=0.25,
    show_default=True,
    help="Timed wait for a step's computation.",
)
@click.option(
    "--idle-seconds", type=float, default=20.0, show_default=True, help="How long idle CPU is watched."
)
@click.option("--ring-bytes", default="1GiB", show_default=True, help="The stager's ring.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(PEERS),
    help="Only these (holdfast always); repeatable.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where all peers write. Default: temporary.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The JSON. Default: results/<model>.json here.",
)
def main(
    rounds: int,
    model: str,
    ranks: int,
    compute_seconds: float,
    idle_seconds: float,
    ring_bytes: str,
    peers: tuple[str, ...],
    folder: Path | None,
    out: Path | None,
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as after Ctrl-C
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # a file or a pipe has no width; the tables need this one
    try:
        ring = parse_size(ring_bytes)
    except ValueError as error:
        raise click.BadParameter(
            f"expected {error}, got {ring_bytes!r}", param_hint="--ring-bytes"
        ) from error
    settings = Settings(
        rounds=rounds,
        model=model,
        ranks=ranks,
        compute_seconds=compute_seconds,
        idle_seconds=idle_seconds,
        ring_bytes=ring,
        peers=("holdfast", *peers) if peers else PEERS,
        folder=folder,
    )
    try:
        with console.status("starting") as status:
            document = run(settings, status.update)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    path = out or _RESULTS / f"{model}.json"
    report.write(path, document)
    report.render(document, console)
    console.print(f"written to {path}")
    left = [name for name, ended in document["ended_by_itself"].items() if not ended]
    if left:
        raise click.ClickException(f"did not end well by itself: {', '.join(left)}")


if __name__ == "__main__":
    main()
