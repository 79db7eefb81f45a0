"""The best checkpoint: by value, then by age; those with a caveat come last."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError, StoreMissing
from holdfast.image.best_rule import BestMode, BestRule, is_metric_name, no_best_error, rule_of
from holdfast.image.checkpoint_id import CheckpointId


@pytest.mark.parametrize(("mode", "expected"), [("min", [4, 2, 3, 1]), ("max", [1, 2, 3, 4])])
def test_key_sorts_by_value_and_equal_values_by_age(mode: BestMode, expected: list[int]) -> None:
    values = {1: 3.0, 2: 2.0, 3: 2.0, 4: -1.0}
    rule = BestRule(metric="loss", mode=mode)
    keys = {
        step: rule.key({"loss": value}, CheckpointId(1, step), has_caveat=False)
        for step, value in values.items()
    }
    assert sorted(values, key=keys.__getitem__) == expected


def test_key_puts_a_checkpoint_with_a_caveat_last() -> None:
    rule = BestRule(metric="loss", mode="min")
    doubtful = rule.key({"loss": 0.0}, CheckpointId(1, 1), has_caveat=True)
    assert doubtful > rule.key({"loss": 9.0}, CheckpointId(2, 2), has_caveat=False)


@pytest.mark.parametrize("name", ["loss", "val/loss", "mAP50-95(B)", "Verlust ä", "x" * 64])
def test_a_metric_name_may_be_any_printable_text(name: str) -> None:
    assert is_metric_name(name)


@pytest.mark.parametrize(
    "name", ["", " loss", "loss ", "a\nb", "\x1b[31m", "x" * 65, "ä" * 33, "\ud800", 5, None]
)
def test_a_metric_name_that_would_break_a_line_or_a_table_is_refused(name: object) -> None:
    assert not is_metric_name(name)


def test_rule_of_takes_the_given_mode_before_the_newest_recorded_one() -> None:
    recorded = [None, BestRule(metric="b", mode="max"), BestRule(metric="a", mode="max")]
    assert rule_of("a", "min", recorded) == BestRule(metric="a", mode="min")
    assert rule_of("a", None, recorded) == BestRule(metric="a", mode="max")
    assert rule_of("c", None, recorded) is None


def test_no_best_names_the_metrics_or_asks_for_the_mode() -> None:
    several = [{"loss": 1.0}, {"accuracy": 0.5, "loss": 2.0}]
    missing, modeless = no_best_error("/run", "los", several), no_best_error("/run", "loss", several)
    assert isinstance(missing, StoreMissing)
    assert "accuracy, loss" in str(missing)
    assert isinstance(modeless, ConfigError)
    assert "min or max" in str(modeless)
    assert "none has metrics" in str(no_best_error("/run", "loss", []))
