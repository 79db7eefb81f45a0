"""The tree, its paths, and who owns what."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from holdfast.errors import StateError
from holdfast.image.entries import REPLICATED
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import Ownership, classify, collect, tensor_paths

GATED = Ownership(REPLICATED, gated=True)
COPIED_AT_ONCE = Ownership(REPLICATED, gated=False)
OF_RANK_0 = Ownership(0, gated=False)


def _roles(state: dict[str, Any]) -> dict[str, Ownership]:
    tree = collect(state)
    owned = classify(state, tree)
    return {path: owned[tensor.untyped_storage()._cdata] for path, tensor in tensor_paths(tree)}


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_collect_asks_objects_and_keeps_values() -> None:
    model, optimizer = _trained()
    rng = PerRank(1)
    tensor = torch.zeros(2)
    tree = collect({"model": model, "optimizer": optimizer, "rng": rng, "x": tensor, "note": "n"})
    assert tree["rng"] is rng
    assert tree["x"] is tensor
    assert tree["note"] == "n"
    assert tree["model"]["0.weight"].data_ptr() == next(model.parameters()).data_ptr(), "live, not a copy"
    assert set(tree["optimizer"]) == {"state", "param_groups"}


def test_paths_are_in_the_order_of_pickle_and_show_ties() -> None:
    tensor = torch.zeros(2)
    tree = {
        "a": [1, tensor, {"é": (torch.zeros(1),)}],
        "b": OrderedDict({7: tensor}),
        "c": {"x/y": torch.zeros(0)},
    }
    assert [path for path, _ in tensor_paths(tree)] == ["a/1", "a/2/é/0", "b/7", "c/x/y"]
    assert (
        tensor_paths({"optimizer": collect({"o": _trained()[1]})["o"]})[1].path == "optimizer/state/0/exp_avg"
    )


def test_a_tree_that_contains_itself_is_walked_once() -> None:
    tree: dict[str, Any] = {"t": torch.zeros(1)}
    tree["self"] = tree
    assert [path for path, _ in tensor_paths(tree)] == ["t"]


def test_tensors_that_only_the_optimizer_changes_are_gated() -> None:
    model, optimizer = _trained()
    roles = _roles({"model": model, "optimizer": optimizer, "ema": torch.zeros(3)})
    assert roles["model/0.weight"] == roles["model/1.bias"] == GATED
    assert roles["optimizer/state/0/exp_avg"] == roles["optimizer/state/0/step"] == GATED
    assert roles["model/1.running_mean"] == roles["model/1.num_batches_tracked"] == OF_RANK_0
    assert roles["ema"] == OF_RANK_0


def test_parameters_that_no_optimizer_of_the_state_holds_are_copied_at_once() -> None:
    model, optimizer = _trained()
    assert _roles({"model": model})["model/0.weight"] == COPIED_AT_ONCE
    frozen = torch.nn.Linear(2, 2)
    roles = _roles({"model": model, "optimizer": optimizer, "teacher": frozen})
    assert roles["teacher/weight"] == COPIED_AT_ONCE
    assert roles["model/0.weight"] == GATED


def test_a_learning_rate_tensor_belongs_to_rank_0() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1))
    assert _roles({"o": optimizer})["o/param_groups/0/lr"] == OF_RANK_0


def test_a_wrapped_model_has_the_same_roles() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model, optimizer = _trained()
    roles = _roles({"model": Wrapper(model), "optimizer": optimizer})
    assert roles["model/module.0.weight"] == GATED
    assert roles["model/module.1.running_var"] == OF_RANK_0


def test_a_shared_storage_is_as_careful_as_its_most_careful_tensor() -> None:
    flat = torch.zeros(10)
    module = torch.nn.Module()
    first = torch.nn.Parameter(flat[:4])
    module.register_parameter("w", first)
    module.register_parameter("v", torch.nn.Parameter(flat[4:8]))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    assert _roles({"m": module, "o": optimizer})["m/w"] == GATED, "all agree"
    half = torch.optim.SGD([first], lr=1.0)
    assert _roles({"m": module, "o": half})["m/w"] == COPIED_AT_ONCE
    for state in (
        {"m": module, "o": optimizer, "window": flat[2:9]},
        {"window": flat[2:9], "m": module, "o": optimizer},
    ):
        assert set(_roles(state).values()) == {OF_RANK_0}


def test_a_buffer_that_is_a_parameters_memory_is_not_gated() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("alias", module.weight.detach())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    assert _roles({"m": module, "o": optimizer})["m/weight"] == OF_RANK_0


def test_a_storage_in_the_tree_is_refused() -> None:
    with pytest.raises(StateError, match=r"^a/0 is a bare storage"):
        tensor_paths({"a": [torch.zeros(1).untyped_storage()]})
