"""A model saved in other wrappers loads if only they differ; other differences are refused with both names."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import StateError
from tests.support.restoring import publish
from tests.unit.trainer_side.restore.test_restore import assert_same, blobs_of, bring_back
from trainer_side.restore.torch_loading import new_names
from trainer_side.state.per_rank import PerRank

# torch.compile imports what torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = torch._C._distributed_c10d.FileStore(os.fspath(tmp_path_factory.mktemp("group") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def net(*, first: Callable[[nn.Module], Any] = lambda layer: layer) -> nn.Sequential:
    return nn.Sequential(first(nn.Linear(3, 3)), nn.ReLU(), nn.Linear(3, 2))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module)


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


FORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "DDP": lambda: ddp(net()),
    "DataParallel": lambda: nn.DataParallel(net()),
    "compiled": lambda: compiled(net()),
    "DDP of compiled": lambda: ddp(compiled(net())),
    "compiled DDP": lambda: compiled(ddp(net())),
    "one layer compiled": lambda: net(first=compiled),
    "DDP, one layer compiled": lambda: ddp(net(first=compiled)),
    "checkpointing": lambda: net(first=checkpoint_wrapper),
    "checkpointing compiled": lambda: net(first=lambda layer: checkpoint_wrapper(compiled(layer))),
    "compiled checkpointing": lambda: ddp(net(first=lambda layer: compiled(checkpoint_wrapper(layer)))),
}


@pytest.mark.parametrize("here", ["plain", "compiled DDP", "DDP, one layer compiled", "checkpointing"])
@pytest.mark.parametrize("there", FORMS)
def test_a_model_is_restored_where_only_the_wrapper_differs(tmp_path: Path, there: str, here: str) -> None:
    saved, model = FORMS[there](), FORMS[here]()
    publish(tmp_path, 1, {"model": saved.state_dict()})
    places = [tensor.data_ptr() for tensor in model.parameters()]
    bring_back({"model": model}, tmp_path)
    assert_same(dict(enumerate(model.parameters())), dict(enumerate(saved.parameters())))
    assert [tensor.data_ptr() for tensor in model.parameters()] == places


def test_an_average_of_a_wrapped_model(tmp_path: Path) -> None:
    saved, model = AveragedModel(compiled(net())), AveragedModel(ddp(net()))
    saved.n_averaged.fill_(4)
    publish(tmp_path, 1, {"model": saved.state_dict()})
    bring_back({"model": model}, tmp_path)
    assert model.n_averaged == 4
    assert_same(dict(enumerate(model.parameters())), dict(enumerate(saved.parameters())))


def test_an_average_is_no_plain_model(tmp_path: Path) -> None:
    """Its counter would be lost."""
    publish(tmp_path, 1, {"model": AveragedModel(net()).state_dict()})
    with pytest.raises(
        StateError, match=r"'module' \(DistributedDataParallel, .* AveragedModel\).*nothing was"
    ):
        bring_back({"model": net()}, tmp_path)


def test_a_model_may_have_a_child_called_module(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.module = nn.Linear(3, 3)
        model.head = nn.Linear(3, 3)
        return model

    saved = make()
    for number, wrap in enumerate([lambda one: one, ddp, compiled]):
        publish(tmp_path, number, {"model": wrap(saved).state_dict()})
        for again in [lambda one: one, ddp, compiled]:
            model = make()
            bring_back({"model": again(model)}, tmp_path, step=number)
            assert_same(model.state_dict(), saved.state_dict())


def test_two_names_of_which_one_seems_wrapped_are_not_guessed_at(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    tree = {**model.state_dict(), **{f"module.{key}": value + 1 for key, value in model.state_dict().items()}}
    publish(tmp_path, 1, {"model": tree})
    before = model.weight.detach().clone()
    for wrap in (lambda one: one, ddp):
        with pytest.raises(StateError, match=r"(?s)only the checkpoint has .*weight.*nothing was loaded"):
            bring_back({"model": wrap(model)}, tmp_path)
    assert torch.equal(model.weight, before)


def test_a_child_and_a_wrapper_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    """`lin` and `module.lin` are both in the model; outside of DDP `module.lin` is another tensor than inside."""

    def make() -> nn.Module:
        model = nn.Module()
        model.lin = nn.Linear(3, 3)
        model.module = nn.ModuleDict({"lin": nn.Linear(3, 3)})
        return model

    saved, model = make(), make()
    publish(tmp_path, 1, {"model": ddp(saved).state_dict()})
    bring_back({"model": model}, tmp_path)
    assert_same(model.state_dict(), saved.state_dict())


def test_values_of_each_rank(tmp_path: Path) -> None:
    saved, model = compiled(net()), ddp(net())
    publish(tmp_path, 1, {"own": blobs_of([saved.state_dict()])})
    bring_back({"own": PerRank(model)}, tmp_path)
    assert_same(dict(enumerate(model.parameters())), dict(enumerate(saved.parameters())))


class Versioned(nn.Linear):
    _version = 5
    seen: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("there", [lambda one: one, ddp, compiled])
@pytest.mark.parametrize("here", [lambda one: one, ddp, compiled])
def test_code_that_asks_for_its_version_finds_it(
    tmp_path: Path, there: Callable[[Any], Any], here: Callable[[Any], Any]
) -> None:
    saved, model = (
        nn.Sequential(nn.Linear(3, 3), Versioned(3, 3)),
        nn.Sequential(nn.Linear(3, 3), Versioned(3, 3)),
    )
    publish(tmp_path, 1, {"model": there(saved).state_dict()})
    bring_back({"model": here(model)}, tmp_path)
    assert model[1].seen == 5
    assert_same(model.state_dict(), saved.state_dict())


def test_a_class_that_keeps_its_head_does_so_out_of_a_wrapper(tmp_path: Path) -> None:
    class KeepsItsHead(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, classes)

        def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
            own = {key: value for key, value in state_dict.items() if not key.startswith("head.")}
            return super().load_state_dict(own, strict=False)

    saved, model = KeepsItsHead(9), KeepsItsHead(2)
    head = model.head.weight.detach().clone()
    publish(tmp_path, 1, {"model": compiled(ddp(saved)).state_dict()})
    bring_back({"model": model}, tmp_path)
    assert torch.equal(model.body.weight, saved.body.weight)
    assert torch.equal(model.head.weight, head)


def by_name(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    tree = optimizer.state_dict()
    return {
        "state": {names[number]: of for number, of in tree["state"].items()},
        "param_groups": [
            {**group, "params": [names[one] for one in group["params"]]} for group in tree["param_groups"]
        ],
    }


@pytest.mark.parametrize("here", [lambda one: one, ddp, compiled])
@pytest.mark.parametrize("there", [lambda one: one, ddp, compiled])
@pytest.mark.parametrize("bare", [False, True])
def test_an_optimizer_by_name(
    tmp_path: Path, there: Callable[[Any], Any], here: Callable[[Any], Any], bare: bool
) -> None:
    """As jobs with stages save it, and torch's get_optimizer_state_dict, which leaves wrappers out."""
    saved, model = there(net()), here(net())
    optimizer = torch.optim.Adam(saved.parameters())
    for number, parameter in enumerate(saved.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full_like(parameter, number + 2.0),
        }
    names = [name for name, _ in saved.named_parameters()]
    if bare:
        names = [name.replace("module.", "").replace("_orig_mod.", "") for name in names]
    publish(tmp_path, 1, {"model": saved.state_dict(), "optimizer": by_name(optimizer, names)})
    fresh = torch.optim.Adam(model.parameters())
    bring_back({"model": model, "optimizer": fresh}, tmp_path)
    assert [float(fresh.state[one]["exp_avg"].mean()) for one in model.parameters()] == [2.0, 3.0, 4.0, 5.0]


