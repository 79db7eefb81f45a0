"""Objects with their own loading code get the saved value; no live tensor is overwritten before they accept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast.errors import StateError
from tests.support.restoring import CountingStore, Ranks, publish
from tests.unit.trainer_side.restore.test_restore import assert_same, blobs_of, bring_back
from trainer_side.restore.restore import restore
from trainer_side.restore.torch_loading import Loading, loading_of, tensors_by_key
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import tensor_paths


def filled(module: nn.Module, value: float) -> Any:
    for tensor in module.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(value)
    return module


class Net(nn.Module):
    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4) if body is None else body
        self.head = nn.Linear(4, 2)


class KeepsItsHead(Net):
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        body = {key: value for key, value in state_dict.items() if not key.startswith("head.")}
        return super().load_state_dict(body, strict=False, assign=assign)


class Halves(nn.Linear):
    """A layer that saves twice its weights since version 2, and takes older files as they are."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class RefusesVersion(nn.Linear):
    _version = 3

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != 3:
            raise ValueError(f"version {local_metadata.get('version')} of a layer of version 3")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class HasExtraState(nn.Linear):
    extra = 1

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        if state["extra"] != self.extra:
            raise ValueError(f"made for {self.extra}, saved with {state['extra']}")


def rename(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}old_")]:
        state[prefix + key.removeprefix(f"{prefix}old_")] = state.pop(key)


def swap(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    one, two = f"{prefix}0.weight", f"{prefix}1.weight"
    state[one], state[two] = state[two], state[one]


def test_a_class_that_keeps_its_head_keeps_it_whatever_its_shape(tmp_path: Path) -> None:
    saved = filled(Net(), 1.0)
    saved.head = filled(nn.Linear(4, 9), 1.0)
    publish(tmp_path, 1, {"model": saved.state_dict()})
    model = filled(KeepsItsHead(), 5.0)
    bring_back({"model": model}, tmp_path)
    assert model.body.weight.eq(1).all()
    assert model.head.weight.eq(5).all()
    assert model.head.weight.shape == (2, 4)


def test_a_submodule_adapts_what_an_older_version_saved(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"model": filled(Net(), 8.0).state_dict()})
    model = filled(Net(Halves(4, 4)), 1.0)
    bring_back({"model": model}, tmp_path)
    assert model.body.weight.eq(4).all()
    assert model.head.weight.eq(8).all()


@pytest.mark.parametrize("public", [False, True])
def test_a_hook_of_a_submodule_renames(tmp_path: Path, public: bool) -> None:
    saved = {"body.old_weight": torch.full((4, 4), 3.0), "body.old_bias": torch.full((4,), 3.0)}
    head = filled(nn.Linear(4, 2), 3.0).state_dict(prefix="head.")
    publish(tmp_path, 1, {"model": {**saved, **head}})
    model = filled(Net(), 0.0)
    if public:
        model.body.register_load_state_dict_pre_hook(rename)
    else:
        model.body._register_load_state_dict_pre_hook(rename, with_module=True)
    bring_back({"model": model}, tmp_path)
    assert all(tensor.eq(3).all() for tensor in model.state_dict().values())


def test_a_hook_that_exchanges_two_names_is_not_read_through(tmp_path: Path) -> None:
    saved: Any = nn.Sequential(filled(nn.Linear(3, 3), 1.0), filled(nn.Linear(3, 3), 2.0))
    publish(tmp_path, 1, {"model": saved.state_dict()})
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_load_state_dict_pre_hook(swap)
    bring_back({"model": model}, tmp_path)
    assert model[0].weight.eq(2).all()
    assert model[1].weight.eq(1).all()


def test_a_state_dict_whose_hook_exchanges_names_is_loaded_by_the_names_of_the_file(tmp_path: Path) -> None:
    """The live tensors that `state_dict()` names are not those that torch loads under these names."""
    saved: Any = nn.Sequential(filled(nn.Linear(3, 3), 1.0), filled(nn.Linear(3, 3), 2.0))
    publish(tmp_path, 1, {"model": saved.state_dict()})
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model._register_state_dict_hook(swap)
    bring_back({"model": model}, tmp_path)
    assert model[0].weight.eq(1).all()
    assert model[1].weight.eq(2).all()


def test_a_state_dict_of_copies_is_loaded_into_the_live_tensors(tmp_path: Path) -> None:
    class Copies(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {key: value.clone() for key, value in super().state_dict(*args, **options).items()}

    publish(tmp_path, 1, {"model": filled(nn.Linear(3, 3), 6.0).state_dict()})
    model: Any = Copies(3, 3)
    bring_back({"model": model}, tmp_path)
    assert model.weight.eq(6).all()


def test_a_module_may_take_the_tensors_themselves(tmp_path: Path) -> None:
    class Assigns(nn.Linear):
        def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
            return super().load_state_dict(state_dict, assign=True)

    publish(tmp_path, 1, {"model": filled(nn.Linear(3, 3), 6.0).state_dict()})
    model = filled(Assigns(3, 3), 1.0)
    before = model.weight.data
    bring_back({"model": model}, tmp_path)
    assert model.weight.eq(6).all()
    assert before.eq(1).all()


def test_a_lazy_module_gets_its_shape(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"model": filled(nn.Linear(3, 2), 6.0).state_dict()})
    model: Any = nn.LazyLinear(2)
    bring_back({"model": model}, tmp_path)
    assert model.weight.shape == (2, 3)
    assert model.weight.eq(6).all()


