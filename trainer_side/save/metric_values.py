"""The metrics that a script gives to `step()` and `save()`: checked on every rank, read where rank 0 begins a save."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.image.best_rule import METRICS_MAX, NAME_BYTES_MAX, is_metric_name
from trainer_side.whole_number import describe_value

_log = logging.getLogger("holdfast.trainer")


class StepMetrics:
    """The metrics of this rank, and whether those of the last step went into a checkpoint. Training thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._unsaved_step = -1
        self._warned = False

    def check_step(self, metrics: Any, step: int) -> None:
        """Note the metrics of `step()`; warn once if earlier ones are lost. Raises `ConfigError` as `check_metrics`."""
        if self._unsaved_step not in (-1, step) and not self._warned and self._rank == 0:
            self._warned = True
            _log.warning(
                "the metrics of step %d are lost: no save of it was begun. Where step() returns False for an evaluated "
                "step, call save(step, metrics=…); said once",
                self._unsaved_step,
            )
        self._unsaved_step = -1
        if metrics is not None:
            check_metrics(metrics, "step()")
            self._unsaved_step = step if metrics else -1

    def values_for_save(self, metrics: Any, step: int) -> dict[str, float] | None:
        """Return the values to save with `step`; None except on rank 0. Raises `ConfigError` as `check_metrics`."""
        check_metrics(metrics, "save()")
        return metric_values(metrics, step) if self._rank == 0 else None

    def mark_saved(self) -> None:
        """Note that a save of the last step has begun, with its metrics."""
        self._unsaved_step = -1


def check_metrics(metrics: Any, call: str) -> None:
    """Check that `call` was given names and real numbers; else ConfigError. Waits for no device."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{call}: metrics: expected a mapping of names to numbers, got {describe_value(metrics)}"
        )
    if len(metrics) > METRICS_MAX:
        raise ConfigError(f"{call}: metrics: expected at most {METRICS_MAX} metrics, got {len(metrics)}")
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise ConfigError(
                f"{call}: metrics: expected names of printable text without blanks at the ends, of at most "
                f"{NAME_BYTES_MAX} bytes in UTF-8, got {describe_value(name)}"
            )
        if not _is_real(value):
            raise ConfigError(
                f"{call}: metrics[{name!r}]: expected a real number (a Python or NumPy number, or a tensor of one "
                f"element that is no DTensor), got {describe_value(value)}; give one number for the whole job, such as "
                "the mean"
            )


def metric_values(metrics: Mapping[str, Any], step: int) -> dict[str, float]:
    """Return the values as floats; warn of non-finite ones and leave them out. Waits for tensors on a device."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found = float(value.item() if hasattr(value, "item") else value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            values[name] = found
        else:
            _log.warning(
                "step %d: the metric %s is not finite (%s), so the checkpoint is saved without it",
                step,
                name,
                found,
            )
    return values


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A DTensor would take part in a collective operation, on rank 0 alone.
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return is_plain and value.numel() == 1 and not value.dtype.is_complex and value.dtype != torch.bool
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # an array of NumPy, or a scalar
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool)
