"""`holdfast tune`: writes a `holdfast.toml` with reasons, from measured figures and the rate of losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.errors import ConfigError
from operator_side.commands.options import (
    OVERHEAD_MAX,
    PROFILE,
    SPOT_PRICE,
    STAGER_PRICE,
    count,
    file,
    force_flag,
    number,
    parse_size_argument,
    text,
)
from operator_side.commands.target import Target

if TYPE_CHECKING:
    from holdfast.wire.failure_count import FailureCount

_SECONDS_MAX = 1e6
_GBPS_BYTES = 1e9 / 8


@click.command(
    short_help="Write a holdfast.toml from measured figures and a preemption trace.",
    epilog=examples(
        "holdfast tune trace.csv --spot-price 12  # from a trace",
        "holdfast tune --mtbf-hours 2 --profile mine.json  # from your own figures",
        "holdfast tune --run s3://bucket/run  # from the failures that this run has had",
        "holdfast tune trace.csv --ranks 64 --image-size 84GB --output holdfast.toml",
    ),
)
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@PROFILE
@text("--strategy", "Use the strategies of the profile whose names begin with this text.", "holdfast")
@number("--mtbf-hours", "Mean hours between losses, where there is no trace.", above=0, most=1e6)
@text("--run", "URL of a run, whose own failures say how often machines are lost.")
@count("--nodes", "Number of machines of the job. Default: the largest number in the trace.", most=1_000_000)
@OVERHEAD_MAX
@SPOT_PRICE
@STAGER_PRICE
@file(
    "--cluster",
    "File with the output of `holdfast cluster status --json`, whose price is that of all machines.",
)
@number(
    "--lead-seconds",
    "Seconds between a preemption notice and the loss (0: no notice).",
    0.0,
    most=_SECONDS_MAX,
)
@count("--ranks", "Number of training ranks.", most=1_000_000)
@text("--image-size", 'Size of a whole checkpoint, such as "84GB"; `holdfast ls` shows the size of each.')
@text(
    "--stager-type",
    "Instance type of the stager's machine, such as c7gn.4xlarge. Default: the command chooses one.",
)
@text("--stager-memory", 'Memory of the stager\'s machine, such as "64GiB", if its type is not known.')
@number("--store-gbps", "Write speed of the store in Gbit/s. Default: as measured.", above=0, most=1e6)
@text("--store", "URL of the run, to write into the file.")
@file("--output", "File to write. Default: stdout.")
@force_flag("the file of --output")
def tune(trace: Path | None, output: Path | None, force: bool, **options: Any) -> None:
    """Write a holdfast.toml that says how often to take checkpoints, how many may be in flight, and how large the ring
    should be, with the reasons as comments.

    The file for --profile is the output of `holdfast simulate --json`, or the "profile" in it (docs/simulate.md). The
    settings are computed, not tested: measure a run with them.
    """
    # Keep numpy and the replay out of --help.
    from operator_side.simulate.profiles import load_profile, measured_profile
    from operator_side.simulate.scale import find_machine
    from operator_side.simulate.traces import read_trace
    from operator_side.simulate.tuning import TuningRequest
    from operator_side.simulate.tuning import tune as make_tuning

    if output is not None and output.exists() and not force:
        raise ConfigError(
            f"--output {output}: this file exists already; name another file, or replace it with --force"
        )
    given = [name for name in ("mtbf_hours", "run") if options[name] is not None]
    if len(given) + (trace is not None) != 1:
        raise ConfigError(
            "expected one of TRACE, --mtbf-hours and --run, to know how often machines are lost; got "
            + (" and ".join([*(["TRACE"] if trace else []), *given]) or "none")
        )
    if options["cluster"] is not None and options["spot_price"] is not None:
        raise ConfigError("expected a price either by --cluster or by --spot-price, got both")
    path = options["profile"]
    gbps = options["store_gbps"]
    as_given = ("mtbf_hours", "strategy", "nodes", "overhead_max", "lead_seconds", "ranks")
    request = TuningRequest(
        measured_profile() if path is None else load_profile(path),
        None if trace is None else read_trace(trace),
        spot_dollars=options["spot_price"],
        stager_dollars=options["stager_price"],
        cluster_dollars=_price(options["cluster"]),
        image_bytes=_size("--image-size", options["image_size"]),
        stager=None if options["stager_type"] is None else find_machine(options["stager_type"]),
        stager_memory_bytes=_size("--stager-memory", options["stager_memory"]),
        store_rate=None if gbps is None else gbps * _GBPS_BYTES,
        store=_store(options["store"]),
        failures=_read_failures(options["run"]),
        **{name: options[name] for name in as_given},
    )
    settings = make_tuning(request).to_toml()
    if output is None:
        click.echo(settings, nl=False)
        return
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(settings)
    except OSError as error:
        raise ConfigError(
            f"--output {output}: this file cannot be written: {error.strerror}; name another file"
        ) from error


def _price(cluster: Path | None) -> float | None:
    if cluster is None:
        return None
    try:
        dollars = json.loads(cluster.read_bytes())["per_hour"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--cluster {cluster}: expected the output of `holdfast cluster status --json`: {error!r}"
        ) from error
    if not (type(dollars) in {int, float} and 0 <= dollars < _SECONDS_MAX):
        raise ConfigError(
            f"--cluster {cluster}: expected a price in per_hour, got {dollars!r:.80}; give --spot-price instead"
        )
    return float(dollars)


def _read_failures(run: str | None) -> FailureCount | None:
    from holdfast.checkpoints.lease import read_failure_count

    if run is None:
        return None
    target = Target(run, None)
    target.read_listing()  # refuse a URL without content
    return read_failure_count(target.catalog().store)


def _size(option: str, given: str | None) -> int | None:
    if given is None:
        return None
    found = parse_size_argument(option, given)
    if not 0 < found < 1 << 60:
        raise ConfigError(f"{option} {given}: expected more than 0 bytes and less than an exabyte")
    return found


def _store(url: str | None) -> str | None:
    from holdfast.store import normalise_url

    if url is None:
        return None
    try:
        url.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"--store {url!a}: expected a URL in UTF-8, since holdfast.toml holds nothing else"
        ) from None
    return normalise_url(url)