def test_a_tensor_subclass_is_asked(tmp_path: Path) -> None:
    class Doubles(nn.Parameter):
        def copy_(self, other: torch.Tensor, *_: Any) -> Any:
            return torch.Tensor.copy_(self, other * 2)

    publish(tmp_path, 1, {"model": filled(nn.Linear(3, 3), 6.0).state_dict()})
    model: Any = nn.Linear(3, 3)
    model.weight = Doubles(torch.zeros(3, 3))
    bring_back({"model": model}, tmp_path)
    assert model.weight.eq(12).all()


# -- what refuses ----------------------------------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("not this one")


def _with(model: Any, register: Callable[[Any], Any]) -> Any:
    register(model)
    return model


class Guard:
    """No module: it changes its tensor and then refuses."""

    def __init__(self) -> None:
        self.tensor = torch.ones(5)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])
        raise ValueError("not this one")


REFUSING: dict[str, Callable[[], Any]] = {
    "override": type("Refuses", (Net,), {"load_state_dict": refuse}),
    "attribute": lambda: _with(Net(), lambda net: vars(net).update(load_state_dict=refuse)),
    "pre-hook": lambda: _with(Net(), lambda net: net.head.register_load_state_dict_pre_hook(refuse)),
    "old pre-hook": lambda: _with(Net(), lambda net: net.head._register_load_state_dict_pre_hook(refuse)),
    "post-hook": lambda: _with(Net(), lambda net: net.head.register_load_state_dict_post_hook(refuse)),
    "last submodule": lambda: nn.Sequential(nn.Linear(3, 3), RefusesVersion(3, 3)),
    "object": Guard,
}


@pytest.mark.parametrize("kind", REFUSING)
def test_an_object_that_refuses_stays_unchanged(tmp_path: Path, kind: str) -> None:
    value = REFUSING[kind]()
    before = copy.deepcopy([*tensor_paths(value.state_dict())])
    tree = value.state_dict()
    if isinstance(tree, dict) and hasattr(tree, "_metadata"):
        tree._metadata = {}
    other = copy.deepcopy(tree)
    for _, tensor in tensor_paths(other):
        tensor.fill_(7.0)
    publish(tmp_path, 1, {"x": other})
    with pytest.raises(StateError, match="x: load_state_dict"):
        bring_back({"x": value}, tmp_path)
    assert_same(dict(tensor_paths(value.state_dict())), dict(before))


def test_extra_state_may_refuse(tmp_path: Path) -> None:
    saved, model = filled(HasExtraState(3, 3), 7.0), filled(HasExtraState(3, 3), 1.0)
    saved.extra = 2
    publish(tmp_path, 1, {"x": saved.state_dict()})
    with pytest.raises(StateError, match="made for 1, saved with 2"):
        bring_back({"x": model}, tmp_path)
    assert model.weight.eq(1).all()


def test_a_per_rank_value_that_refuses_stays_unchanged(tmp_path: Path) -> None:
    saved = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 7.0)
    publish(tmp_path, 1, {"x": blobs_of([saved.state_dict()])})
    model = filled(nn.Sequential(nn.Linear(3, 3), RefusesVersion(3, 3)), 1.0)
    with pytest.raises(StateError, match="of a layer of version 3"):
        bring_back({"x": PerRank(model)}, tmp_path)
    assert all(tensor.eq(1).all() for tensor in model.state_dict().values())


def test_a_refusal_leaves_every_rank_unchanged(tmp_path: Path) -> None:
    saved = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 7.0)
    publish(tmp_path, 1, {"x": saved.state_dict()})
    models = [filled(nn.Sequential(nn.Linear(3, 3), RefusesVersion(3, 3)), 1.0) for _ in range(2)]
    _, errors = Ranks(2).outcomes(
        lambda peers: restore({"x": models[peers.rank]}, CountingStore(tmp_path), peers, events=None)
    )
    assert [type(error) for error in errors] == [StateError, StateError]
    for model in models:
        assert all(tensor.eq(1).all() for tensor in model.state_dict().values())


# -- optimizers ------------------------------------------------------------------------------------------------------


