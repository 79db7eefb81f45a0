"""The state of an optimizer comes back in its saved dtypes, at any depth."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from tests.support.restoring import publish
from tests.unit.trainer_side.restore.test_restore import assert_same, bring_back
from trainer_side.restore.uncast import uncasting
from trainer_side.state.tree import collect

Pair = namedtuple("Pair", ["codes", "scale"])


class Packed(torch.optim.Optimizer):
    """Has codes, scales and masters of its parameters in containers of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def pack(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = packed(parameter)


def packed(parameter: torch.Tensor) -> dict[str, Any]:
    size = parameter.numel()
    master = torch.randn(parameter.shape) * 1.0001
    return {
        "step": torch.tensor(3.0),
        "master": master,
        "again": master,
        "moment": {
            "codes": torch.randint(-128, 128, (size,), dtype=torch.int8),
            "scales": [torch.rand(2), torch.rand(1, dtype=torch.float64)],
            "deep": OrderedDict(a=({"b": torch.randn(2, dtype=torch.complex64)}, 2.5)),
            "flag": torch.tensor(True),
            "step": torch.tensor(7),
            "kind": "blockwise",
        },
        "list": [torch.randn(()), torch.arange(2)],
        "kind": "int8",
        "none": None,
    }


def stepped(seed: int, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = Packed(model.parameters())
    optimizer.pack()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("has_stepped", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_nested_state_keeps_its_dtypes_and_bits(
    tmp_path: Path, dtype: torch.dtype, has_stepped: bool
) -> None:
    saved = stepped(1, dtype=dtype)
    expected = collect(saved)
    publish(tmp_path, 3, expected)
    fresh = stepped(2, dtype=dtype)
    if not has_stepped:
        fresh["optimizer"].state.clear()
    bring_back(fresh, tmp_path)
    assert_same(collect(fresh), expected)
    state = collect(fresh)["optimizer"]["state"][0]
    assert state["kind"] == "int8"
    assert state["moment"]["kind"] == "blockwise"
    assert type(state["moment"]["deep"]) is OrderedDict
    assert state["again"] is state["master"]


class Loop:
    """An object of the script that saves its optimizers itself."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.model, self._all = state["model"], {"main": [state["optimizer"]]}

    def state_dict(self) -> dict[str, Any]:
        optimizers = [one.state_dict() for one in self._all["main"]]
        return {"model": self.model.state_dict(), "optimizer_states": optimizers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        for one, state in zip(self._all["main"], saved["optimizer_states"], strict=True):
            one.load_state_dict(state)


def test_optimizers_below_an_object_of_the_script_keep_their_dtypes_too(tmp_path: Path) -> None:
    expected = {"loop": Loop(stepped(1)).state_dict()}
    publish(tmp_path, 3, expected)
    loop = Loop(stepped(2))
    bring_back({"loop": loop}, tmp_path)
    assert_same({"loop": loop.state_dict()}, expected)


def test_state_beside_that_of_parameters_stays_as_it_is(tmp_path: Path) -> None:
    saved, fresh = stepped(1), stepped(2)
    for state in (saved, fresh):
        state["optimizer"].state["global"] = {
            "seen": torch.rand(3),
            "codes": torch.arange(3, dtype=torch.int8),
        }
    expected = collect(saved)
    publish(tmp_path, 3, expected)
    bring_back(fresh, tmp_path)
    assert_same(collect(fresh), expected)


def test_a_named_tuple_is_loaded_although_torch_cannot_make_one() -> None:
    live = stepped(2)
    optimizer = live["optimizer"]
    saved = collect(stepped(1))["optimizer"]
    pair = Pair(torch.arange(3, dtype=torch.int8), [torch.rand(2)])
    saved["state"] = {0: {"pair": pair}}
    with pytest.raises(TypeError):
        optimizer.load_state_dict(saved)
    with uncasting([optimizer]):
        optimizer.load_state_dict(saved)
    found = optimizer.state_dict()["state"][0]["pair"]
    assert type(found) is Pair
    assert found.codes.dtype is torch.int8
    assert torch.equal(found.scale[0], pair.scale[0])
    assert saved["state"][0]["pair"] is pair


def test_keys_of_the_optimizers_own_loading_stay() -> None:
    class Adding(Packed):
        @override
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["seen"] = state.pop("flag", True)

    model = nn.Linear(2, 2).bfloat16()
    optimizer = Adding(model.parameters())
    optimizer.pack()
    saved = {**optimizer.state_dict()}
    with uncasting([optimizer]):
        optimizer.load_state_dict(saved)
    state = optimizer.state[model.weight]
    assert state["seen"] is True
    assert state["master"].dtype is torch.float32
    assert state["moment"]["scales"][1].dtype is torch.float64


def test_hooks_of_the_script_see_what_was_saved_and_ours_are_gone_afterwards() -> None:
    state = stepped(1)
    optimizer, seen = state["optimizer"], []
    optimizer.register_load_state_dict_post_hook(
        lambda one: seen.append(one.state[state["model"].weight]["master"].dtype)
    )
    hooks = len(optimizer._optimizer_load_state_dict_pre_hooks)
    with uncasting([optimizer]):
        optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32]
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == hooks
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_an_optimizer_that_casts_like_torch_in_a_loading_of_its_own_is_repaired(tmp_path: Path) -> None:
    class Own(Packed):
        @override
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            for parameter, number in zip(self.param_groups[0]["params"], (0, 1), strict=True):
                moments = state_dict["state"][number]
                self.state[parameter] = {**moments, "master": moments["master"].to(parameter.dtype)}

    saved = stepped(1)
    expected = collect(saved)
    publish(tmp_path, 3, expected)
    model = nn.Linear(4, 3).bfloat16()
    fresh = {"model": model, "optimizer": Own(model.parameters())}
    bring_back(fresh, tmp_path)
    assert_same(collect(fresh), expected)
