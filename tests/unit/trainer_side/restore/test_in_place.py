"""Plain containers of the state get their saved content; failures are named, also those of another object."""

from __future__ import annotations

import logging
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.restoring import publish
from tests.unit.trainer_side.restore.test_restore import bring_back
from trainer_side.restore.loading import refill


def test_containers_of_the_script_get_what_was_saved_inside_themselves(tmp_path: Path) -> None:
    publish(
        tmp_path, 3, {"losses": [3.0, 2.0], "best": {"step": 2, "by": {"rank": [1]}}, "seen": Counter(a=2)}
    )
    losses: list[float] = []
    best: dict[str, Any] = {"step": 0, "by": {"rank": []}, "old": True}
    inner, seen = best["by"], Counter(b=1)
    bring_back({"losses": losses, "best": best, "seen": seen}, tmp_path)
    assert losses == [3.0, 2.0]
    assert best == {"step": 2, "by": {"rank": [1]}}
    assert best["by"] is inner
    assert seen == Counter(a=2)


def test_a_tensor_in_a_container_is_filled_where_it_lies() -> None:
    weight = torch.zeros(3)
    shadow: dict[str, Any] = {"weight": weight, "other": torch.zeros(2)}
    assert refill(shadow, {"weight": torch.ones(3), "other": torch.ones(4)})
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert shadow["weight"] is weight
    assert shadow["other"].tolist() == [1.0] * 4


def test_an_expanded_tensor_in_a_container_is_replaced_since_torch_copies_nothing_into_it() -> None:
    mask: dict[str, Any] = {"mask": torch.zeros(4, 1).expand(4, 7)}
    assert refill(mask, {"mask": torch.arange(4.0).view(4, 1).expand(4, 7)})
    assert mask["mask"].tolist() == [[float(row)] * 7 for row in range(4)]


@pytest.mark.parametrize(
    ("live", "saved"), [([1], {"a": 1}), ({"a": 1}, [1]), (1, 2), ((1,), (2,)), ("a", "b"), ([1], (1,))]
)
def test_a_container_of_another_kind_stays_as_it_is(live: Any, saved: Any) -> None:
    before = repr(live)
    assert not refill(live, saved)
    assert repr(live) == before


def test_a_queue_keeps_its_bound() -> None:
    live: deque[int] = deque([1], maxlen=2)
    assert refill(live, deque([7, 8, 9]))
    assert list(live) == [8, 9]


def test_a_number_that_cannot_come_back_is_named_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 3, {"epoch": 7, "run": "tea"})
    with caplog.at_level(logging.WARNING):
        restored = bring_back({"epoch": 0, "run": "tea"}, tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if "plain values" in record.getMessage()]
    assert "epoch is 0, the checkpoint has 7" in said
    assert "run" not in said.partition("epoch")[2]
    assert restored.values == {"epoch": 7, "run": "tea"}


def test_a_resume_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path, 39, {"losses": [1.0]})
    with caplog.at_level(logging.WARNING):
        bring_back({"losses": []}, tmp_path)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("resumed from step 39, attempt 1, in ")