def stepped(kind: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


class RefusesAtTheEnd(torch.optim.Adam):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        raise ValueError("not this one")


class KeepsMoments(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": self.state_dict()["state"]})


@pytest.mark.parametrize("how", ["hook before", "hook after", "override"])
def test_an_optimizer_that_refuses_stays_unchanged(tmp_path: Path, how: str) -> None:
    publish(tmp_path, 1, {"x": stepped(torch.optim.Adam, nn.Linear(3, 2)).state_dict()})
    kind = RefusesAtTheEnd if how == "override" else torch.optim.Adam
    optimizer = stepped(kind, nn.Linear(3, 2))
    if how == "hook before":
        optimizer.register_load_state_dict_pre_hook(refuse)
    if how == "hook after":
        optimizer.register_load_state_dict_post_hook(refuse)
    held = [moment for of in optimizer.state.values() for moment in of.values()]
    before = copy.deepcopy(held)
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(StateError, match="not this one"):
        bring_back({"x": optimizer}, tmp_path)
    assert_same(held, before)
    assert_same([moment for of in optimizer.state.values() for moment in of.values()], before)
    assert optimizer.state_dict()["param_groups"] == groups


def test_an_optimizer_may_keep_its_moments(tmp_path: Path) -> None:
    saved = stepped(torch.optim.Adam, nn.Linear(3, 2))
    for moments in saved.state.values():
        moments["exp_avg"].fill_(9.0)
    publish(tmp_path, 1, {"x": saved.state_dict()})
    optimizer = stepped(KeepsMoments, nn.Linear(3, 2))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    bring_back({"x": optimizer}, tmp_path)
    assert_same(optimizer.state_dict()["state"], before)


def test_an_optimizer_may_have_a_state_of_another_form(tmp_path: Path) -> None:
    class Rates(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"rates": [group["lr"] for group in self.param_groups]}

        def load_state_dict(self, state_dict: Any) -> None:
            for group, rate in zip(self.param_groups, state_dict["rates"], strict=True):
                group["lr"] = rate

    publish(tmp_path, 1, {"x": {"rates": [0.5]}})
    optimizer = stepped(Rates, nn.Linear(3, 2))
    bring_back({"x": optimizer}, tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_moments_of_another_dtype_come_back_through_an_override(tmp_path: Path) -> None:
    class Says(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)

    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    saved = torch.optim.Adam([weight])
    saved.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 1.001)}
    publish(tmp_path, 1, {"x": saved.state_dict()})
    optimizer = Says([weight])
    bring_back({"x": optimizer}, tmp_path)
    assert_same(optimizer.state_dict()["state"], saved.state_dict()["state"])


def test_an_order_changed_by_a_hook_is_not_undone(tmp_path: Path) -> None:
    """Moments of another dtype than their parameter are put back as they were, but not over what the hook decided."""
    weights = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    saved = torch.optim.Adam(weights)
    for number, weight in enumerate(weights):
        saved.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), number + 0.001)}
    publish(tmp_path, 1, {"x": saved.state_dict()})
    optimizer = torch.optim.Adam(weights)

    def reverse(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {1 - number: of for number, of in state["state"].items()}}

    optimizer.register_load_state_dict_pre_hook(reverse)
    bring_back({"x": optimizer}, tmp_path)
    assert [round(float(optimizer.state[weight]["exp_avg"][0])) for weight in weights] == [1, 0]


# -- what is read in place -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning"
)  # torch.compile imports what it deprecates
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(3, 3), Loading.TORCH),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.InstanceNorm1d(3)), Loading.ADAPTED),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), Loading.ADAPTED),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), Loading.TORCH),
        (lambda: checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)))), Loading.TORCH),
        (lambda: torch.compile(nn.Linear(3, 3)), Loading.TORCH),
        (lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3)), Loading.TORCH),
        (lambda: nn.TransformerEncoderLayer(4, 2), Loading.TORCH),
    ],
)
def test_layers_and_wrappers_of_torch_are_read_in_place(
    tmp_path: Path, make: Callable[[], nn.Module], expected: Loading
) -> None:
    saved, model = make(), make()
    assert loading_of(model) is expected
    tree = saved.state_dict()
    publish(tmp_path, 1, {"model": tree})
    assert {key: value.data_ptr() for key, value in tensors_by_key(model).items()} == {
        key: value.data_ptr() for key, value in model.state_dict().items()
    }
    seen: dict[str, int] = {}
    genuine = nn.Module._load_from_state_dict

    def spy(self: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        if not seen:
            seen.update({key: value.data_ptr() for key, value in state.items()})
        genuine(self, state, prefix, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_load_from_state_dict", spy)
        bring_back({"model": model}, tmp_path)
    assert_same(model.state_dict(), tree)
    assert {*seen.values()} == {value.data_ptr() for value in model.state_dict().values()}


def test_a_file_of_an_older_batch_norm_is_completed_by_torch(tmp_path: Path) -> None:
    saved: Any = filled(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), 1.0).state_dict()
    del saved["1.num_batches_tracked"]
    saved._metadata["1"]["version"] = 1
    publish(tmp_path, 1, {"model": saved})
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].num_batches_tracked.fill_(4)
    bring_back({"model": model}, tmp_path)
    assert model[1].num_batches_tracked == 4
    assert model[1].running_mean.eq(1).all()


def test_a_file_of_an_older_weight_norm_is_renamed_by_torch(tmp_path: Path) -> None:
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    tree = new.state_dict()
    old = {
        "bias": tree["bias"],
        "weight_g": tree["parametrizations.weight.original0"],
        "weight_v": tree["parametrizations.weight.original1"],
    }
    publish(tmp_path, 1, {"model": old})
    model: Any = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    bring_back({"model": model}, tmp_path)
    assert_same(model.state_dict(), tree)
