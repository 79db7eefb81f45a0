"""Whether the state is still that of the last finished step, by kind of change, and what a save then takes."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import pytest
import torch

from trainer_side.save.finished_step import _SLOW_STEPS, FinishedStep
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState


class Counter:
    """A sampler, as a script may have one."""

    def __init__(self) -> None:
        self.places = [0]
        self.average = torch.zeros(3)
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"places": self.places, "average": self.average, "fresh": self.average.clone()}

    def load_state_dict(self, _: dict[str, Any]) -> None: ...


class Scene:
    def __init__(self) -> None:
        self.updates = 0
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.counter, self.note, self.ema = Counter(), OrderedDict(epoch=[3]), torch.zeros(2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.counter,
            "rng": PerRank(RngState()),
            "note": self.note,
            "ema": self.ema,
        }
        self.finished = FinishedStep(self.state, lambda: self.updates)


@pytest.fixture
def scene() -> Scene:
    found = Scene()
    found.finished.note(4)
    return found


def test_small_values_are_saved_as_they_were_and_the_scripts_own_stay(scene: Scene) -> None:
    before = torch.get_rng_state()
    scene.counter.places[0] = 9
    scene.note["epoch"].append(4)
    torch.rand(1)
    assert scene.finished.step == 4
    assert scene.finished.stale_reason() == ""
    scene.finished.restore_values()
    assert scene.state["data"].state_dict()["places"] == [0]
    assert scene.state["note"] == OrderedDict(epoch=[3])
    assert type(scene.state["note"]) is OrderedDict
    assert torch.equal(scene.state["rng"].snapshot()["torch"], before)
    assert (scene.counter.places, scene.note["epoch"]) == ([9], [3, 4])
    assert scene.state["model"] is scene.model


def test_each_change_of_a_tensor_is_a_reason(scene: Scene) -> None:
    def forward() -> None:
        scene.model(torch.ones(4, 2))

    def update() -> None:
        with torch.no_grad():
            scene.model[0].weight.add_(1)  # type: ignore[operator]

    def replace() -> None:
        scene.model[0].bias = torch.nn.Parameter(torch.zeros(2))

    def begin() -> None:
        scene.updates += 1

    for change, said in (
        (forward, "model/1.num_batches_tracked was changed after step 4"),
        (update, "model/0.weight was changed after step 4"),
        (lambda: scene.ema.add_(1), "ema was changed after step 4"),
        (lambda: scene.counter.average.add_(1), "data/average was changed after step 4"),
        (begin, "an update of step 5 had begun"),
        (replace, "tensors of the state were replaced after step 4"),
    ):
        scene.finished.note(4)
        assert scene.finished.stale_reason() == ""
        change()
        assert scene.finished.stale_reason() == said


def test_a_forward_pass_that_changes_no_buffer_is_none(scene: Scene) -> None:
    scene.model.eval()
    scene.model(torch.ones(4, 2)).sum().backward()
    assert scene.finished.stale_reason() == ""


def test_without_a_step_and_with_values_that_cannot_be_noted_it_is_said(scene: Scene) -> None:
    assert FinishedStep(scene.state, lambda: 0).stale_reason() == "no step was finished"
    scene.counter.seconds = 0.006
    for step in range(5, 6 + _SLOW_STEPS):
        scene.finished.note(step)
    assert (
        scene.finished.stale_reason() == "data of that step is unknown: its state_dict() takes more than 5 ms"
    )

    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("gone")

    broken = FinishedStep({"data": Broken()}, lambda: 0)
    broken.note(1)
    assert broken.stale_reason() == "data of that step is unknown: its state_dict() raised RuntimeError: gone"
