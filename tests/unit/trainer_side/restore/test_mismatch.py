"""A mismatch is refused for all objects of the state before a byte of any of them is read."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from tests.support.restoring import CountingStore, Ranks, publish
from tests.unit.trainer_side.restore.test_restore import blobs_of, bring_back
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.mismatch import find_read_only
from trainer_side.restore.restore import restore
from trainer_side.state.per_rank import PerRank


class Untouched:
    """An object and a tensor of the state that a refused restore must not touch."""

    def __init__(self) -> None:
        self.calls = 0
        self.weight = torch.full((9000,), 5.0)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, _: Any) -> None:
        self.calls += 1


def refused(tmp_path: Path, saved: Any, value: Any, *, match: str, ranks: int = 1) -> None:
    """Check that restore refuses on each rank, without loading the objects that fit."""
    first = {"object": {"weight": torch.zeros(9000)}, "tensor": torch.zeros(9000), "list": [1]}
    manifest = publish(tmp_path, 1, {**first, "x": saved})
    states = [
        {"object": Untouched(), "tensor": torch.ones(9000), "list": [2], "x": value} for _ in range(ranks)
    ]
    stores = [CountingStore(tmp_path) for _ in range(ranks)]
    _, errors = Ranks(ranks).outcomes(
        lambda peers: restore(states[peers.rank], stores[peers.rank], peers, events=None)
    )
    for state, store, error in zip(states, stores, errors, strict=True):
        assert isinstance(error, StateError)
        assert re.search(f"(?s){match}.*nothing was loaded", str(error)), error
        assert state["object"].calls == 0
        assert state["object"].weight.eq(5).all()
        assert state["tensor"].eq(1).all()
        assert state["list"] == [2]
        assert store.bytes_read < manifest.image_bytes / 2


def groups(*sizes: int, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    listed = [{"params": [nn.Parameter(torch.zeros(2)) for _ in range(size)]} for size in sizes]
    optimizer = kind(listed, lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def test_names_of_a_module(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3))
    refused(
        tmp_path,
        saved.state_dict(),
        model,
        match=r"x: the model has 5 tensors, the checkpoint 3; only the model has 1.bias, 2.weight, 2.bias; only the "
        r"checkpoint has 0.bias;",
        ranks=2,
    )


def test_names_of_a_module_with_layers_that_torch_adapts(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    refused(tmp_path, saved.state_dict(), model, match=r"only the model has 2.weight, 2.bias; .* has 1.bias;")


def test_shapes_of_a_module(tmp_path: Path) -> None:
    refused(
        tmp_path,
        nn.Linear(3, 3).state_dict(),
        nn.Linear(3, 4),
        match=r"x/weight: expected \[4, 3\], the checkpoint has \[3, 3\]",
    )


@pytest.mark.parametrize("saved", [[1, 2], torch.ones(3), "text"])
def test_a_value_that_is_no_modules_state_is_refused(tmp_path: Path, saved: Any) -> None:
    refused(tmp_path, saved, nn.Linear(3, 3), match="x: it is a Linear here, and the checkpoint has a")


def test_no_tensor_where_a_module_has_one(tmp_path: Path) -> None:
    saved = {"weight": [1.0], "bias": torch.ones(3)}
    refused(tmp_path, saved, nn.Linear(3, 3), match="x: no tensors in the checkpoint: weight")


def test_a_model_without_memory(tmp_path: Path) -> None:
    """torch would copy nothing into such a model, and only warn."""
    model = nn.Linear(3, 3, device="meta")
    refused(
        tmp_path,
        nn.Linear(3, 3).state_dict(),
        model,
        match=r"x: without memory .*: weight, bias; .*to_empty\(\)",
    )


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_cannot_be_written_is_refused_instead_of_a_crash(tmp_path: Path) -> None:
    np.zeros(5000, np.float32).tofile(tmp_path / "table")
    model = nn.Linear(3, 3)
    model.register_buffer("table", torch.from_numpy(np.memmap(tmp_path / "table", np.float32, "r")))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (tmp_path / "store").mkdir()
    refused(
        tmp_path / "store",
        saved,
        model,
        match=r"no value can be written into the memory of x/table: .*clone\(\)",
    )
    private = torch.from_file(
        str(tmp_path / "table"), size=5000
    )  # its pages are copied when they are written
    assert find_read_only({"private": private, "empty": torch.empty(0)}) == []


def test_a_value_that_is_no_optimizers_state_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, {"param_groups": [], "last": 3}, groups(1), match="x: it is the optimizer SGD here")


def test_no_tensor_for_a_tensor(tmp_path: Path) -> None:
    refused(tmp_path, [1.0], torch.ones(3), match="x: it is a tensor here, and the checkpoint has a list")


def test_groups_that_are_added_later(tmp_path: Path) -> None:
    refused(
        tmp_path,
        groups(2, 3, 1).state_dict(),
        groups(2),
        match=r"x: this SGD has 1 group of 2 parameters, the checkpoint has 3 groups of 2, 3 and 1 parameters; add the "
        r"groups before restore\(\): 2 groups more by add_param_group\(\)",
        ranks=2,
    )


def test_groups_that_were_added_too_early(tmp_path: Path) -> None:
    refused(
        tmp_path,
        groups(2).state_dict(),
        groups(2, 1),
        match=r"restore\(\) before add_param_group\(\): 1 group less",
    )


def test_the_differing_group_of_many_is_named(tmp_path: Path) -> None:
    refused(
        tmp_path,
        groups(*[1] * 7, 2, *[1] * 5).state_dict(),
        groups(*[1] * 13),
        match=r"has 13 groups of 13 parameters in all, the checkpoint has 13 groups of 14 parameters in all "
        r"\(group 7: 1 and 2\)",
    )


@pytest.mark.parametrize(("here", "there"), [((2, 3), (2,)), ((2, 3), (3, 2)), ((4,), (5,)), ((), (1,))])
def test_other_parameter_groups_are_refused(
    tmp_path: Path, here: tuple[int, ...], there: tuple[int, ...]
) -> None:
    optimizer = groups(*(here or (1,)))
    if not here:
        optimizer.param_groups.clear()
    refused(
        tmp_path,
        groups(*there).state_dict(),
        optimizer,
        match=r"x: .*the checkpoint .*group",
    )


def test_an_optimizer_that_takes_other_groups_is_asked(tmp_path: Path) -> None:
    class AddsGroups(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            for _ in state_dict["param_groups"][len(self.param_groups) :]:
                self.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            super().load_state_dict(state_dict)

    publish(tmp_path, 1, {"x": groups(1, 1).state_dict()})
    optimizer = groups(1, kind=AddsGroups)
    bring_back({"x": optimizer}, tmp_path)
    assert len(optimizer.param_groups) == 2


def test_a_value_not_saved_per_rank_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path, {"epoch": 1}, PerRank({"epoch": 0}), match="x: is PerRank in the state, but was not when"
    )


def test_a_value_shared_out_among_other_ranks_is_refused(tmp_path: Path) -> None:
    value = PerRank({"epoch": 0}, same_ranks=True)
    refused(
        tmp_path,
        blobs_of([1, 2, 3]),
        value,
        match="x: expected 3 ranks, as when it was saved, got 2",
        ranks=2,
    )


def test_a_late_refusal_says_what_is_loaded_and_what_is_not(tmp_path: Path) -> None:
    class Refuses(Untouched):
        def load_state_dict(self, _: Any) -> None:
            raise ValueError("not this one")

    model, optimizer = nn.Linear(3, 3), groups(1)
    last, listed, tensor = Untouched(), [2], torch.ones(3)
    state = {
        "listed": listed,
        "first": Untouched(),
        "model": model,
        "refuses": Refuses(),
        "optimizer": optimizer,
        "second": nn.Linear(2, 2),
        "last": last,
        "tensor": tensor,
        "seen": PerRank([2]),
    }
    tree = {
        name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()
    }
    publish(tmp_path, 1, {**tree, "listed": [1], "seen": blobs_of([[1]])})
    with pytest.raises(StateError) as caught:
        restore(state, CountingStore(tmp_path), LonePeers(), events=None)
    assert (
        "refuses: load_state_dict() of Refuses refused the saved state: not this one; loaded before it: 'first', "
        "'model'; read in place, but not loaded: 'second', 'tensor'; not touched: "
        "'optimizer', 'last', 'listed', 'seen'; do not train on with this state" in str(caught.value)
    )
    assert "nothing was loaded" not in str(caught.value)
    assert (state["first"].calls, last.calls, listed) == (1, 0, [2])  # type: ignore[attr-defined]


def test_memory_of_an_object_is_given_back_before_the_next_is_asked(tmp_path: Path) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    class Copies(Untouched):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert not [one for one in seen if one() is not None]
            seen.append(weakref.ref(state["weight"].untyped_storage()))

    publish(tmp_path, 1, {name: {"weight": torch.zeros(9000)} for name in "abc"})
    bring_back({name: Copies() for name in "abc"}, tmp_path)
    assert len(seen) == 3


def test_the_state_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    publish(tmp_path, 3, {"optimizer": torch.optim.SGD([weight], lr=0.1, momentum=0.9).state_dict()})
    with pytest.raises(StateError, match=r"another optimizer, with .*momentum.*; this AdamW has .*betas"):
        bring_back({"optimizer": torch.optim.AdamW([weight])}, tmp_path)


def test_a_scheduler_s_marks_are_no_other_optimizer(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    saved = torch.optim.AdamW([weight])
    torch.optim.lr_scheduler.OneCycleLR(saved, max_lr=1.0, total_steps=10)
    document = saved.state_dict()
    document["param_groups"][0].pop("maximize")  # as from an older torch, which had no such option
    publish(tmp_path, 3, {"optimizer": document})
    bring_back({"optimizer": torch.optim.AdamW([weight])}, tmp_path)
