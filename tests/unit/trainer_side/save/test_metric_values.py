"""Metrics of a script: numbers of any library, checked on every rank and read on rank 0."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import ConfigError
from trainer_side.save.metric_values import StepMetrics, check_metrics, metric_values


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        np.float32(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        torch.tensor([[0.5]]),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.tensor(0.5)),
        Fraction(1, 2),
    ],
)
def test_metric_values_takes_real_numbers_of_any_library(value: Any) -> None:
    check_metrics({"loss": value}, "save()")
    assert metric_values({"loss": value}, 1) == {"loss": 0.5}


@pytest.mark.parametrize(
    "metrics",
    [
        5,
        [("loss", 0.5)],
        {"": 0.5},
        {"a\nb": 0.5},
        {1: 0.5},
        {"loss": "0.5"},
        {"loss": None},
        {"loss": True},
        {"loss": 1j},
        {"loss": torch.ones(2)},
        {"loss": torch.tensor(True)},
        {"loss": torch.tensor(1j)},
        {"loss": np.ones(2)},
        {"loss": np.bool_(True)},
        {"loss": Decimal("0.5")},
        {str(name): 0.5 for name in range(33)},
    ],
)
def test_check_metrics_refuses_what_is_no_metric(metrics: Any) -> None:
    with pytest.raises(ConfigError, match=r"step\(\): metrics"):
        check_metrics(metrics, "step()")


def test_values_that_are_not_finite_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    given = {"loss": torch.tensor(float("nan")), "high": float("inf"), "huge": 10**400, "fine": 1}
    check_metrics(given, "save()")
    assert metric_values(given, 7) == {"fine": 1.0}
    assert caplog.text.count("step 7: the metric") == 3


def test_other_ranks_read_no_value() -> None:
    assert StepMetrics(0).values_for_save({"loss": 0.5}, 1) == {"loss": 0.5}
    assert StepMetrics(1).values_for_save({"loss": torch.empty((), device="meta")}, 1) is None


def test_lost_metrics_are_said_once_and_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    first, other = StepMetrics(0), StepMetrics(1)
    for given in (first, other):
        for step in range(4):
            given.check_step({"loss": 0.5}, step)
            if step == 0:
                given.mark_saved()
    assert caplog.text.count("the metrics of step 1 are lost") == 1
    assert caplog.text.count("are lost") == 1
