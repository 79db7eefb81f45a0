"""Settings with their reasons from measured costs: the text of a `holdfast.toml`.

Profile ─► places (N with the least time to durable / N) ─► Cost ─┐
trace, MTBF or run, prices ───────────────────────────────► Hazard ┴─► Advice: the interval
image, rates, the stager's memory ─► ring, machine                     trace ─► replay: the expected goodput
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, replace
from typing import Any

from holdfast.config import IN_FLIGHT_MAX
from holdfast.errors import ConfigError
from holdfast.image.layout import LARGE_IMAGE_BYTES, chunk_bytes_for
from holdfast.policy.advice import Advice, advise
from holdfast.policy.cost import best_in_flight
from holdfast.policy.hazard import Hazard
from holdfast.wire.failure_count import FailureCount
from operator_side.simulate.profiles import MeasuredCosts, TrainingProfile
from operator_side.simulate.scale import (
    STAGERS_SOURCE,
    Machine,
    RingSize,
    Shape,
    best_ring,
    smallest_machine,
    stagers_needed,
)
from operator_side.simulate.strategy import microseconds
from operator_side.simulate.study_plan import StudyPlan
from operator_side.simulate.traces import Trace

_GIB, _MIB = 1 << 30, 1 << 20
_LINE_CHARACTERS_MAX = 120
_SEED = 0
_OFFSETS = 20


@dataclass(frozen=True)
class TuningRequest:
    """The facts and wishes behind the settings; the help of `holdfast tune` explains each."""

    # Measured figures. Strategies whose name begins with `strategy` count; of those measured with different numbers of
    # checkpoints in flight, the best number is used.
    profile: TrainingProfile
    trace: Trace | None = None  # how often machines are lost: exactly one of trace, mtbf_hours, seen
    mtbf_hours: float | None = None
    failures: FailureCount | None = None
    strategy: str = "holdfast"
    nodes: int | None = None  # None: the largest number in the trace, or 1
    spot_dollars: float | None = None
    stager_dollars: float = 0.0
    cluster_dollars: float | None = None  # of all machines, by `holdfast cluster status`
    overhead_max: float = 0.03
    lead_seconds: float = 0.0
    ranks: int | None = None
    image_bytes: int | None = None  # None: no ring is chosen
    stager: Machine | None = None  # None: choose one
    stager_memory_bytes: int | None = None
    store_rate: float | None = None  # bytes per second into the store; None: as measured
    store: str | None = None


@dataclass(frozen=True)
class Setting:
    """One line of `holdfast.toml`. `table`: "" for the top, which applies to every role."""

    table: str
    name: str
    value: str | int | list[str]
    why: str


@dataclass(frozen=True)
class TuningResult:
    request: TuningRequest
    every: int  # iterations between two checkpoints: an argument of `Checkpointer`, not a setting
    advice: Advice
    settings: list[Setting]
    notes: list[str]

    def to_toml(self) -> str:
        """Return the text of the file; equal requests give equal bytes."""
        lines = [*_comment("Made by `holdfast tune`. Measured: " + self.request.profile.source), "#"]
        for note in self.notes:
            lines += _comment(note)
        for table in dict.fromkeys(setting.table for setting in self.settings):
            lines += ["", f"[{table}]"] if table else [""]
            for setting in self.settings:
                if setting.table == table:
                    lines += [*_comment(setting.why), f"{setting.name} = {_toml(setting.value)}"]
        return "\n".join(lines) + "\n"


def tune(request: TuningRequest) -> TuningResult:
    """Choose the settings. Raises `ConfigError`: the strategy was not measured, the rate of losses is unknown, or the
    bound cannot be kept; the message then names the bound that can.
    """
    name, measured, why_places = _choose_strategy(request)
    hazard, nodes = _hazard(request)
    strategy = measured.strategy(name)
    cost = strategy.cost(microseconds(request.profile.iteration_seconds))
    advice = advise(cost, hazard, overhead_max=request.overhead_max)
    cycle_seconds = cost.cycle_seconds(advice.every)
    trace = request.trace
    source = hazard.description if trace is None else f"{trace.losses} in {trace.name}"
    notes = [
        f"Take a checkpoint every {advice.every} iterations: Checkpointer(state, every={advice.every}).",
        f"{advice.describe()}.",
        f"Overhead at most {request.overhead_max:.1%}; losses per hour: {hazard.per_hour:.3g} ({source}).",
    ]
    if hazard.dollars_per_hour is not None:
        origin = "as given" if request.cluster_dollars is None else "by `holdfast cluster status`"
        notes.append(f"Price of all machines: ${hazard.dollars_per_hour:.2f} an hour, {origin}.")
    if request.trace is not None:
        notes.append(_replay_note(request, name, measured, advice.every, nodes))
    settings = [Setting("trainer", "in_flight_max", measured.in_flight_max, why_places)]
    if cost.durable_seconds / cost.in_flight_max > advice.every * cost.iteration_seconds:
        why = (
            "A checkpoint takes longer than the interval: save() waits for a staging area, and skips no step."
        )
        settings.append(Setting("trainer", "on_full", "wait", why))
    if request.lead_seconds:
        settings.append(_watch_setting(request, measured))
    if request.store is not None:
        settings.insert(0, Setting("", "store", request.store, "As given."))
    if request.image_bytes is None:
        notes.append("ring_bytes is not set: give --image-size, and the stager's machine.")
    else:
        sized, more = _ring_settings(request, measured, cycle_seconds)
        settings += sized
        notes += more
    notes.append(
        "Local tiers are not set, since the profile has no figures of them (docs/tiers.md says when they help)."
    )
    return TuningResult(request, advice.every, advice, settings, notes)


# -- grounds ---------------------------------------------------------------------------------------------------------


def _choose_strategy(request: TuningRequest) -> tuple[str, MeasuredCosts, str]:
    """Choose the strategy with the best number of checkpoints in flight."""
    by_places: dict[int, tuple[str, MeasuredCosts]] = {}
    for name, measured in request.profile.strategies.items():
        if not name.startswith(request.strategy):
            continue
        other, _ = by_places.setdefault(measured.in_flight_max, (name, measured))
        if other != name:
            raise ConfigError(
                f"strategies {other} and {name}: both were measured with in_flight_max {measured.in_flight_max}; name "
                "one of them with --strategy"
            )
    if not by_places:
        names = ", ".join(request.profile.strategies)
        raise ConfigError(
            f"--strategy {request.strategy}: expected the beginning of a name in the profile: {names}"
        )
    durable = {places: max(measured.durable_seconds, 1e-6) for places, (_, measured) in by_places.items()}
    places = best_in_flight(durable, places_max=IN_FLIGHT_MAX - 1)
    times = ", ".join(f"{seconds:g} s with {count}" for count, seconds in sorted(durable.items()))
    only = " (no other number was measured)" if len(durable) == 1 else ""
    why = f"Checkpoints in flight, by the smallest time to durable for each checkpoint: {times}{only}."
    return *by_places[places], why


def _hazard(request: TuningRequest) -> tuple[Hazard, int]:
    trace = request.trace
    nodes = request.nodes or (trace.count_max if trace is not None else 1)
    price = request.cluster_dollars
    if request.spot_dollars is not None:
        price = nodes * request.spot_dollars + request.stager_dollars
    if trace is not None:
        return Hazard(trace.losses_per_hour, price), nodes
    if request.failures is not None:
        return Hazard.from_observed(request.failures, price), nodes
    assert request.mtbf_hours is not None
    return Hazard.from_mtbf(request.mtbf_hours, price), nodes


def _replay_note(request: TuningRequest, name: str, measured: MeasuredCosts, every: int, nodes: int) -> str:
    assert request.trace is not None
    plan = StudyPlan(
        request.profile.model_copy(update={"strategies": {name: measured}}),
        leads_seconds=(request.lead_seconds,),
        intervals=(every,),
        nodes=nodes,
        nodes_min=1,
        offsets=_OFFSETS,
        seed=_SEED,
        overhead_max=request.overhead_max,
    )
    row = plan.replay(request.trace).rows[0]
    return (
        f"Replayed over {_OFFSETS} windows of that trace: {row.share.median:.1%} of the ideal's iterations ("
        f"{row.share.least:.1%} to {row.share.greatest:.1%}), {row.redone.median:.0f} done again for each interruption."
    )


def _watch_setting(request: TuningRequest, measured: MeasuredCosts) -> Setting:
    fits = measured.staged_seconds is not None and measured.staged_seconds <= request.lead_seconds
    how = "fits into" if fits else "does not fit into"
    seconds = measured.durable_seconds if measured.staged_seconds is None else measured.staged_seconds
    why = f"A checkpoint is safe after {seconds:g} s, which {how} the {request.lead_seconds:g} s of a notice."
    return Setting("trainer", "watch", ["auto"], why)


# -- ring and machine ------------------------------------------------------------------------------------------------


def _ring_settings(
    request: TuningRequest, measured: MeasuredCosts, cycle_seconds: float
) -> tuple[list[Setting], list[str]]:
    image = request.image_bytes
    assert image is not None
    shape = Shape(request.ranks or 1, image)
    taken = measured.staged_seconds if measured.staged_seconds is not None else measured.durable_seconds
    in_rate = image / max(taken, 1e-6)  # as measured, but limited by the machine's network
    out_rate = request.store_rate or image / max(measured.durable_seconds, 1e-6)
    notes: list[str] = []
    machine = request.stager
    if machine is None:
        machine = smallest_machine(image, cycle_seconds, out_rate)
        notes.append(_machine_note(machine, image, cycle_seconds, out_rate))
    elif stagers_needed(image, cycle_seconds, machine, out_rate) > 1:
        raise ConfigError(_too_slow(image, cycle_seconds, machine.name, min(machine.rate, out_rate)))
    if machine is not None:
        in_rate = min(in_rate, machine.rate)
    memory = request.stager_memory_bytes or (machine.memory_bytes if machine is not None else None)
    if memory is None:
        notes.append("ring_bytes is not set: give the memory of the stager's machine with --stager-memory.")
        return [], notes
    shape = replace(shape, chunk_bytes=chunk_bytes_for(image, memory))
    ring = best_ring(shape, in_rate=in_rate, out_rate=out_rate, memory_bytes=memory)
    return [
        Setting("stager", "ring_bytes", _size(ring.ring_bytes), _ring_why(ring, image, memory)),
        Setting("stager", "chunk_bytes", _size(shape.chunk_bytes), _chunk_why(shape)),
    ], notes


def _too_slow(image: int, cycle_seconds: float, name: str, rate: float) -> str:
    wanted = image / cycle_seconds
    return (
        f"stager {name}: {image / 1e9:.4g} GB every {cycle_seconds:.4g} s: expected {wanted / 1e9:.3g} GB/s in and "
        f"out, got {rate / 1e9:.3g} GB/s with the store. One checkpoint every {image / rate:.4g} s is possible; use a "
        "faster machine or store, or give a lower --overhead-max, which makes intervals longer"
    )


def _machine_note(machine: Machine | None, image: int, cycle_seconds: float, out_rate: float) -> str:
    if machine is None:
        return (
            f"No known instance type can take {image / 1e9:.4g} GB every {cycle_seconds:.4g} s into a store of "
            f"{out_rate / 1e9:.3g} GB/s: take longer intervals, or name another machine with --stager-type."
        )
    return (
        f"Stager: {machine.name} ({machine.gigabits} Gbit/s, {machine.memory_bytes // _GIB} GiB) is the smallest that "
        f"takes {image / 1e9:.4g} GB every {cycle_seconds:.4g} s. {STAGERS_SOURCE}."
    )


def _ring_why(ring: RingSize, image: int, memory: int) -> str:
    what = {
        2: "room for two checkpoints: the next one arrives while the last is written, and a restart finds a whole one",
        1: "room for one checkpoint, which need not wait for the store; two do not fit",
        0: f"less than a checkpoint of {image / 1e9:.4g} GB, which streams through the ring; more does not fit",
    }[ring.images]
    return f"With {memory / _GIB:.4g} GiB of memory, {what}. Staged after {ring.staged_seconds:.3g} s."


def _chunk_why(shape: Shape) -> str:
    return (
        f"A checkpoint of {shape.image_bytes / 1e9:.4g} GB is {shape.chunks:,} chunks. Where it is not set, a run "
        f"whose newest checkpoint has {LARGE_IMAGE_BYTES // 10**9} GB or more starts with 64MiB, all others with 16MiB."
    )


# -- text ------------------------------------------------------------------------------------------------------------


def _size(nbytes: int) -> str:
    return f"{nbytes // _MIB}MiB" if nbytes % _MIB == 0 else str(nbytes)


def _comment(text: str) -> list[str]:
    """Format the lines of a comment, so that no text can become a setting."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return textwrap.wrap(
        " ".join(words),
        _LINE_CHARACTERS_MAX,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _toml(value: Any) -> str:
    """Format a value as TOML: JSON, except for one character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
