"""One piece of the script's memory with several values in the checkpoint: equal, or refused with both names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from tests.support.restoring import CountingStore, publish
from tests.support.slices import DictTier, checkpoint
from tests.unit.trainer_side.restore.test_restore import bring_back
from tests.unit.trainer_side.restore.test_restore_dtensors import MESHES, RANKS, as_rank, trained
from tests.unit.trainer_side.restore.test_restore_dtensors import Net as Split
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import collect

State = dict[str, Any]


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.other = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def _modules(*, equal: bool) -> State:
    net = Tied(is_tied=False)
    if equal:
        net.head.weight.data.copy_(net.embed.weight)
    return {"model": net}


def _averages(*, equal: bool) -> State:
    model = nn.Linear(2, 2)
    average = copy.deepcopy(model)
    if not equal:
        average.weight.data += 1
    return {"model": model, "average": average}


def _aliased() -> State:
    model = nn.Linear(2, 2)
    return {"model": model, "average": model}


class Buffers(nn.Module):
    table: torch.Tensor
    again: torch.Tensor

    def __init__(self, *, is_tied: bool, equal: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        other = torch.arange(4.0) + (0 if equal else 1)
        self.register_buffer("again", self.table if is_tied else other)


class Views(nn.Module):
    """Two windows of one buffer, which overlap, as those of a flat parameter may."""

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, *, is_shared: bool, equal: bool = False) -> None:
        super().__init__()
        flat = torch.arange(8.0)
        self.register_buffer("low", flat[:6])
        self.register_buffer("high", flat[2:] if is_shared else (flat[2:] if equal else flat[2:] + 1).clone())


class Strides(nn.Module):
    """A transposed view of a weight."""

    weight: torch.Tensor
    turned: torch.Tensor

    def __init__(self, *, is_shared: bool, equal: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(6.0).reshape(2, 3))
        turned = self.weight.t()
        self.register_buffer("turned", turned if is_shared else (turned if equal else turned + 1).clone())


class Whole:
    """An object of the script around a model."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def state_dict(self) -> State:
        return {"net": self.net.state_dict(), "count": 1}

    def load_state_dict(self, saved: State) -> None:
        self.net.load_state_dict(saved["net"])


def _container(*, equal: bool) -> State:
    model = nn.Linear(2, 2)
    return {"model": model, "best": {"weight": model.weight.detach() + (0 if equal else 1)}}


def _with_its_own_best() -> State:
    model = nn.Linear(2, 2)
    return {"model": model, "best": {"weight": model.weight.detach()}}


CASES: dict[str, tuple[Callable[[bool], State], Callable[[], State], str, str]] = {
    "tied weights": (
        lambda equal: _modules(equal=equal),
        lambda: {"model": Tied(is_tied=True, seed=1)},
        "model/embed.weight",
        "model/head.weight",
    ),
    "two modules that are one": (
        lambda equal: _averages(equal=equal),
        _aliased,
        "model/weight",
        "average/weight",
    ),
    "tied buffers": (
        lambda equal: {"model": Buffers(is_tied=False, equal=equal)},
        lambda: {"model": Buffers(is_tied=True)},
        "model/table",
        "model/again",
    ),
    "views that overlap": (
        lambda equal: {"model": Views(is_shared=False, equal=equal)},
        lambda: {"model": Views(is_shared=True)},
        "model/low",
        "model/high",
    ),
    "a transposed view": (
        lambda equal: {"model": Strides(is_shared=False, equal=equal)},
        lambda: {"model": Strides(is_shared=True)},
        "model/weight",
        "model/turned",
    ),
    "inside an object of the script": (
        lambda equal: {"whole": Whole(_modules(equal=equal)["model"])},
        lambda: {"whole": Whole(Tied(is_tied=True, seed=1))},
        "whole/net/embed.weight",
        "whole/net/head.weight",
    ),
    "a container with a weight of the model": (
        lambda equal: _container(equal=equal),
        _with_its_own_best,
        "model/weight",
        "best/weight",
    ),
}


