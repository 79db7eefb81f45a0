"""The diary of a drill has numbers on a module that change; a job outside of a drill writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from holdfast.supervised import DIARY_VARIABLE
from trainer_side.state.drill_notes import CounterNotes


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.calls, self.is_on, self.name = 0, True, "a"


def test_numbers_that_change_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "diary.jsonl"
    monkeypatch.setenv(DIARY_VARIABLE, str(path))
    model = Counting()
    counters = CounterNotes({"model": model, "epoch": 3}, rank=0)
    for step in range(2):
        model.calls += 1
        counters.note(step)
    first, second = [json.loads(line)["counters"] for line in path.read_text().splitlines()]
    features = {"model/inner.in_features": 2, "model/inner.out_features": 3}
    assert first == {"step": 0, "begins": True, "values": {"model/calls": 1, **features}}
    assert second == {"step": 1, "begins": False, "values": {"model/calls": 2}}


def test_outside_of_a_drill_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DIARY_VARIABLE, raising=False)
    CounterNotes({"model": Counting()}, rank=0).note(0)
    assert list(tmp_path.iterdir()) == []
