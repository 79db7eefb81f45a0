"""Metrics of checkpoints, such as a validation loss, and the rule that says which of several checkpoints is best.

rank 0's metrics of a step ─► SaveRecord ─► manifest ─► BestRule.key ─► retention, restore(best=…), ls, pull
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from holdfast.errors import ConfigError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId

# Metrics of these limits fit into the seal of a slice, which has 16 KiB.
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
    """Whether `name` may name a metric: a printable text, without blanks at its ends, and not too long."""
    if not isinstance(name, str) or not name.isprintable() or name != name.strip():
        return False
    return 0 < len(name.encode()) <= NAME_BYTES_MAX


class BestRule(BaseModel):
    """The lowest (`min`) or highest (`max`) value of a metric is best; ties go to the older; caveats come last."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    metric: Annotated[str, Field(min_length=1, max_length=NAME_BYTES_MAX)]
    mode: BestMode

    def key(
        self, metrics: Mapping[str, float], order: CheckpointId, *, has_caveat: bool
    ) -> tuple[bool, float, CheckpointId]:
        """Return a key that sorts the best checkpoint first. `metrics` must have the rule's metric."""
        value = metrics[self.metric]
        return has_caveat, value if self.mode == "min" else -value, order

    def describe(self) -> str:
        """Describe the rule for people: the metric, and which of its values is best."""
        return f"{self.metric} ({'lowest' if self.mode == 'min' else 'highest'})"


def rule_of(metric: str, mode: BestMode | None, recorded: Iterable[BestRule | None]) -> BestRule | None:
    """Return the rule for a metric: by `mode`, else the first of `recorded` for this metric; None without either."""
    if mode is not None:
        return BestRule(metric=metric, mode=mode)
    return next((rule for rule in recorded if rule is not None and rule.metric == metric), None)


def no_best_error(
    where: str, metric: str, several: Iterable[Mapping[str, float]]
) -> StoreMissing | ConfigError:
    """Return why no checkpoint is best by a metric. `several`: Metrics of each good checkpoint. `where`: The run."""
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