def _bytes(state: State) -> list[torch.Tensor]:
    return [
        tensor.clone()
        for value in collect(state).values()
        for tensor in (value.values() if isinstance(value, dict) else [])
        if isinstance(tensor, torch.Tensor)
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_other_values_are_refused_with_both_names_and_nothing_is_loaded(tmp_path: Path, case: Any) -> None:
    make, fresh, one, other = case
    publish(tmp_path, 3, collect({"first": torch.ones(3), **make(False)}))
    live = {"first": torch.zeros(3), **fresh()}
    before = _bytes(live)
    with pytest.raises(StateError) as raised:
        bring_back(live, tmp_path)
    assert one in str(raised.value)
    assert other in str(raised.value)
    assert all(map(torch.equal, _bytes(live), before))
    assert live["first"].tolist() == [0.0] * 3


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equal_values_are_loaded(tmp_path: Path, case: Any) -> None:
    make, fresh, *_ = case
    saved = make(True)
    publish(tmp_path, 3, collect(saved))
    live = fresh()
    bring_back(live, tmp_path)
    assert all(map(torch.equal, _bytes(live), _bytes(saved)))


def test_tied_weights_of_another_value_are_refused_before_their_bytes_are_read(tmp_path: Path) -> None:
    large = torch.ones(1 << 16)
    publish(tmp_path, 3, collect({"large": large, **_modules(equal=False)}))
    store = CountingStore(tmp_path)
    with pytest.raises(StateError, match=r"different values"):
        restore({"large": large, "model": Tied(is_tied=True)}, store, LonePeers(), events=None)
    assert store.bytes_read < large.nbytes


@pytest.mark.parametrize("equal", [False, True])
def test_slices_that_have_no_sums_of_tensors_are_read_beside_and_compared(equal: bool) -> None:
    saved = {"first": torch.ones(3), **_modules(equal=equal)}
    made = checkpoint(lambda rank: saved, ranks=2, step=5)
    live: State = {"first": torch.zeros(3), "model": Tied(is_tied=True, seed=1)}
    before = _bytes(live)
    tiers = [DictTier().put(made, 0, 1)]
    if equal:
        restore(live, None, LonePeers(), events=None, tiers=tiers)
        assert all(map(torch.equal, _bytes(live), _bytes(saved)))
        return
    with pytest.raises(StateError, match=r"model/embed\.weight and model/head\.weight share memory"):
        restore(live, None, LonePeers(), events=None, tiers=tiers)
    assert all(map(torch.equal, _bytes(live), before))
    assert live["first"].tolist() == [0.0] * 3


def test_a_tied_file_gives_both_weights_of_an_untied_model_their_value(tmp_path: Path) -> None:
    saved = Tied(is_tied=True)
    publish(tmp_path, 3, collect({"model": saved}))
    fresh = Tied(is_tied=False, seed=1)
    bring_back({"model": fresh}, tmp_path)
    assert torch.equal(fresh.embed.weight, saved.embed.weight)
    assert torch.equal(fresh.head.weight, saved.embed.weight)
    assert fresh.head.weight is not fresh.embed.weight


def test_ties_that_are_alike_are_read_in_place_as_before(tmp_path: Path) -> None:
    pairs: list[tuple[State, State]] = [
        ({"model": Tied(is_tied=True)}, {"model": Tied(is_tied=True, seed=1)}),
        ({"model": Views(is_shared=True)}, {"model": Views(is_shared=True)}),
        ({"model": Strides(is_shared=True)}, {"model": Strides(is_shared=True)}),
    ]
    for number, (saved, fresh) in enumerate(pairs):
        root = tmp_path / str(number)
        publish(root, 3, collect(saved))
        bring_back(fresh, root)
        assert all(map(torch.equal, _bytes(fresh), _bytes(saved)))


def test_the_best_weights_of_an_object_may_be_the_models_own_when_it_begins(tmp_path: Path) -> None:
    class Best:
        def __init__(self, model: nn.Module) -> None:
            self.weights = model.state_dict()

        def state_dict(self) -> State:
            return {"weights": self.weights}

        def load_state_dict(self, saved: State) -> None:
            self.weights = saved["weights"]

    model = nn.Linear(2, 2)
    best = Best(copy.deepcopy(model))
    model.weight.data += 1
    publish(tmp_path, 3, collect({"model": model, "best": best}))
    fresh = nn.Linear(2, 2)
    found = Best(fresh)
    bring_back({"model": fresh, "best": found}, tmp_path)
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(found.weights["weight"], best.weights["weight"])


def test_a_parameter_that_an_optimizer_has_twice_gets_one_state(tmp_path: Path) -> None:
    def optimizer_of(*parameters: nn.Parameter) -> torch.optim.Optimizer:
        with pytest.warns(UserWarning, match="duplicate") if len(set(parameters)) == 1 else nullcontext():
            return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)

    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    saved = optimizer_of(one, other)
    for number, parameter in enumerate((one, other)):
        saved.state[parameter] = {"momentum_buffer": torch.full((2,), float(number))}
    publish(tmp_path, 3, collect({"w": one, "optimizer": saved}))
    with pytest.raises(StateError, match=r"is in this optimizer twice"):
        bring_back({"w": one, "optimizer": optimizer_of(one, one)}, tmp_path)
    twice = optimizer_of(one, one)
    twice.state[one] = {"momentum_buffer": torch.full((2,), 5.0)}
    publish(tmp_path, 4, collect({"w": one, "optimizer": twice}))
    fresh = optimizer_of(one, one)
    bring_back({"w": one, "optimizer": fresh}, tmp_path)
    assert fresh.state[one]["momentum_buffer"].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("as_slices", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_tied_weights_that_are_split_among_ranks(tmp_path: Path, equal: bool, as_slices: bool) -> None:
    net, _ = trained(even=False)
    head = net.head.weight.detach().clone() if equal else torch.zeros_like(net.head.weight)
    net.head.weight = nn.Parameter(head)
    publish(tmp_path, 5, {"model": net.state_dict()})
    made = checkpoint(lambda rank: {"model": net}, ranks=2, step=5)
    for rank in range(RANKS):
        with as_rank(rank):
            live, same = Split(even=False), Split(even=False)
            same.load_state_dict(net.state_dict())
            for one in (live, same):
                MESHES["fsdp"][0](one)
            before = locals_of(live)
            tiers = [DictTier().put(made, 0, 1)] if as_slices else []
            store = None if as_slices else CountingStore(tmp_path)
            if equal:
                restore({"model": live}, store, LonePeers(), events=None, tiers=tiers)
                assert all(map(torch.equal, locals_of(live), locals_of(same)))
                continue
            with pytest.raises(StateError, match=r"model/embed\.weight and model/head\.weight share memory"):
                restore({"model": live}, store, LonePeers(), events=None, tiers=tiers)
            assert all(map(torch.equal, locals_of(live), before))


def locals_of(module: nn.Module) -> list[torch.Tensor]:
    return [local_of(tensor).detach().clone() for tensor in module.state_dict().values()]
