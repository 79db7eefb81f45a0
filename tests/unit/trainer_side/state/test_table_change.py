"""A rank's message about its own change: the first changed tensor by name, before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import Split
from trainer_side.state.tensor_table import TensorTable, describe_change, table

_PART = torch.zeros(4, 2)
_STATE: dict[str, Any] = {
    "s": {"w": Split(_PART, (8, 2), (0, 0))},
    "t": {"a": torch.ones(3), "b": torch.ones(4)},
}


def _table(state: dict[str, Any]) -> TensorTable:
    return table(state, state, rank=0, ranks=2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"s": {"w": Split(_PART, (8, 2), (4, 0))}},
            "tensor s/w: float32 [8, 2], split, [0:4, 0:2] here before, float32 [8, 2], split, [4:8, 0:2] here now",
        ),
        (
            {"t": {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.int64)}},
            "tensor t/b: float32 [4], of rank 0 before, int64 [4], of rank 0 now",
        ),
        (
            {"t": {"a": torch.ones(5), "c": torch.ones(1)}},
            "tensor t/a: float32 [3], of rank 0 before, float32 [5], of rank 0 now; and 2 more",
        ),
        ({"t": {"a": torch.ones(3)}}, "tensor t/b (float32 [4], of rank 0) is gone"),
        ({"t": {"b": torch.ones(4), "a": torch.ones(3)}}, "its tensors come in another order"),
        ({}, "its tensors are as before, and its plan for them was given up; its log says why"),
    ],
    ids=["region", "dtype", "several", "gone", "order", "nothing"],
)
def test_the_first_change_is_named(changed: dict[str, Any], said: str) -> None:
    assert describe_change(_table(_STATE), _table(_STATE | changed)) == said


def test_another_value_of_each_rank_is_a_change() -> None:
    now = _table({**_STATE, "own": PerRank({"seed": 1})})
    assert "own" in describe_change(_table(_STATE), now)
