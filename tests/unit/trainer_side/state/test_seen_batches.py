"""The diary of a drill has the model's batches step by step; a job outside of a drill writes nothing."""

from __future__ import annotations

import copy
import json
import pickle
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.supervised import DIARY_VARIABLE
from trainer_side.state.drill_notes import BatchNotes
from trainer_side.state.per_rank import PerRank


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    path = tmp_path / "diary.jsonl"
    monkeypatch.setenv(DIARY_VARIABLE, str(path))
    return lambda: (
        [json.loads(line)["batches"] for line in path.read_text().splitlines()] if path.exists() else []
    )


def test_equal_batches_are_told_from_others(diary: Callable[[], list[dict[str, Any]]]) -> None:
    model = Named()
    seen = BatchNotes({"model": model, "epoch": 3})
    one, other = torch.ones(1, 2), torch.zeros(1, 2)
    batches: list[list[Callable[[], Any]]] = [
        [lambda: model(one)],
        [lambda: model(one)],
        [lambda: model(other)],
        [lambda: model(one), lambda: model(other)],  # gradients are accumulated
        [lambda: model(one, labels=[UserDict(y=other.bool())])],
        [lambda: model(one, labels=[UserDict(y=one.bool())])],
    ]
    for step, calls in enumerate(batches):
        for call in calls:
            call()
        seen.note(step)
    found = diary()
    assert [line["step"] for line in found] == [*range(6)]
    crcs = [line["crcs"] for line in found]
    assert crcs[0] == crcs[1]
    assert crcs[3] == [*crcs[0], *crcs[2]]
    assert len({crc for one in crcs for crc in one}) == 4


def test_a_step_of_many_calls_has_a_line_that_is_bounded(diary: Callable[[], list[dict[str, Any]]]) -> None:
    model = Named()
    seen = BatchNotes({"model": model})
    for step, last in enumerate((1.0, 1.0, 2.0)):
        for number in range(1000):
            model(torch.full((1, 2), last if number == 900 else 0.0))
        seen.note(step)
    first, second, third = [line["crcs"] for line in diary()]
    assert first == second
    assert len(first) == 256
    assert first[:-1] == third[:-1]
    assert first[-1] != third[-1]


def test_evaluation_is_no_training(diary: Callable[[], list[dict[str, Any]]]) -> None:
    model = Named()
    seen = BatchNotes({"model": PerRank(model)})
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.eval()(torch.ones(1, 2))
    seen.note(0)
    assert diary() == []
    model.train()(torch.ones(1, 2))
    seen.note(1)
    assert [line["step"] for line in diary()] == [1]


def test_the_module_is_copied_pickled_and_called_with_anything_as_ever(
    diary: Callable[[], list[dict[str, Any]]],
) -> None:
    model = Named()
    seen = BatchNotes({"model": model})
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert copied.state_dict().keys() == model.state_dict().keys()
    model(torch.ones(1, 2), odd=torch.eye(2).to_sparse(), none=None, number=3)
    seen.note(0)
    assert len(diary()) == 1


def test_outside_of_a_drill_nothing_is_hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DIARY_VARIABLE, raising=False)
    model = Named()
    seen = BatchNotes({"model": model})
    assert not model._forward_pre_hooks
    seen.note(0)
    assert list(tmp_path.iterdir()) == []
