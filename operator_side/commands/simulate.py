"""`holdfast simulate`: replay traces of preemptions (operator_side/simulate/) before money is spent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, plain, print_json
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from operator_side.simulate.profiles import TrainingProfile
    from operator_side.simulate.study import Prices, Total
    from operator_side.simulate.study_plan import Replayed


_SECONDS_MAX = 1e6
_INTERVAL_MAX = 1e9
_AS_GIVEN = (
    "nodes",
    "nodes_min",
    "offsets",
    "seed",
    "window_hours",
    "overhead_max",
    "stager_mtbf_hours",
    "iterations",
    "provision_seconds",
)


@click.command(
    short_help="Replay traces of preemptions: what would each way to checkpoint have come to?",
    epilog=examples(
        "holdfast simulate trace.csv                                            # goodput by interval",
        "holdfast simulate trace.csv --lead-seconds 0,30,120                    # with notices",
        "holdfast simulate trace.csv --spot-price 12 --on-demand-price 33       # and dollars",
        "holdfast simulate --mtbf-hours 0.5,2,8 --nodes 8 --iterations 100000   # total time under made-up losses",
    ),
)
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="Measured figures, JSON. Default: this tree's benchmarks.",
)
@click.option(
    "--iteration-seconds", type=click.FloatRange(1e-6, 1e6), help="Of one iteration; else the profile's."
)
@click.option(
    "--restart-seconds", type=click.FloatRange(0, 1e6), help="From a loss to processes; else the profile's."
)
@click.option(
    "--nodes", type=click.IntRange(1, 1_000_000), help="Machines of the job. Default: the most in the trace."
)
@click.option(
    "--nodes-min", type=click.IntRange(1), default=1, show_default=True, help="It runs with so few."
)
@click.option(
    "--every", default="1,10,25,50,100,250,1000", show_default=True, help="Intervals, in iterations."
)
@click.option(
    "--lead-seconds", default="0", show_default=True, help="Notices before a loss, such as 0,30,120."
)
@click.option(
    "--offsets", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Windows of a trace."
)
@click.option(
    "--window-hours", type=click.FloatRange(0, min_open=True), help="Of each. Default: half of the trace."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of offsets and made-up losses."
)
@click.option(
    "--overhead-max",
    type=click.FloatRange(0, min_open=True),
    default=0.03,
    show_default=True,
    help="Bound of the interval that is advised; 0.03 is 3 %.",
)
@click.option("--spot-price", type=click.FloatRange(0), help="Of one machine, USD per hour.")
@click.option("--on-demand-price", type=click.FloatRange(0), help="Of the same on demand.")
@click.option(
    "--stager-price", type=click.FloatRange(0), default=0.0, help="Of the stager's node, USD per hour."
)
@click.option(
    "--stager-mtbf-hours", type=click.FloatRange(0, min_open=True), help="The stager's node is lost so often."
)
@click.option(
    "--mtbf-hours", default="", help="Total time under made-up losses so far apart, such as 0.5,2,8."
)
@click.option("--iterations", type=click.IntRange(1), help="Of that training.")
@click.option(
    "--provision-seconds",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="Until a lost machine is replaced, for --mtbf-hours.",
)
@click.option("--figures", type=click.Path(path_type=Path), help="Folder for pictures; needs matplotlib.")
@json_option
def simulate(as_json: bool, traces: tuple[Path, ...], profile: Path | None, **options: Any) -> None:
    """Replay each TRACE for every way to checkpoint, at every interval, from many offsets: losses, relaunches,
    restores from the level that survives, work done again. Figures are the median of the windows, with the least and
    the greatest.

    A trace is a file of counts (`,Time,GPUs` or `date, time, count`) or of machines (`ms,add,node`). The model, and
    what it leaves out, is in docs/design/020-simulation.md; how to use it, in docs/simulate.md.

    JSON: {"profile", "seed", "prices", "traces": [{"trace", "hours", "machines_max", "losses", "losses_per_hour",
    "nodes", "window_hours", "offsets", "event_steps", "on_demand_dollars", "goodput": [{"strategy", "every", "share",
    "useful_per_hour", "redone", "interruptions", "training", "dollars"}], "advice": [{"strategy", "every", "overhead",
    "lost_seconds", "lost_dollars", "line"}]}], "totals": [{"strategy", "mtbf_hours", "every", "hours"}], "figures"}.
    Spreads are {"median", "least", "greatest"}; "profile" is a file for --profile.
    """
    # numpy and the studies are brought in only here: not for --help.
    from operator_side.commands.simulate_output import document, show_replayed, show_totals
    from operator_side.simulate.study_plan import StudyPlan
    from operator_side.simulate.traces import read_trace

    mtbf = options["mtbf_hours"]
    if not traces and not mtbf:
        raise ConfigError("expected a TRACE to replay, or --mtbf-hours for made-up losses, got neither")
    plan = StudyPlan(
        _profile(profile, options),
        leads_seconds=_numbers("--lead-seconds", options["lead_seconds"], least=0, most=_SECONDS_MAX),
        intervals=[int(every) for every in _numbers("--every", options["every"], least=1, whole=True)],
        prices=_prices(options),
        mtbf_hours=_numbers("--mtbf-hours", mtbf, least=1e-3, most=_SECONDS_MAX) if mtbf else (),
        **{name: options[name] for name in _AS_GIVEN},
    )
    replayed = [plan.replay(read_trace(path)) for path in traces]
    totals = plan.totals()
    pictures = _pictures(options["figures"], replayed, totals)
    if as_json:
        print_json(document(plan, replayed, totals, pictures))
        return
    out = console()
    out.print(f"measured: {plain(plan.profile.source)}", markup=False, soft_wrap=True)
    for one in replayed:
        show_replayed(out, plan, one)
    if totals:
        show_totals(out, plan, totals)
    for path in pictures:
        out.print(f"drawn: {plain(str(path))}", markup=False, soft_wrap=True)


def _profile(path: Path | None, options: dict[str, Any]) -> TrainingProfile:
    from operator_side.simulate.profiles import load_profile, measured_profile

    profile = measured_profile() if path is None else load_profile(path)
    given = {
        name: options[name] for name in ("iteration_seconds", "restart_seconds") if options[name] is not None
    }
    if given:
        said = ", ".join(f"{name} {value:g} as given" for name, value in given.items())
        profile = profile.model_copy(update={**given, "source": f"{profile.source}; {said}"})
    return profile


def _prices(options: dict[str, Any]) -> Prices | None:
    from operator_side.simulate.study import Prices

    spot, on_demand = options["spot_price"], options["on_demand_price"]
    if spot is None and on_demand is None:
        return None
    if spot is None or on_demand is None:
        raise ConfigError("expected --spot-price and --on-demand-price together, got one of them")
    return Prices(spot, on_demand, options["stager_price"])


def _numbers(
    option: str, text: str, *, least: float, most: float = _INTERVAL_MAX, whole: bool = False
) -> Sequence[float]:
    """In order, each once."""
    try:
        found = sorted({int(part) if whole else float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(least <= number <= most for number in found):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(
            f"{option} {text}: expected {kind} from {least:g} to {most:g} with commas between them"
        )
    return found


def _pictures(folder: Path | None, replayed: list[Replayed], totals: list[Total]) -> list[Path]:
    if folder is None:
        return []
    from operator_side.simulate.study_pictures import draw_goodput, draw_totals

    drawn = [draw_goodput(one.rows, one.trace.name, folder) for one in replayed]
    return [*drawn, draw_totals(totals, folder)] if totals else drawn
