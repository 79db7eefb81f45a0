"""Measured costs of each way to checkpoint, from a JSON file or from the figures of this tree's benchmarks.

The figures are data. The code only knows how each way works: how many checkpoints it has in flight, whether a node
keeps staged checkpoints, whether it acts on a notice. docs/simulate.md shows such a file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from holdfast.errors import ConfigError
from operator_side.simulate.strategy import IDEAL, Strategy, microseconds

# Next to the source; an installed wheel has no figures.
MEASURED = Path(__file__).resolve().parents[2] / "docs/figures/data"
_SECONDS_MAX = 1e6
_CHECK_SECONDS = 0.01  # longer than the check whether a training's last checkpoint is durable
_Seconds = Annotated[float, Field(ge=0, le=_SECONDS_MAX, allow_inf_nan=False)]
_Positive = Annotated[float, Field(ge=1e-6, le=_SECONDS_MAX, allow_inf_nan=False)]

# How each way works (docs/performance.md, "The peers"), under the name in the measurements.
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "torch.save+fsync": {},
    "dcp-thread": {},
    "checkfreq": {},
    "pccheck-like": {"in_flight_max": 2},
    "mlc-base": {"stager": True},
    "holdfast": {"stager": True, "notice": True},
}


class MeasuredCosts(BaseModel):
    """Measured costs of one way to checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stall_seconds: _Seconds
    staged_seconds: _Seconds | None = None  # from `save()` until the stager has it; None without a stager
    durable_seconds: _Seconds  # from `save()` until it is in the store
    restore_seconds: _Seconds  # from the store
    restore_staged_seconds: _Seconds | None = None  # from the stager's node; None: as from the store
    in_flight_max: Annotated[int, Field(ge=1, le=64)] = 1
    stager: bool = False  # a node outside the training machines keeps staged checkpoints
    notice: bool = False  # a preemption notice leads to a checkpoint

    @model_validator(mode="after")
    def _levels(self) -> MeasuredCosts:
        if self.stager and self.staged_seconds is None:
            raise ValueError("with a stager, staged_seconds")
        if self.staged_seconds is not None and self.staged_seconds > self.durable_seconds:
            raise ValueError("staged_seconds of at most durable_seconds")
        return self

    def strategy(self, name: str) -> Strategy:
        safe, near = self.durable_seconds, self.restore_seconds
        if self.stager:
            safe = self.durable_seconds if self.staged_seconds is None else self.staged_seconds
            near = near if self.restore_staged_seconds is None else self.restore_staged_seconds
        return Strategy(
            name,
            stall_us=microseconds(self.stall_seconds),
            safe_us=microseconds(safe),
            durable_us=microseconds(self.durable_seconds),
            restore_near_us=microseconds(near),
            restore_store_us=microseconds(self.restore_seconds),
            in_flight_max=self.in_flight_max,
            stager=self.stager,
        )