def test_names_in_the_groups_of_an_optimizer_follow(tmp_path: Path) -> None:
    saved, model = ddp(net()), compiled(net())
    publish(
        tmp_path,
        1,
        {"model": saved.state_dict(), "optimizer": torch.optim.SGD(saved.named_parameters()).state_dict()},
    )
    fresh = torch.optim.SGD(model.named_parameters())
    bring_back({"model": model, "optimizer": fresh}, tmp_path)
    assert fresh.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("saved", "here", "expected"),
    [
        ("a b", "a c", {}),
        ("module.a module.b", "a b", {"module.a": "a", "module.b": "b"}),
        ("a.w b", "_orig_mod.a.w _orig_mod.b", {"a.w": "_orig_mod.a.w", "b": "_orig_mod.b"}),
        ("module.a", "module.a module.b", {}),  # of a stage
        ("module.x", "head.module.x", {"module.x": "x"}),  # refused, as there is no x
        ("w.module", "w.x", {}),  # a parameter of that name
        ("module._orig_mod.a.w", "_orig_mod.module.a.w", {"module._orig_mod.a.w": "_orig_mod.module.a.w"}),
        ("module.a.w module.a.old", "a.w a.new", {"module.a.w": "a.w", "module.a.old": "a.old"}),
    ],
)
def test_names_are_mapped_across_wrappers(saved: str, here: str, expected: dict[str, str]) -> None:
    assert new_names(saved.split(), here.split()) == expected


def test_an_ordered_dict_stays_one(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Spy(nn.Linear):
        def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
            seen.append(state_dict)
            return super().load_state_dict(state_dict)

    publish(tmp_path, 1, {"model": ddp(Spy(2, 2)).state_dict()})
    bring_back({"model": Spy(2, 2)}, tmp_path)
    assert [*seen[0]] == ["weight", "bias"]
    assert isinstance(seen[0], OrderedDict)
