"""Metrics of checkpoints, such as a validation loss, and the rule that says which of several checkpoints is best.

rank 0's metrics of a step ─► SaveRecord ─► manifest ─► BestRule.key ─► retention, restore(best=…), ls, pull
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from holdfast.errors import ConfigError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId

# All of them fit into the seal of a slice, which has 16 KiB.
METRICS_MAX = 32
NAME_BYTES_MAX = 64
BestMode = Literal["min", "max"]
Metrics = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=NAME_BYTES_MAX)],
        Annotated[float, Field(allow_inf_nan=False)],
    ],
    Field(max_length=METRICS_MAX),
]


def is_metric_name(name: Any) -> bool:
    """Whether it is a text that may name a metric: printable, without blanks at its ends, and not too long."""
    if not isinstance(name, str) or not name.isprintable() or name != name.strip():
        return False
    return 0 < len(name.encode()) <= NAME_BYTES_MAX


class BestRule(BaseModel):
    """The lowest (`min`) or highest (`max`) value of a metric is best, of equal ones the older; caveats come last."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    metric: Annotated[str, Field(min_length=1, max_length=NAME_BYTES_MAX)]
    mode: BestMode

    def key(
        self, metrics: Mapping[str, float], order: CheckpointId, *, has_caveat: bool
    ) -> tuple[bool, float, CheckpointId]:
        """Sorts the best checkpoint first. `metrics` must have this one."""
        value = metrics[self.metric]
        return has_caveat, value if self.mode == "min" else -value, order

    def told(self) -> str:
        """For people: the metric, and which of its values is best."""
        return f"{self.metric} ({'lowest' if self.mode == 'min' else 'highest'})"


def rule_of(metric: str, mode: BestMode | None, recorded: Iterable[BestRule | None]) -> BestRule | None:
    """The rule for a metric: by `mode`, or as the first of `recorded` that names it says; None: neither says."""
    if mode is not None:
        return BestRule(metric=metric, mode=mode)
    return next((rule for rule in recorded if rule is not None and rule.metric == metric), None)


def no_best(where: str, metric: str, several: Iterable[Mapping[str, float]]) -> StoreMissing | ConfigError:
    """Why no checkpoint is best by a metric. `several`: the metrics of each good one. `where`: of which run."""
    names = sorted({name for metrics in several for name in metrics})
    if metric in names:
        return ConfigError(
            f"{where}: no checkpoint says whether the lowest or the highest {metric} is best; give the mode, min or max"
        )
    known = f"the metrics of this run are {', '.join(names)}" if names else "none has metrics"
    return StoreMissing(
        f"{where}: no good checkpoint has the metric {metric}; {known}. A checkpoint has those that the script "
        "gives to step() or save()"
    )
