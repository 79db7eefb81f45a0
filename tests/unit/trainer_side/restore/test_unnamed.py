"""Parameters that no part of the state holds are named by the attributes that lead to them, or reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.restore.test_joining_by_name import Net, assert_own, mark, names_of
from tests.unit.trainer_side.restore.test_restore import bring_back

State = dict[str, Any]


class Agent:
    """It saves copies of its two models, which are of one kind, so that no memory says which parameter is where."""

    def __init__(self, seed: int) -> None:
        self.nets = {"actor": Net(seed), "critic": Net(seed + 1)}

    @property
    def names(self) -> dict[int, str]:
        return names_of(*self.nets.items())

    def parameters(self, *which: str) -> list[nn.Parameter]:
        return [parameter for name in which for parameter in self.nets[name].parameters()]

    def state_dict(self) -> State:
        return {
            name: {key: value.clone() for key, value in net.state_dict().items()}
            for name, net in self.nets.items()
        }

    def load_state_dict(self, saved: State) -> None:
        for name, net in self.nets.items():
            net.load_state_dict(saved[name])


def test_models_of_one_kind_in_an_object_that_saves_copies(tmp_path: Path) -> None:
    agent, fresh = Agent(0), Agent(2)
    optimizer = torch.optim.AdamW(agent.parameters("actor", "critic"))
    mark(optimizer, agent.names)
    publish_named(tmp_path, 3, {"agent": agent, "optimizer": optimizer})
    found = torch.optim.AdamW(fresh.parameters("critic", "actor"))
    bring_back({"agent": fresh, "optimizer": found}, tmp_path)
    assert_own(found, fresh.names)


def test_models_of_one_kind_that_changed_places_are_told_by_their_optimizers(tmp_path: Path) -> None:
    agent, fresh = Agent(0), Agent(2)
    both = {name: torch.optim.AdamW(agent.parameters(name)) for name in agent.nets}
    publish_named(tmp_path, 3, {"agent": agent, **both})
    both = {name: torch.optim.AdamW(fresh.parameters(name)) for name in agent.nets}
    before = fresh.nets["actor"].a.weight.clone()
    with pytest.raises(StateError, match=r"actor/a\.weight, got agent/nets/critic/a\.weight.*it in critic"):
        bring_back({"agent": fresh, "actor": both["critic"], "critic": both["actor"]}, tmp_path)
    assert torch.equal(fresh.nets["actor"].a.weight, before)
    # The names of the state themselves: the optimizer was made with the other one.
    models = {name: Net() for name in ("x", "y")}
    whole = {**models, "optimizer": torch.optim.AdamW(models["x"].parameters())}
    publish_named(tmp_path / "top", 3, whole)
    whole["x"], whole["y"] = whole["y"], whole["x"]
    with pytest.raises(StateError, match=r"optimizer: expected .*x/a\.weight, got y/a\.weight"):
        bring_back(whole, tmp_path / "top")


@pytest.mark.parametrize("sizes", [(2, 2, 3), (2, 3, 4)])
def test_parameters_without_a_name_or_a_shape_of_their_own_are_warned_of(
    tmp_path: Path, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> torch.optim.Optimizer:
        return torch.optim.AdamW([nn.Parameter(torch.zeros(size)) for size in sizes])

    publish_named(tmp_path, 3, {"optimizer": made()})
    bring_back({"optimizer": made()}, tmp_path)
    said = "optimizer: 2 parameters are loaded in the order in which they were saved"
    assert (said in caplog.text) == (len(set(sizes)) < len(sizes))
