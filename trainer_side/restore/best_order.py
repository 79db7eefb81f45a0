"""The order in which `restore(best=…)` tries the checkpoints of the store: the best by a metric first. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.errors import ConfigError
from holdfast.image.best_rule import BestMode, BestRule, is_metric_name, no_best, rule_of
from holdfast.image.checkpoint_id import CheckpointId
from trainer_side.restore.choice import Candidate, Passed, StoreCandidate
from trainer_side.whole_number import shown


class WantedBest(NamedTuple):
    """The metric by which the best checkpoint is wanted. `mode`: None: as the newest manifest that names it says."""

    metric: str
    mode: BestMode | None = None


def wanted_best(best: Any, mode: Any, step: Any) -> WantedBest | None:
    """The arguments of `restore()`; None: the best is not asked for.

    Raises:
        ConfigError: They are wrong, or do not go together.
    """
    if mode not in (None, "min", "max"):
        raise ConfigError(f'restore(): mode: expected "min" or "max", got {shown(mode)}')
    if best is None:
        if mode is not None:
            raise ConfigError(f'restore(): mode="{mode}" is for a metric; give best="NAME" with it')
        return None
    if not is_metric_name(best):
        raise ConfigError(
            f'restore(): best: expected the name of a metric, such as "val_loss", got {shown(best)}'
        )
    if step is not None:
        raise ConfigError("restore(): step and best name a checkpoint each; give one of them")
    return WantedBest(best, mode)


def best_first(
    listed: Sequence[Candidate | Passed], stored: Sequence[StoreCandidate], wanted: WantedBest, where: str
) -> Sequence[Candidate | Passed]:
    """The items of `listed` that have the metric, the best first. One checkpoint's places stay in their order.

    `listed`: All checkpoints, newest first. `stored`: The store's manifests, summed up. Slices of which it has no
    manifest have no metric.

    Raises:
        StoreMissing: No good checkpoint has the metric.
        ConfigError: Nobody says which of its values is best.
    """
    metrics = {CheckpointId(one.attempt, one.step): one.metrics for one in stored if one.metrics}
    recorded = [_rule(one) for one in stored]
    rule = rule_of(wanted.metric, wanted.mode, recorded)
    usable = [one for one in listed if isinstance(one, Candidate) and one.checkpoint in metrics]
    if rule is None or all(rule.metric not in metrics[one.checkpoint] for one in usable):
        raise no_best(where, wanted.metric, [metrics[one.checkpoint] for one in usable])
    found = [
        (rule.key(said, order, has_caveat=isinstance(one, Candidate) and bool(one.drift)), number)
        for number, one in enumerate(listed)
        if rule.metric in (said := metrics.get(order := CheckpointId(one.attempt, one.step), {}))
    ]
    return [listed[number] for _, number in sorted(found)]


def _rule(one: StoreCandidate) -> BestRule | None:
    return (
        BestRule.model_validate({"metric": one.best_metric, "mode": one.best_mode})
        if one.best_metric
        else None
    )
