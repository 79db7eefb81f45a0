"""A rank reads its stage from a file, with the moments of its own parameters."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from trainer_side.restore.narrowing import StageNames, narrow, needs_all_names
from trainer_side.state.optimizer_places import first_names, keyed_by_name, parameter_names
from trainer_side.state.position_names import Positions, positions
from trainer_side.state.tree import collect

State = dict[str, Any]
WIDTHS = (3, 4, 5)


def job(*layers: int, backwards: bool = False, groups: int = 1) -> State:
    """Layer n has n in all moments."""
    net = nn.ModuleDict({str(layer): nn.Linear(WIDTHS[layer], 2) for layer in layers})
    parameters = [*net.parameters()]
    parameters = parameters[::-1] if backwards else parameters
    optimizer = torch.optim.AdamW([{"params": parameters[number::groups]} for number in range(groups)])
    for name, parameter in net.named_parameters():
        moment = torch.full_like(parameter, float(name[0]))
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment}
    return {"net": net, "optimizer": optimizer}


def saved(state: State, *, named: bool) -> State:
    names = first_names(parameter_names(state))
    return keyed_by_name(collect(state), names, names) if named else collect(state)


def narrowed(tree: State, states: list[State], rank: int, names: Positions = MappingProxyType({})) -> State:
    ranks = [StageNames.of(one, collect(one)) for one in states]
    assert any(needs_all_names(names, one, tree) for names, one in zip(ranks, states, strict=True))
    narrow(states[rank], tree, ranks, rank, names)
    return tree


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("named", [True, False])
def test_each_rank_gets_its_layers_and_their_moments(named: bool, groups: int) -> None:
    states = [job(0, groups=groups), job(1, 2, groups=groups)]
    for rank, state in enumerate(states):
        tree = narrowed(saved(job(0, 1, 2, groups=groups), named=named), states, rank)
        assert tree["net"].keys() == collect(state)["net"].keys()
        expected = collect(state)["optimizer"]
        assert tree["optimizer"]["state"].keys() == expected["state"].keys()
        for number, moments in expected["state"].items():
            assert torch.equal(tree["optimizer"]["state"][number]["exp_avg"], moments["exp_avg"]), number
        for there, here in zip(tree["optimizer"]["param_groups"], expected["param_groups"], strict=True):
            assert there["params"] == here["params"]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_file_with_numbers_in_another_order_than_the_models_is_taken_by_its_names(groups: int) -> None:
    whole = job(0, 1, 2, backwards=True, groups=groups)
    names = positions(whole, collect(whole), {"optimizer": whole["optimizer"]})
    parts = [job(0, groups=groups), job(1, 2, groups=groups)]
    for state, own in zip(parts, (slice(4, 6), slice(0, 4)), strict=True):
        for number, group in enumerate(state["optimizer"].param_groups):
            ends = [name for name, _ in whole["net"].named_parameters()][::-1][own][number::groups]
            named = dict(state["net"].named_parameters())
            group["params"] = [named[name] for name in sorted(ends)]
    for rank, state in enumerate(parts):
        tree = narrowed(collect(whole), parts, rank, names)
        expected = collect(state)["optimizer"]
        for number, moments in expected["state"].items():
            assert torch.equal(tree["optimizer"]["state"][number]["exp_avg"], moments["exp_avg"]), number


def test_a_file_of_stages_comes_back_whole() -> None:
    state = job(0, 1, 2)
    tree = narrowed(saved(job(0, 1, 2), named=True), [state], 0)
    state["optimizer"].load_state_dict(tree["optimizer"])
    assert tree["net"].keys() == collect(state)["net"].keys()


@pytest.mark.parametrize(
    ("tree", "states", "said"),
    [
        (saved(job(0, 1, 2, backwards=True), named=False), [job(0), job(1, 2)], "were in another order"),
        (saved(job(0, 1, 2), named=False), [job(0), job(1, 2, backwards=True)], "which is which"),
        (saved(job(0, 1), named=True), [job(0), job(1, 2)], "none of that name"),
        (saved(job(0, 1, 2), named=True), [job(0), job(1)], "which no rank has"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused_by_name(tree: State, states: list[State], said: str) -> None:
    with pytest.raises(StateError, match=said):
        narrowed(tree, states, 0)


def test_a_name_that_no_rank_takes_stays_and_is_refused_by_the_module() -> None:
    tree = narrowed(saved(job(0, 1, 2), named=False), [job(0), job(0)], 0)
    assert len(tree["net"]) == 6
