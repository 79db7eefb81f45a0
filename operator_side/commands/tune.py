"""`holdfast tune`: a `holdfast.toml` with its reasons, from what was measured and from how often machines go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from holdfast.command.examples import examples
from holdfast.errors import ConfigError

_SECONDS_MAX = 1e6
_GBPS_BYTES = 1e9 / 8


@click.command(
    short_help="Write a holdfast.toml with its reasons, from measured figures and a trace.",
    epilog=examples(
        "holdfast tune trace.csv --spot-price 12  # by a trace",
        "holdfast tune --mtbf-hours 2 --profile mine.json  # by your own figures",
        "holdfast tune trace.csv --ranks 64 --image-size 84GB --output holdfast.toml",
    ),
)
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile", type=click.Path(path_type=Path), help="Measured figures, JSON. Default: this tree's."
)
@click.option(
    "--strategy", default="holdfast", show_default=True, help="Of the profile: names that begin so."
)
@click.option(
    "--mtbf-hours", type=click.FloatRange(0, 1e6, min_open=True), help="Between two losses, for a trace."
)
@click.option(
    "--nodes", type=click.IntRange(1, 1_000_000), help="Machines of the job. Default: the most in the trace."
)
@click.option(
    "--overhead-max",
    type=click.FloatRange(0, min_open=True),
    default=0.03,
    show_default=True,
    help="Bound; 0.03 is 3 %.",
)
@click.option("--spot-price", type=click.FloatRange(0), help="Of one machine, USD per hour.")
@click.option(
    "--stager-price", type=click.FloatRange(0), default=0.0, help="Of the stager's node, USD per hour."
)
@click.option(
    "--lead-seconds",
    type=click.FloatRange(0, _SECONDS_MAX),
    default=0.0,
    help="A notice so long before a loss.",
)
@click.option("--ranks", type=click.IntRange(1, 1_000_000), help="Training ranks.")
@click.option("--image-size", help='Of a whole checkpoint, such as "84GB"; `holdfast ls` shows it.')
@click.option("--stager-type", help="The stager's machine, such as c7gn.4xlarge. Default: one is named.")
@click.option("--stager-memory", help='Of a machine that is in no table, such as "64GiB".')
@click.option(
    "--store-gbps",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Into the store, Gbit/s. Default: as measured.",
)
@click.option("--store", help="URL of the run, to be written into the file.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write. Default: stdout.")
@click.option("--force", is_flag=True, help="Overwrite it.")
def tune(trace: Path | None, output: Path | None, force: bool, **options: Any) -> None:
    """Say how often to take checkpoints, how many at once, and how large the ring should be: as a holdfast.toml, with
    the reasons as comments.

    A profile is what `holdfast simulate --json` puts out, or the "profile" in it (docs/simulate.md). Nothing is
    tried out: measure again with what comes out.
    """
    # numpy and the replay are brought in only here: not for --help.
    from operator_side.simulate.profiles import load_profile, measured_profile
    from operator_side.simulate.scale import machine
    from operator_side.simulate.traces import read_trace
    from operator_side.simulate.tuning import Question
    from operator_side.simulate.tuning import tune as answer

    if output is not None and output.exists() and not force:
        raise ConfigError(
            f"--output {output}: is there already; name another file, or overwrite it with --force"
        )
    if (trace is None) == (options["mtbf_hours"] is None):
        raise ConfigError("how often machines go: expected a TRACE or --mtbf-hours, and one of the two")
    path = options["profile"]
    gbps = options["store_gbps"]
    question = Question(
        measured_profile() if path is None else load_profile(path),
        None if trace is None else read_trace(trace),
        spot_dollars=options["spot_price"],
        stager_dollars=options["stager_price"],
        image_bytes=_size("--image-size", options["image_size"]),
        stager=None if options["stager_type"] is None else machine(options["stager_type"]),
        stager_memory_bytes=_size("--stager-memory", options["stager_memory"]),
        store_rate=None if gbps is None else gbps * _GBPS_BYTES,
        store=_store(options["store"]),
        **{
            name: options[name]
            for name in ("mtbf_hours", "strategy", "nodes", "overhead_max", "lead_seconds", "ranks")
        },
    )
    text = answer(question).to_toml()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"--output {output}: cannot be written: {error.strerror}; name another file"
        ) from error


def _size(option: str, text: str | None) -> int | None:
    from holdfast.config import parse_size

    if text is None:
        return None
    try:
        found = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected {error}") from None
    if not 0 < found < 1 << 60:
        raise ConfigError(f"{option} {text}: expected more than no bytes, and less than an exabyte")
    return found


def _store(url: str | None) -> str | None:
    from holdfast.store import normalise_url

    if url is None:
        return None
    try:
        url.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--store {url!a}: a holdfast.toml cannot name it; expected UTF-8") from None
    return normalise_url(url)
