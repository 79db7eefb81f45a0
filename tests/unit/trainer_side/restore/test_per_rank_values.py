"""Optimizers that each rank has for itself come back by name with their dtypes, or nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from tests.support.restoring import CountingStore, Ranks, publish
from tests.unit.trainer_side.assemble import assembled, make_plan, named, sent, taken
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.restore.test_joining_by_name import Loop, Net, Shadow, assert_own, mark, names_of
from tests.unit.trainer_side.restore.test_restore import bring_back
from trainer_side.restore.restore import restore
from trainer_side.state.per_rank import PerRank

State = dict[str, Any]


def test_an_optimizer_of_each_rank_is_joined_by_name(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, names_of(("", net)))
    publish_named(tmp_path, 3, {"model": net, "optimizer": PerRank(optimizer)})
    found = torch.optim.AdamW([*fresh.parameters()][::-1])
    bring_back({"model": fresh, "optimizer": PerRank(found)}, tmp_path)
    assert_own(found, names_of(("", fresh)))


def test_each_rank_has_names_of_its_own(tmp_path: Path) -> None:
    """As with ZeRO: each rank steps other parameters of one model."""
    net, fresh = Net(), [Net(1), Net(1)]
    state: State = {"model": net}

    def own(net: Net, rank: int, *, backwards: bool = False) -> torch.optim.Optimizer:
        parameters = [*(net.a, net.c)[rank].parameters()]
        return torch.optim.AdamW(parameters[::-1] if backwards else parameters)

    frames, layout = [], None
    saved = [own(net, rank) for rank in range(2)]
    for optimizer in saved:
        mark(optimizer, names_of(("", net)))
    for rank in range(2):
        state["optimizer"] = PerRank(saved[rank])
        trailer = named(state)
        skeleton = make_plan(state, rank=rank, ranks=2, trailer=trailer, reserve=8192)
        frames.append(sent(skeleton, taken(state, skeleton, trailer)))
        layout = skeleton.layout
    assert layout is not None
    publish(tmp_path, 3, None, image=assembled(layout, frames), ranks=2)
    found = [own(fresh[rank], rank, backwards=True) for rank in range(2)]

    def work(peers: Any) -> None:
        given = {"model": fresh[peers.rank], "optimizer": PerRank(found[peers.rank])}
        restore(given, CountingStore(tmp_path), peers, events=None)

    Ranks(2).run(work)
    for rank in range(2):
        assert_own(found[rank], names_of(("", fresh[rank])))
    # One rank alone steps another part: nothing is loaded on any rank.
    found[1] = torch.optim.AdamW(fresh[1].b.parameters())
    before = [one.a.weight.detach().clone() for one in fresh]
    with torch.no_grad():
        for one in before:
            one += 1
        for model, one in zip(fresh, before, strict=True):
            model.a.weight.copy_(one)
    _, errors = Ranks(2).outcomes(work)
    for error in errors:
        assert isinstance(error, StateError)
        assert "expected the parameters that were saved, such as model/c.weight, got model/b.weight" in str(
            error
        )
    for model, one in zip(fresh, before, strict=True):
        assert torch.equal(model.a.weight, one)


def test_a_module_and_its_optimizer_of_each_rank(tmp_path: Path) -> None:
    def made(seed: int, *, backwards: bool = False) -> tuple[Net, torch.optim.Optimizer, State]:
        net = Net(seed)
        optimizer = torch.optim.AdamW([*net.parameters()][:: -1 if backwards else 1])
        return net, optimizer, {"expert": PerRank(net), "optimizer": PerRank(optimizer)}

    net, optimizer, state = made(0)
    mark(optimizer, names_of(("", net)))
    publish_named(tmp_path, 3, state)
    fresh, found, state = made(1, backwards=True)
    bring_back(state, tmp_path)
    assert_own(found, names_of(("", fresh)))
    assert torch.equal(fresh.b.weight, net.b.weight)


def test_optimizers_and_averages_below_an_object_of_each_rank(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    loop = Loop(net, backwards=False)
    for one in loop.all:
        mark(one, names_of(("", net)))
    publish_named(
        tmp_path, 3, {"net": net, "loop": PerRank(loop), "average": PerRank(Shadow(net.parameters()))}
    )
    found, average = Loop(fresh, backwards=True), Shadow([*fresh.parameters()][::-1])
    bring_back({"net": fresh, "loop": PerRank(found), "average": PerRank(average)}, tmp_path)
    for one in found.all:
        assert_own(one, names_of(("", fresh)))
    for value, parameter in zip(average.shadow[::-1], net.parameters(), strict=True):
        assert torch.equal(value, parameter)


def test_moments_of_another_dtype_keep_it(tmp_path: Path) -> None:
    net, fresh = nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer, found = (torch.optim.SGD(one.parameters()) for one in (net, fresh))
    optimizer.state[net.weight] = {"master": torch.randn(3, 3)}
    publish_named(tmp_path, 3, {"model": net, "optimizer": PerRank(optimizer)})
    bring_back({"model": fresh, "optimizer": PerRank(found)}, tmp_path)
    assert torch.equal(found.state[fresh.weight]["master"], optimizer.state[net.weight]["master"])


def test_an_optimizer_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    publish_named(tmp_path, 3, {"model": net, "optimizer": PerRank(torch.optim.AdamW(net.parameters()))})
    before = fresh.a.weight.clone()
    with pytest.raises(StateError, match=r"optimizer: this AdamW has .*; nothing was loaded"):
        bring_back({"model": fresh, "optimizer": PerRank(torch.optim.AdamW(fresh.a.parameters()))}, tmp_path)
    assert torch.equal(fresh.a.weight, before)


def test_an_optimizer_of_a_module_that_each_rank_has(tmp_path: Path) -> None:
    """The optimizer is not one of each rank: data.pkl has the names."""
    net, fresh = Net(), Net(1)
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, names_of(("", net)))
    publish_named(tmp_path, 3, {"model": PerRank(net), "optimizer": optimizer})
    found = torch.optim.AdamW([*fresh.parameters()][::-1])
    bring_back({"model": PerRank(fresh), "optimizer": found}, tmp_path)
    assert_own(found, names_of(("", fresh)))
