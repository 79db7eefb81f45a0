"""The output of `holdfast simulate`: tables and a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.command.output import console, escape_controls, print_line, table
from holdfast.errors import ConfigError
from holdfast.policy.advice import Advice
from operator_side.simulate.strategy import HOUR_US
from operator_side.simulate.study import Spread, Total
from operator_side.simulate.study_plan import StudyPlan, TraceResult

_PER_DOLLAR_CELL = 1000  # iterations; the price of a single one is too small to read


def show_replayed(plan: StudyPlan, one: TraceResult) -> None:
    """Print the results of one trace: goodput by interval, each strategy at its best interval, advice."""
    trace = one.trace
    print_line(
        f"\n{trace.name}: {trace.end_us / HOUR_US:.1f} h, {trace.losses} losses "
        f"({trace.losses_per_hour:.2f} per hour), up to {trace.count_max} machines; a job on {one.job.nodes_min} to "
        f"{one.job.nodes} machines, {plan.offsets} windows of {one.window_hours:.1f} h, seed {plan.seed}"
    )
    _show_by_interval(plan, one)
    _show_best_intervals(one)
    bound = f"{plan.overhead_max:.1%}"
    print_line(f"\nAdvised intervals for the losses of this trace, with an overhead of at most {bound}")
    for name, advice in one.advice:
        print_line(f"  {name}: {_line(advice)}")


def _show_by_interval(plan: StudyPlan, one: TraceResult) -> None:
    print_line("\nGoodput in % of the ideal, by interval in iterations")
    intervals = [str(every) for every in plan.intervals]
    rows = table("STRATEGY", *intervals, right=tuple(intervals))
    for strategy in plan.strategies[:-1]:  # the ideal has no interval
        shares = [row.share.median for row in one.rows if row.strategy == strategy]
        rows.add_row(escape_controls(strategy.name), *(f"{100 * share:.1f}" for share in shares))
    console().print(rows)


def _show_best_intervals(one: TraceResult) -> None:
    print_line("\nEach strategy at its best interval: median (smallest–largest)")
    heads = ["EVERY", "GOODPUT %", "PER HOUR", "REDONE", "RUNNING %"]
    if one.on_demand_dollars is not None:
        heads.append(f"$ PER {_PER_DOLLAR_CELL}")
    rows = table("STRATEGY", *heads, right=tuple(heads))
    for row in one.best():
        every = "-" if row.strategy.every_iteration else str(row.every)
        medians = (row.useful_per_hour.median, row.redone.median, 100 * row.training.median)
        cells = [every, _spread(row.share, 100), *(f"{median:.0f}" for median in medians)]
        if one.on_demand_dollars is not None:
            cells.append("-" if row.dollars is None else _spread(row.dollars, _PER_DOLLAR_CELL, 3))
        rows.add_row(escape_controls(row.strategy.name), *cells)
    console().print(rows)
    if one.on_demand_dollars is not None:
        dollars = _PER_DOLLAR_CELL * one.on_demand_dollars
        print_line(
            f"on demand, without losses and checkpoints: ${dollars:.3f} per {_PER_DOLLAR_CELL} iterations"
        )


def show_totals(plan: StudyPlan, totals: Sequence[Total]) -> None:
    """Print the total time by mean time between losses, each strategy at its best interval."""
    print_line(
        f"\nHours until {plan.iterations} iterations are done, by mean hours between losses, each strategy at its best "
        "interval: median (smallest–largest)"
    )
    heads = [f"{hours:g} h" for hours in plan.mtbf_hours]
    rows = table("STRATEGY", *heads, right=tuple(heads))
    for name in dict.fromkeys(total.strategy.name for total in totals):
        theirs = [total.hours for total in totals if total.strategy.name == name]
        rows.add_row(
            escape_controls(name), *("never" if hours is None else _spread(hours, 1, 2) for hours in theirs)
        )
    console().print(rows)


def _spread(spread: Spread, times: float, digits: int = 1) -> str:
    median, least, greatest = (f"{times * value:.{digits}f}" for value in asdict(spread).values())
    return f"{median} ({least}–{greatest})"


def _line(advice: Advice | ConfigError) -> str:
    return escape_controls(str(advice)) if isinstance(advice, ConfigError) else advice.describe()


def document(
    plan: StudyPlan, replayed: Sequence[TraceResult], totals: Sequence[Total], pictures: Sequence[Path]
) -> dict[str, Any]:
    return {
        "profile": plan.profile.model_dump(mode="json"),
        "seed": plan.seed,
        "prices": None if plan.prices is None else asdict(plan.prices),
        "traces": [_trace(plan, one) for one in replayed],
        "totals": [
            {
                "strategy": total.strategy.name,
                "mtbf_hours": total.mtbf_hours,
                "every": total.every,
                "hours": None if total.hours is None else asdict(total.hours),
            }
            for total in totals
        ],
        "figures": [str(path) for path in pictures],
    }


def _trace(plan: StudyPlan, one: TraceResult) -> dict[str, Any]:
    return {
        "trace": one.trace.name,
        "hours": one.trace.end_us / HOUR_US,
        "machines_max": one.trace.count_max,
        "losses": one.trace.losses,
        "losses_per_hour": one.trace.losses_per_hour,
        "nodes": one.job.nodes,
        "window_hours": one.window_hours,
        "offsets": plan.offsets,
        "event_steps": one.event_steps,
        "on_demand_dollars": one.on_demand_dollars,
        "goodput": [{**asdict(row), "strategy": row.strategy.name} for row in one.rows],
        "advice": [_advice_document(name, advice) for name, advice in one.advice],
    }


def _advice_document(name: str, advice: Advice | ConfigError) -> dict[str, Any]:
    figures = {} if isinstance(advice, ConfigError) else asdict(advice)
    return {"strategy": name, **figures, "line": _line(advice)}