class TrainingProfile(BaseModel):
    """A training job, and the ways to checkpoint it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, Field(min_length=1, max_length=4096)]  # of the figures; shown with every result
    iteration_seconds: _Positive  # time of one iteration on all machines, without a checkpoint
    restart_seconds: _Seconds  # from a loss until the processes run again, before they restore
    strategies: Annotated[dict[str, MeasuredCosts], Field(min_length=1, max_length=64)]

    def lanes(self, leads_seconds: Sequence[float]) -> list[Strategy]:
        """Return all strategies, the ideal last. A strategy that uses notices appears once for each lead time."""
        found = []
        for name, measured in self.strategies.items():
            leads = leads_seconds if measured.notice else (0.0,)
            found += [measured.strategy(name).with_lead(microseconds(lead)) for lead in leads]
        return [*found, IDEAL]


def load_profile(path: Path) -> TrainingProfile:
    """Read a profile from its file or from `holdfast simulate --json`. Raises `ConfigError`: names each wrong value."""
    document = _json(path)
    if isinstance(document, dict) and isinstance(document.get("profile"), dict):
        document = document["profile"]
    try:
        return TrainingProfile.model_validate(document)
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, detail['loc'])) or 'the whole'}: expected "
            f"{detail['msg'].removeprefix('Value error, ')}, got {str(detail['input'])[:80]}"
            for detail in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from None


def measured_profile(folder: Path = MEASURED) -> TrainingProfile:
    """Return the medians of `make bench BENCH=makespan` that `make figures` left in the tree. `torch.load` stands for
    the restore of every way but holdfast. Restores from the stager's node were not measured: they take as long as from
    the store. Raises `ConfigError`: figures are missing; the message asks for `--profile`.
    """
    try:
        run = _json(folder / "makespan.json")
        strategies = {
            name: MeasuredCosts(
                stall_seconds=_stall_seconds(run, name),
                staged_seconds=_median(run, name, "staged_seconds") if "stager" in way else None,
                durable_seconds=_durable_seconds(run, name, way.get("in_flight_max", 1)),
                restore_seconds=statistics.median(
                    of["holdfast" if name == "holdfast" else "torch.load"] for of in run["restores"]
                ),
                **way,
            )
            for name, way in _WAYS.items()
        }
        machine = run["machine"]
        return TrainingProfile(
            source=f"docs/figures/data: {run['command']}; {machine['cores']} cores of {machine['processor']}, "
            f"{run['image_bytes'] / 1e9:.2f} GB of state",
            iteration_seconds=run["iteration_seconds"],
            restart_seconds=run["start_seconds"],
            strategies=strategies,
        )
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"no measured figures in {folder} ({error}): expected those of `make bench` and `make figures`, or a file "
            "with your own: --profile FILE; docs/simulate.md shows one"
        ) from error


def _median(run: Mapping[str, Any], peer: str, figure: str) -> float:
    values: list[float] = [of[figure] for of in run["saves"] if of["peer"] == peer and figure in of]
    if not values:
        raise KeyError(f"no {figure} of {peer}")
    return statistics.median(values)


def _stall_seconds(run: Mapping[str, Any], peer: str) -> float:
    """Return the time that training loses to one checkpoint, alone or in the run with the longest interval.

    The shorter one counts. A lone checkpoint comes after those of all other peers, so it starts with cold CPU caches.
    In the run with the longest interval no checkpoint waits for the one before.
    """
    alone = _median(run, peer, "stall_seconds")
    plain = [of["makespan_seconds"] / of["iterations"] for of in run.get("runs", ()) if of["peer"] == "none"]
    runs = [of for of in run.get("runs", ()) if of["peer"] == peer and of["saves"]]
    if not plain or not runs:
        return alone
    longest = max(of["every"] for of in runs)
    lost: list[float] = [
        (of["makespan_seconds"] - of["iterations"] * statistics.median(plain)) / of["saves"]
        for of in runs
        if of["every"] == longest
    ]
    return min(alone, max(0.0, statistics.median(lost)))


def _durable_seconds(run: Mapping[str, Any], peer: str, in_flight_max: int) -> float:
    """Return the time from `save()` to durable, of a lone checkpoint or of those with the shortest interval.

    The longer one counts. If the last checkpoint outlasts a training, each of the times counted here is the time
    between two durable checkpoints, with `in_flight_max` in flight.
    """
    alone = _median(run, peer, "done_seconds")
    runs = [of for of in run.get("runs", ()) if of["peer"] == peer]
    closest = min((of["every"] for of in runs), default=0)
    apart = [
        (of["durable_seconds"] - run["iteration_seconds"] - alone) / (of["saves"] - 1)
        for of in runs
        if of["every"] == closest
        and of["saves"] > 1
        and of["durable_seconds"] > of["makespan_seconds"] + _CHECK_SECONDS
    ]
    return max(alone, in_flight_max * statistics.median(apart)) if apart else alone


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; expected a JSON document") from error
