"""`holdfast simulate`: replay traces of preemptions before money is spent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json, print_line
from holdfast.errors import ConfigError
from operator_side.commands import options as option

if TYPE_CHECKING:
    from operator_side.simulate.profiles import TrainingProfile
    from operator_side.simulate.study import Prices, Total
    from operator_side.simulate.study_plan import TraceResult


_SECONDS_MAX = 1e6
_INTERVAL_MAX = 1e9


@click.command(
    short_help="Replay preemption traces to compare ways to checkpoint.",
    epilog=examples(
        "holdfast simulate trace.csv                                            # goodput by interval",
        "holdfast simulate trace.csv --lead-seconds 0,30,120                    # with preemption notices",
        "holdfast simulate trace.csv --spot-price 12 --on-demand-price 33       # in dollars, too",
        "holdfast simulate --mtbf-hours 0.5,2,8 --nodes 8 --iterations 100000   # hours under simulated losses",
    ),
)
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=click.Path(path_type=Path))
@option.PROFILE
@option.number(
    "--iteration-seconds",
    "Seconds of one training iteration. Default: as in the profile.",
    least=1e-6,
    most=1e6,
)
@option.number(
    "--restart-seconds",
    "Seconds from a loss until the processes of the job run again. Default: as in the profile.",
    most=1e6,
)
@option.count(
    "--nodes",
    "Largest number of machines that the job uses. Default: the largest number in the trace.",
    most=1_000_000,
)
@option.count("--nodes-min", "Smallest number of machines with which the job trains.", 1)
@option.text(
    "--every",
    "Checkpoint intervals to compare, in iterations, separated by commas.",
    "1,10,25,50,100,250,1000",
)
@option.text(
    "--lead-seconds",
    "Seconds between a preemption notice and the loss (0: no notice), separated by commas, such as 0,30,120.",
    "0",
)
@option.count(
    "--offsets", "Number of windows of a trace that are replayed, each from another offset.", 20, most=10000
)
@option.number(
    "--window-hours", "Length of each replayed window in hours. Default: half of the trace.", above=0
)
@option.count("--seed", "Seed of the random offsets and of the simulated losses.", 0, least=0)
@option.OVERHEAD_MAX
@option.SPOT_PRICE
@option.ON_DEMAND_PRICE
@option.STAGER_PRICE
@option.number(
    "--stager-mtbf-hours",
    "Mean hours between losses of the stager's machine. Default: it is never lost.",
    above=0,
)
@option.text(
    "--mtbf-hours",
    "Mean hours between simulated losses, separated by commas, such as 0.5,2,8; shows the total time for each.",
    "",
)
@option.count("--iterations", "Number of iterations of the training whose total time --mtbf-hours asks for.")
@option.number("--provision-seconds", "Seconds until a lost machine is replaced, for --mtbf-hours.", 300.0)
@option.file("--figures", "Folder for pictures of the results; needs matplotlib.")
@json_option
def simulate(as_json: bool, traces: tuple[Path, ...], profile: Path | None, **options: Any) -> None:
    """Replay each TRACE of preemptions for every way to checkpoint and every interval, and compare the goodput.

    The replay models losses, restarts, restores from the nearest level that survived, and work that is done again, from
    many offsets of the trace. Each figure is the median of these windows, with the smallest and the largest value.

    TRACE is a file of machine counts (`,Time,GPUs` or `date, time, count`) or of single machines (`ms,add,node`).
    docs/simulate.md says how to use the command, docs/design/015-tools-read-evidence.md what the model leaves out.

    JSON: {"profile", "seed", "prices", "traces": [{"trace", "hours", "machines_max", "losses", "losses_per_hour",
    "nodes", "window_hours", "offsets", "event_steps", "on_demand_dollars", "goodput": [{"strategy", "every", "share",
    "useful_per_hour", "redone", "interruptions", "training", "dollars"}], "advice": [{"strategy", "every", "overhead",
    "lost_seconds", "lost_dollars", "line"}]}], "totals": [{"strategy", "mtbf_hours", "every", "hours"}], "figures"}.
    Spreads are {"median", "least", "greatest"}. "profile" can be given to --profile, as a file.
    """
    # Keep numpy and the studies out of --help.
    from operator_side.commands.simulate_output import document, show_replayed, show_totals
    from operator_side.simulate.study_plan import StudyPlan
    from operator_side.simulate.traces import read_trace

    mtbf = options["mtbf_hours"]
    if not traces and not mtbf:
        raise ConfigError("expected a TRACE to replay, or --mtbf-hours for simulated losses, got neither")
    options["mtbf_hours"] = _numbers("--mtbf-hours", mtbf, least=1e-3, most=_SECONDS_MAX) if mtbf else ()
    plan = StudyPlan(
        _profile(profile, options),
        leads_seconds=_numbers("--lead-seconds", options["lead_seconds"], least=0, most=_SECONDS_MAX),
        intervals=[int(every) for every in _numbers("--every", options["every"], least=1, whole=True)],
        prices=_prices(options),
        **{one.name: options[one.name] for one in dataclasses.fields(StudyPlan) if one.name in options},
    )
    replayed = [plan.replay(read_trace(path)) for path in traces]
    totals = plan.totals()
    pictures = _pictures(options["figures"], replayed, totals)
    if as_json:
        print_json(document(plan, replayed, totals, pictures))
        return
    print_line(f"profile: {plan.profile.source}")
    for one in replayed:
        show_replayed(plan, one)
    if totals:
        show_totals(plan, totals)
    for path in pictures:
        print_line(f"picture: {path}")


def _profile(path: Path | None, options: dict[str, Any]) -> TrainingProfile:
    from operator_side.simulate.profiles import load_profile, measured_profile

    profile = measured_profile() if path is None else load_profile(path)
    given = {
        name: options[name] for name in ("iteration_seconds", "restart_seconds") if options[name] is not None
    }
    if given:
        changes = ", ".join(f"{name} {value:g} as given" for name, value in given.items())
        profile = profile.model_copy(update={**given, "source": f"{profile.source}; {changes}"})
    return profile


def _prices(options: dict[str, Any]) -> Prices | None:
    from operator_side.simulate.study import Prices

    spot, on_demand = options["spot_price"], options["on_demand_price"]
    if spot is None and on_demand is None:
        return None
    if spot is None or on_demand is None:
        raise ConfigError("expected --spot-price and --on-demand-price together, got only one of them")
    return Prices(spot, on_demand, options["stager_price"])


def _numbers(
    name: str, text: str, *, least: float, most: float = _INTERVAL_MAX, whole: bool = False
) -> Sequence[float]:
    try:
        found = sorted({int(part) if whole else float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(least <= number <= most for number in found):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{name} {text}: expected {kind} from {least:g} to {most:g}, separated by commas")
    return found


def _pictures(folder: Path | None, replayed: list[TraceResult], totals: list[Total]) -> list[Path]:
    if folder is None:
        return []
    from operator_side.simulate.study_pictures import draw_goodput, draw_totals

    drawn = [draw_goodput(one.rows, one.trace.name, folder) for one in replayed]
    return [*drawn, draw_totals(totals, folder)] if totals else drawn
