"""Parameters and groups of optimizers come back by name in any order, or the error has both names."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import StateError
from tests.support.restoring import CountingStore, publish
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.restore.test_restore import bring_back
from tests.unit.trainer_side.restore.test_restore_dtensors import MESHES, RANKS, as_rank, trained
from tests.unit.trainer_side.restore.test_restore_dtensors import Net as Split
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.joining_by_name import join_by_name
from trainer_side.restore.restore import restore
from trainer_side.state.split_tensor import local_of
from trainer_side.state.tree import collect

State = dict[str, Any]


class Net(nn.Module):
    """Parameters of one shape, so that a wrong order causes no shape error."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))


def names_of(*modules: tuple[str, nn.Module]) -> dict[int, str]:
    return {
        id(parameter): f"{prefix}{name}"
        for prefix, module in modules
        for name, parameter in module.named_parameters()
    }


def mark(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Give each parameter recognizable moments."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            value = float(sum(map(ord, names[id(parameter)])))
            moment = torch.full_like(parameter, value)
            optimizer.state[parameter] = {
                "step": torch.tensor(value),
                "exp_avg": moment,
                "exp_avg_sq": moment + 1,
            }


def assert_own(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            value, name = float(sum(map(ord, names[id(parameter)]))), names[id(parameter)]
            moments = optimizer.state[parameter]
            assert moments["step"].item() == value, name
            assert torch.equal(moments["exp_avg"], torch.full_like(parameter, value)), name
            assert torch.equal(moments["exp_avg_sq"], torch.full_like(parameter, value + 1)), name


Order = Callable[[Net], Any]
ORDERS: dict[str, tuple[Order, Order]] = {
    "parts in another order": (
        lambda net: [*net.a.parameters(), *net.b.parameters()],
        lambda net: [*net.b.parameters(), *net.a.parameters()],
    ),
    "backwards": (lambda net: [*net.parameters()], lambda net: [*net.parameters()][::-1]),
    "groups in another order": (
        lambda net: [{"params": [*one.parameters()], "lr": lr} for one, lr in ((net.a, 1e-1), (net.b, 1e-2))],
        lambda net: [{"params": [*one.parameters()], "lr": lr} for one, lr in ((net.b, 1e-2), (net.a, 1e-1))],
    ),
    "groups of other sizes in another order": (
        lambda net: [{"params": [net.a.weight], "lr": 0.1}, {"params": [*net.b.parameters()], "lr": 0.2}],
        lambda net: [
            {"params": [*net.b.parameters()][::-1], "lr": 0.3},
            {"params": [net.a.weight], "lr": 0.4},
        ],
    ),
    "an empty group": (
        lambda net: [{"params": [net.a.weight]}, {"params": []}, {"params": [net.b.weight]}],
        lambda net: [{"params": [net.b.weight]}, {"params": [net.a.weight]}, {"params": []}],
    ),
    "named parameters": (
        lambda net: list(net.named_parameters()),
        lambda net: list(net.named_parameters())[::-1],
    ),
    "named in the file only": (
        lambda net: list(net.named_parameters()),
        lambda net: [*net.parameters()][::-1],
    ),
}


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=list(ORDERS))
def test_each_parameter_gets_its_own_moments(
    tmp_path: Path, orders: tuple[Order, Order], has_stepped: bool
) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(orders[0](net))
    mark(optimizer, names_of(("", net)))
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer})
    settings = {names_of(("", net))[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    for seed in range(2):
        fresh = Net(seed + 1)
        found = torch.optim.AdamW(orders[1](fresh))
        if has_stepped:
            mark(found, dict.fromkeys(names_of(("", fresh)), "other"))
        bring_back({"model": fresh, "optimizer": found}, tmp_path)
        assert_own(found, names_of(("", fresh)))
        assert torch.equal(fresh.a.weight, net.a.weight)
        own = {names_of(("", fresh))[id(p)]: g["lr"] for g in found.param_groups for p in g["params"]}
        assert own == settings


def test_parameters_in_any_order_of_any_groups_get_their_own_moments(tmp_path: Path) -> None:
    dice = random.Random(1)
    for trial in range(20):
        net, fresh = Net(), Net(1)
        counts = [*range(6)]
        split = sorted(dice.sample(range(7), 2))
        parts = [counts[: split[0]], counts[split[0] : split[1]], counts[split[1] :]]
        optimizer = torch.optim.AdamW(_groups(net, parts))
        mark(optimizer, names_of(("", net)))
        root = tmp_path / str(trial)
        publish_named(root, 3, {"model": net, "optimizer": optimizer})
        dice.shuffle(parts)
        for part in parts:
            dice.shuffle(part)
        found = torch.optim.AdamW(_groups(fresh, parts))
        bring_back({"model": fresh, "optimizer": found}, root)
        assert_own(found, names_of(("", fresh)))
        numbers = [group["params"] for group in found.state_dict()["param_groups"]]
        assert [one for group in numbers for one in group] == counts


def _groups(net: Net, parts: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    parameters = [*net.parameters()]
    return [{"params": [parameters[number] for number in part]} for part in parts]


def test_a_file_without_names_is_restored_by_position_as_before(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    optimizer, found = (torch.optim.AdamW(one.parameters()) for one in (net, fresh))
    mark(optimizer, names_of(("", net)))
    publish(tmp_path, 3, collect({"model": net, "optimizer": optimizer}))
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert_own(found, names_of(("", fresh)))


def test_a_file_without_names_whose_shapes_show_another_order_is_refused(tmp_path: Path) -> None:
    net, fresh = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, names_of(("", net)))
    publish(tmp_path, 3, collect({"model": net, "optimizer": optimizer}))
    found = torch.optim.AdamW([fresh.bias, fresh.weight])
    before = fresh.weight.clone()
    with pytest.raises(StateError, match=r"model/bias to have the shape \[3, 4\]"):
        bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert torch.equal(fresh.weight, before)


def test_torch_s_own_names_count_in_a_file_without_ours(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    optimizer = torch.optim.AdamW(list(net.named_parameters()))
    mark(optimizer, names_of(("", net)))
    publish(tmp_path, 3, collect({"model": net, "optimizer": optimizer}))
    found = torch.optim.AdamW(list(fresh.named_parameters())[::-1])
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert_own(found, names_of(("", fresh)))
    assert found.param_groups[0]["param_names"] == [name for name, _ in fresh.named_parameters()][::-1]


def test_small_moments_are_not_taken_for_another_order(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    optimizer, found = (torch.optim.AdamW(one.parameters()) for one in (net, fresh))
    for parameter in net.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)}
    publish(tmp_path, 3, collect({"model": net, "optimizer": optimizer}))
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert found.state[fresh.a.weight]["exp_avg"].shape == (2, 3)


class Wrapped(nn.Module):
    """As DistributedDataParallel and torch.compile name what is inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("of_file", [False, True])
def test_parameters_under_another_wrapper_get_their_own_moments(tmp_path: Path, of_file: bool) -> None:
    net, fresh = Net(), Net(1)
    outer = Wrapped(net) if of_file else net
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, names_of(("", net)))
    # The modules themselves are another matter: each has its keys without the wrapper here.
    publish_named(tmp_path, 3, {"model": _Bare(outer, net), "optimizer": optimizer, "net": outer})
    outer = fresh if of_file else Wrapped(fresh)
    found = torch.optim.AdamW([*fresh.parameters()][::-1])
    state = {"model": _Bare(outer, fresh), "optimizer": found}
    bring_back(state, tmp_path)
    assert_own(found, names_of(("", fresh)))


class _Bare:
    def __init__(self, outer: nn.Module, net: nn.Module) -> None:
        self.outer, self.net = outer, net

    def state_dict(self) -> Any:
        return self.net.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.net.load_state_dict(saved)


def test_the_module_has_another_name_in_the_state(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, names_of(("", net)))
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer})
    found = torch.optim.AdamW([*fresh.parameters()][::-1])
    bring_back({"net": fresh, "optimizer": found}, tmp_path, may_lack=frozenset({"net"}))
    assert_own(found, names_of(("", fresh)))


def test_a_parameter_of_another_part_of_the_model_is_refused_with_both_names(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    publish_named(tmp_path, 3, {"model": net, "optimizer": torch.optim.AdamW(net.a.parameters())})
    before = fresh.a.weight.clone()
    found = torch.optim.AdamW(fresh.b.parameters())
    with pytest.raises(StateError, match=r"model/a\.weight, got model/b\.weight"):
        bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert torch.equal(fresh.a.weight, before)


def test_two_optimizers_that_changed_places_are_told(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    one, other = (torch.optim.AdamW(part.parameters()) for part in (net.a, net.b))
    publish_named(tmp_path, 3, {"model": net, "optimizer0": one, "optimizer1": other})
    one, other = (torch.optim.AdamW(part.parameters()) for part in (fresh.b, fresh.a))
    with pytest.raises(StateError, match=r"optimizer0: .*the checkpoint has it in optimizer1"):
        bring_back({"model": fresh, "optimizer0": one, "optimizer1": other}, tmp_path)


def test_two_models_of_one_kind_are_not_mixed(tmp_path: Path) -> None:
    models = {"ours": Net(), "theirs": Net(1)}
    optimizer = torch.optim.AdamW([*models["ours"].parameters(), *models["theirs"].parameters()])
    names = names_of(("o", models["ours"]), ("t", models["theirs"]))
    mark(optimizer, names)
    publish_named(tmp_path, 3, {**models, "optimizer": optimizer})
    fresh = {"ours": Net(2), "theirs": Net(3)}
    found = torch.optim.AdamW([*fresh["theirs"].parameters(), *fresh["ours"].parameters()])
    bring_back({**fresh, "optimizer": found}, tmp_path)
    assert_own(found, names_of(("o", fresh["ours"]), ("t", fresh["theirs"])))


def test_a_group_that_was_split_in_another_way_is_refused_with_both_names(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    saved = torch.optim.AdamW(_groups(net, [[0, 1], [2]]))
    publish_named(tmp_path, 3, {"model": net, "optimizer": saved})
    found = torch.optim.AdamW(_groups(fresh, [[0], [1, 2]]))
    with pytest.raises(StateError, match=r"model/a\.weight and model/a\.bias are in groups 0 and 1"):
        bring_back({"model": fresh, "optimizer": found}, tmp_path)


def test_parameters_of_no_module_keep_their_order_and_have_their_shapes(tmp_path: Path) -> None:
    def loose() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(size)) for size in (2, 3, 2)]

    net, extra = Net(), loose()
    optimizer = torch.optim.AdamW([extra[0], *net.parameters(), *extra[1:]])
    names = {**names_of(("", net)), **{id(one): f"x{n}" for n, one in enumerate(extra)}}
    mark(optimizer, names)
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer})
    fresh, own = Net(1), loose()
    found = torch.optim.AdamW([*own, *[*fresh.parameters()][::-1]])
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert_own(found, {**names_of(("", fresh)), **{id(one): f"x{n}" for n, one in enumerate(own)}})
    wrong = torch.optim.AdamW([*fresh.parameters(), own[1], own[0], own[2]])
    with pytest.raises(StateError, match=r"parameter 6 of group 0 to have the shape \[2\]"):
        bring_back({"model": fresh, "optimizer": wrong}, tmp_path)


def test_a_plain_tensor_of_the_state_is_a_name_too(tmp_path: Path) -> None:
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([one, other])
    mark(optimizer, {id(one): "u", id(other): "v"})
    publish_named(tmp_path, 3, {"u": one, "part": {"v": other}, "optimizer": optimizer})
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    found = torch.optim.AdamW([other, one])
    bring_back({"u": one, "part": {"v": other}, "optimizer": found}, tmp_path)
    assert_own(found, {id(one): "u", id(other): "v"})


def test_tied_parameters_are_found_by_either_name(tmp_path: Path) -> None:
    def tied(first: str) -> tuple[nn.ModuleDict, nn.Linear]:
        other = nn.Linear(3, 3, bias=False)
        parts = {name: nn.Linear(3, 3, bias=False) for name in ("e", "h")}
        parts["h"].weight = parts["e"].weight
        return nn.ModuleDict({first: parts[first], **parts, "o": other}), other

    net, other = tied("e")
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, {id(net["e"].weight): "tied", id(other.weight): "other"})
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer})
    fresh, other = tied("h")
    found = torch.optim.AdamW([*other.parameters(), *fresh["h"].parameters()])
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert_own(found, {id(fresh["e"].weight): "tied", id(other.weight): "other"})


def test_frozen_parameters_and_part_of_a_model(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    for one in (net, fresh):
        one.b.requires_grad_(False)
    optimizer = torch.optim.AdamW([*net.b.parameters(), *net.c.parameters()])
    mark(optimizer, names_of(("", net)))
    for parameter in net.b.parameters():
        del optimizer.state[parameter]
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer})
    found = torch.optim.AdamW([*fresh.c.parameters(), *fresh.b.parameters()])
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert set(found.state) == set(fresh.c.parameters())
    only = torch.optim.AdamW(fresh.c.parameters())
    only.load_state_dict({**only.state_dict(), "state": dict(enumerate(found.state.values()))})
    assert_own(only, names_of(("", fresh)))


def test_a_model_with_new_names_that_it_converts_itself_keeps_the_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.register_load_state_dict_pre_hook(self._convert)  # type: ignore[no-untyped-call]

        @staticmethod
        def _convert(module: nn.Module, saved: dict[str, Any], *_: Any) -> None:
            for key in ("weight", "bias"):
                if f"a.{key}" in saved:
                    saved[f"first.{key}"] = saved.pop(f"a.{key}")

    net, fresh = Net(), Renamed()
    optimizer = torch.optim.AdamW(net.parameters())
    mark(optimizer, names_of(("", net)))
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer})
    found = torch.optim.AdamW(fresh.parameters())
    bring_back({"model": fresh, "optimizer": found}, tmp_path)
    assert_own(found, {key: name.replace("first", "a") for key, name in names_of(("", fresh)).items()})


class Loop:
    """An object of the script that saves model and optimizers itself, as Lightning's loops do."""

    def __init__(self, net: Net, *, backwards: bool) -> None:
        def order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            return [*parameters][::-1] if backwards else [*parameters]

        self.net = net
        self.optimizers = [torch.optim.AdamW(order(one.parameters())) for one in (net.a, net.b)]
        self.by_layer = {"c": torch.optim.AdamW(order(net.c.parameters()))}

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        return [*self.optimizers, *self.by_layer.values()]

    def state_dict(self) -> State:
        return {
            "state_dict": self.net.state_dict(),
            "optimizer_states": [one.state_dict() for one in self.optimizers],
            "by_layer": {name: dict(one.state_dict()) for name, one in self.by_layer.items()},
        }

    def load_state_dict(self, saved: State) -> None:
        self.net.load_state_dict(saved["state_dict"])
        for one, state in zip(self.optimizers, saved["optimizer_states"], strict=True):
            one.load_state_dict(state)
        for name, state in saved["by_layer"].items():
            self.by_layer[name].load_state_dict(state)


def test_optimizers_below_an_object_of_the_script(tmp_path: Path) -> None:
    net = Net()
    loop = Loop(net, backwards=False)
    for one in loop.all:
        mark(one, names_of(("", net)))
    publish_named(tmp_path, 3, {"loop": loop})
    fresh = Net(1)
    found = Loop(fresh, backwards=True)
    bring_back({"loop": found}, tmp_path)
    for one in found.all:
        assert_own(one, names_of(("", fresh)))


def test_two_optimizers_below_an_object_that_changed_places_are_told(tmp_path: Path) -> None:
    publish_named(tmp_path, 3, {"loop": Loop(Net(), backwards=False)})
    found = Loop(Net(1), backwards=False)
    found.optimizers.reverse()
    with pytest.raises(StateError, match=r"loop/optimizer_states/0.*it in loop/optimizer_states/1"):
        bring_back({"loop": found}, tmp_path)


def _grouped(net: Net, order: str) -> torch.optim.Optimizer:
    groups = {
        "a": {"params": [*net.a.parameters()], "lr": 0.1},
        "b": {"params": [*net.b.parameters()], "lr": 0.2},
    }
    return torch.optim.SGD([groups[name] for name in order])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "chained": lambda optimizer: ChainedScheduler([StepLR(optimizer, 2), StepLR(optimizer, 3, 0.7)]),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [StepLR(optimizer, 2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4]
    ),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, [1.0, 2.0], [3.0, 4.0], cycle_momentum=False
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_the_lists_of_schedulers_follow_the_groups(
    tmp_path: Path, make: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    def trained(steps: int, order: str) -> tuple[State, list[dict[str, float]]]:
        net = Net()
        optimizer = _grouped(net, order)
        scheduler = make(optimizer)
        rates = _rates(optimizer, scheduler, order, steps)
        return {"model": net, "optimizer": optimizer, "scheduler": scheduler}, rates

    state, _ = trained(3, "ab")
    publish_named(tmp_path, 3, state)
    expected = _rates(state["optimizer"], state["scheduler"], "ab", 4)
    fresh, _ = trained(0, "ba")
    bring_back(fresh, tmp_path)
    assert _rates(fresh["optimizer"], fresh["scheduler"], "ba", 4) == expected


def _rates(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler, order: str, steps: int
) -> list[dict[str, float]]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(dict(zip(order, (group["lr"] for group in optimizer.param_groups), strict=True)))
    return rates


class Slope:
    """A schedule with a state."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, epoch: int) -> float:
        return 1 + self.slope * epoch


def test_the_functions_of_a_scheduler_follow_the_groups(tmp_path: Path) -> None:
    net = Net()
    optimizer = _grouped(net, "ab")
    scheduler = LambdaLR(optimizer, [Slope(1.0), Slope(2.0)])
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer, "scheduler": scheduler})
    fresh = Net(1)
    found = _grouped(fresh, "ba")
    slopes = [Slope(5.0), Slope(6.0)]
    functions: list[Callable[[int], float]] = [*slopes]
    bring_back({"model": fresh, "optimizer": found, "scheduler": LambdaLR(found, functions)}, tmp_path)
    assert [one.slope for one in slopes] == [2.0, 1.0]


def test_a_list_that_may_follow_the_groups_is_refused_by_name(tmp_path: Path) -> None:
    class Warm:
        def __init__(self, optimizer: torch.optim.Optimizer, peaks: list[float]) -> None:
            self.optimizer, self.peaks = optimizer, peaks

        def state_dict(self) -> State:
            return {"peaks": self.peaks}

        def load_state_dict(self, saved: State) -> None:
            self.peaks = saved["peaks"]

    net, fresh = Net(), Net(1)
    optimizer = _grouped(net, "ab")
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer, "warm": Warm(optimizer, [1.0, 2.0])})
    found = _grouped(fresh, "ba")
    with pytest.raises(StateError, match=r"warm/peaks.*Warm"):
        bring_back({"model": fresh, "optimizer": found, "warm": Warm(found, [1.0, 2.0])}, tmp_path)
    same = _grouped(fresh, "ab")
    bring_back({"model": fresh, "optimizer": same, "warm": Warm(same, [3.0, 4.0])}, tmp_path)


def test_a_scheduler_that_is_not_there_yet_is_refused_by_name(tmp_path: Path) -> None:
    class RetryQueue:
        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, saved: State) -> None:
            self.saved = saved

    net, fresh = Net(), Net(1)
    optimizer = _grouped(net, "ab")
    publish_named(tmp_path, 3, {"model": net, "optimizer": optimizer, "later": StepLR(optimizer, 2)})
    with pytest.raises(StateError, match=r"later/.*groups of optimizer"):
        bring_back({"model": fresh, "optimizer": _grouped(fresh, "ba"), "later": RetryQueue()}, tmp_path)


def test_schedulers_in_another_order_are_refused(tmp_path: Path) -> None:
    def chained(*, backwards: bool) -> State:
        optimizer = torch.optim.SGD(Net().parameters())
        inner = [StepLR(optimizer, 2), torch.optim.lr_scheduler.LinearLR(optimizer)]
        return {"scheduler": ChainedScheduler(inner[::-1] if backwards else inner)}

    publish_named(tmp_path, 3, chained(backwards=False))
    bring_back(chained(backwards=False), tmp_path)
    with pytest.raises(StateError, match=r"scheduler/_schedulers/0: expected .*gamma.*start_factor"):
        bring_back(chained(backwards=True), tmp_path)


def test_a_file_of_something_else_than_a_state_is_left_to_be_refused() -> None:
    join_by_name({"model": Net()}, {"model": Net().state_dict()}, [7], {}, {})


def test_an_average_joins_by_its_own_names(tmp_path: Path) -> None:
    net, fresh = Net(), Net(1)
    average = AveragedModel(net)
    publish_named(tmp_path, 3, {"model": net, "average": average})
    found = AveragedModel(fresh)
    bring_back({"model": fresh, "average": found}, tmp_path)
    for name, value in average.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


class Shadow:
    """An average as a list of tensors; it holds its parameters, weak references to them, or nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], holds: str = "parameters") -> None:
        own = [*parameters]
        self.shadow = [one.detach().clone() for one in own]
        self.holds: list[Any] = []
        if holds != "nothing":
            self.holds = own if holds == "parameters" else [weakref.ref(one) for one in own]

    def state_dict(self) -> State:
        return {"decay": 0.9, "shadow_params": self.shadow}

    def load_state_dict(self, saved: State) -> None:
        self.shadow = saved["shadow_params"]


@pytest.mark.parametrize("holds", ["parameters", "references"])
def test_a_list_that_follows_parameters_is_joined_by_their_names(tmp_path: Path, holds: str) -> None:
    net, fresh = Net(), Net(1)
    publish_named(tmp_path, 3, {"model": net, "average": Shadow(net.parameters(), holds)})
    found = Shadow([*fresh.parameters()][::-1], holds)
    bring_back({"model": fresh, "average": found}, tmp_path)
    for value, parameter in zip(found.shadow[::-1], net.parameters(), strict=True):
        assert torch.equal(value, parameter)
    other = Shadow([*fresh.a.parameters(), *fresh.a.parameters(), *fresh.c.parameters()], holds)
    with pytest.raises(
        StateError, match=r"average/shadow_params: expected .*model/b\.weight, got model/a\.weight"
    ):
        bring_back({"model": fresh, "average": other}, tmp_path)


def test_a_list_without_names_whose_shapes_are_in_another_order_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    publish_named(tmp_path, 3, {"average": Shadow(net.parameters(), "nothing")})
    bring_back({"average": Shadow(net.parameters(), "nothing")}, tmp_path)
    with pytest.raises(StateError, match=r"average/shadow_params/0: expected the shape \[3, 4\]"):
        bring_back({"average": Shadow([*net.parameters()][::-1], "nothing")}, tmp_path)


def test_another_order_is_said_once_and_the_same_order_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, fresh = Net(), Net(1)
    publish_named(tmp_path, 3, {"model": net, "optimizer": torch.optim.AdamW(net.parameters())})
    with caplog.at_level(logging.WARNING):
        bring_back({"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}, tmp_path)
    assert "another order" not in caplog.text
    bring_back({"model": fresh, "optimizer": torch.optim.AdamW([*fresh.parameters()][::-1])}, tmp_path)
    assert caplog.text.count("another order") == 1


@pytest.mark.parametrize("kind", MESHES)
def test_parameters_that_are_split_among_ranks(tmp_path: Path, kind: str) -> None:
    shard, even = MESHES[kind]
    net, optimizer = trained(even=even)
    publish_named(tmp_path, 5, {"model": net, "optimizer": optimizer})
    for rank in range(RANKS):
        with as_rank(rank):
            found = []
            for backwards in (False, True):
                torch.manual_seed(2)
                live = Split(even=even)
                shard(live)
                parameters = [*live.parameters()]
                moments = torch.optim.AdamW(parameters[::-1] if backwards else parameters)
                restore(
                    {"model": live, "optimizer": moments}, CountingStore(tmp_path), LonePeers(), events=None
                )
                assert all(moments.state[one]["exp_avg"].shape == one.shape for one in parameters)
                found.append([local_of(moments.state[one]["exp_avg"]) for one in parameters])
            assert all(map(torch.equal, *found))
