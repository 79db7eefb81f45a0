"""A data.pkl that is made after `save()` has returned has the state at `save()`, byte for byte."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from holdfast.errors import StateError
from tests.unit.trainer_side.assemble import make_plan, taken
from trainer_side.state import recall as recall_module
from trainer_side.state.per_rank import PerRank
from trainer_side.state.recall import Snapshot, snapshot
from trainer_side.state.skeleton import Capture, Outgrown, Skeleton, capture
from trainer_side.state.tree import collect

State = dict[str, Any]


class _Counts:
    """An object whose `state_dict()` returns its live values."""

    def __init__(self) -> None:
        self.saved: State = {"epoch": 0, "loss": 0.5, "names": ["a", "b"], "deep": {"er": [(1, [2])], 3: {}}}

    def state_dict(self) -> State:
        return self.saved


def _state() -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": [*model[1].parameters(), model[2].bias]},
    ]
    optimizer = torch.optim.AdamW(groups)  # the groups share one tuple of betas
    box = [torch.ones(2)]
    ordered: Any = OrderedDict(b=[1], a=torch.ones(2))
    ordered.mine = {"version": [1]}
    state: State = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),  # has a Counter
        "counts": _Counts(),
        "rng": PerRank({"seed": 1}),
        "pair": [torch.ones(3), torch.zeros(3)],
        "twice": [torch.ones(2)] * 2,
        "boxes": [box, [torch.zeros(2)], box],
        "tuple": (torch.ones(1), "of both"),
        "ordered": ordered,
        "extra": {},
    }
    _train(state)
    return state


def _train(state: State) -> None:
    state["model"](torch.ones(2, 4)).sum().backward()
    for name in ("optimizer", "scheduler"):
        state[name].step()


def _ready(state: State) -> Skeleton:
    skeleton = make_plan(state, reserve=65536)
    taken(state, skeleton)
    return skeleton


def _captured(state: State, skeleton: Skeleton) -> Capture:
    found = capture(collect(state), skeleton, defer=True)
    assert found is not None
    return found


def _saved(state: State) -> State:
    found: State = state["counts"].saved
    return found


def _groups(state: State, **values: Any) -> None:
    for group in state["optimizer"].param_groups:
        group.update(values)


def _spoil(state: State) -> None:
    """Change the state as a script may after `save()` and before its next update, and more."""
    saved = _saved(state)
    saved["names"].append("c")
    saved["deep"]["er"][0][1].append(4)
    saved["deep"][3]["more"] = 5
    saved.update(epoch=99, loss="gone", new=[6])
    state["ordered"].mine["version"].append(2)
    state["ordered"]["b"].clear()
    state["ordered"].move_to_end("b")
    state["pair"].reverse()
    state["extra"]["tensor"] = torch.ones(1)
    state["optimizer"].param_groups[0].update(lr=77.0, new=1)
    for moments in state["optimizer"].state.values():
        moments.clear()
    state["scheduler"].last_epoch = 1000
    state["scheduler"].milestones.clear()
    state["boxes"][0].append(3)


VALUES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda state: None,
    "a step": _train,
    "numbers": lambda state: _saved(state).update(epoch=7, loss=float("nan")),
    "an int becomes a float": lambda state: _saved(state).update(epoch=1.0),
    "a float becomes nothing": lambda state: _saved(state).update(loss=None),
    "a large int": lambda state: _saved(state).update(epoch=10**40),
    "another string of the same length": lambda state: _saved(state).update(names=["c", "é"]),
    "a longer string": lambda state: _saved(state).update(names=["a", "bc"]),
    "a much longer string": lambda state: _saved(state).update(names=["€" * 5000, "a"]),
    "a shorter string": lambda state: _saved(state).update(names=["", "b"]),
    "a number becomes a string": lambda state: _saved(state).update(loss="x"),
    "a word that is a key, too": lambda state: _saved(state).update(names=["b", "a"]),
    "an attribute": lambda state: setattr(state["ordered"], "mine", {"version": [8]}),
    "swapped tensors": lambda state: state["pair"].reverse(),
    "a count": lambda state: state["scheduler"].milestones.update([3]),
    "new metadata of a module": lambda state: state["model"].register_state_dict_post_hook(
        lambda _module, saved, *_: saved._metadata.update(more="x")
    ),
    "other betas": lambda state: _groups(state, betas=(0.8, 0.99)),
    "another of the containers is there twice": lambda state: state["boxes"].__setitem__(
        2, state["boxes"][1]
    ),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_deferred_pickle_says_what_was_there_at_save(what: str) -> None:
    state = _state()
    skeleton = _ready(state)
    VALUES[what](state)
    expected = taken(state, skeleton).contents
    late = _captured(state, skeleton)
    assert late.deferred is not None
    assert skeleton.zip_parts.pickle_entry not in late.contents
    _spoil(state)
    del state
    gc.collect()
    assert {**late.contents, **late.deferred.contents()} == expected


NOT_DEFERRED: dict[str, Callable[[State], Any]] = {
    "bytes instead of a string": lambda state: _saved(state).update(names=["a", b"b"]),
    "a complex number": lambda state: _saved(state).update(loss=1j),
    "a list becomes a tuple": lambda state: _saved(state).update(names=("a", "b")),
    "a dict becomes an OrderedDict": lambda state: state.update(extra=OrderedDict()),
    "an object of another class": lambda state: _saved(state).update(loss=torch.float32),
    "something in a set": lambda state: _saved(state).update(loss={1}),
    "a Counter becomes a dict": lambda state: setattr(state["scheduler"], "milestones", {1: 1, 3: 1}),
    "a dict becomes a Counter": lambda state: state.update(extra=Counter()),
    "a container that is not shared any more": lambda state: (
        state["optimizer"].param_groups[1].update(betas=(0.8, 0.99))
    ),
    "a container twice": lambda state: _saved(state).update(loss=_saved(state)["names"]),
    "an attribute of another class": lambda state: setattr(state["ordered"], "mine", {1}),
}


@pytest.mark.parametrize("what", NOT_DEFERRED)
def test_where_a_copy_may_not_keep_it_or_it_may_not_fit_it_is_made_at_once(what: str) -> None:
    state = _state()
    skeleton = _ready(state)
    assert _captured(state, skeleton).deferred is not None
    NOT_DEFERRED[what](state)
    found = _captured(state, skeleton)
    assert found.deferred is None
    assert found.contents == taken(state, skeleton).contents


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda _: 0.9),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 3]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.StepLR(optimizer, 2)], milestones=[2]
    ),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler([schedulers.StepLR(optimizer, 2)]),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 4),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, 9),
    "PolynomialLR": schedulers.PolynomialLR,
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step"
)  # that of torch itself, before 2.9
@pytest.mark.parametrize("name", sorted({*schedulers.__all__} - {"LRScheduler"}))
def test_with_each_of_torchs_schedulers_and_groups_of_parameters_it_is_left_for_later(name: str) -> None:
    model = torch.nn.Linear(4, 4)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    state = {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}
    skeleton = None
    for _ in range(4):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        state["scheduler"].step(*([0.5] if name == "ReduceLROnPlateau" else []))
        if skeleton is None:
            skeleton = _ready(state)
        expected = taken(state, skeleton).contents
        late = _captured(state, skeleton)
        assert late.deferred is not None
        assert {**late.contents, **late.deferred.contents()} == expected


def test_a_value_that_torch_would_not_load_is_refused_at_once_and_named() -> None:
    state = _state()
    skeleton = _ready(state)
    _saved(state)["names"] = ["a long one", frozenset()]  # which has a pickle of its own
    with pytest.raises(StateError, match="counts/names/1"):
        _captured(state, skeleton)


def test_text_that_may_have_outgrown_the_room_is_pickled_at_once_and_then_its_size_is_known() -> None:
    state = _state()
    used = len(_captured(state, _ready(state)).deferred.contents()[0].rstrip(b"\0"))  # type: ignore[union-attr]
    skeleton = make_plan(state, reserve=used + 2000)
    _saved(state)["names"] = ["a", "b" * 300]
    found = _captured(state, skeleton)
    assert found.deferred is None, "it might be characters of four bytes each"
    assert found.contents == taken(state, skeleton).contents
    assert _captured(state, skeleton).deferred is not None


def test_a_room_that_is_nearly_full_is_not_trusted_to_be_enough() -> None:
    state = _state()
    used = len(_captured(state, _ready(state)).deferred.contents()[0].rstrip(b"\0"))  # type: ignore[union-attr]
    for spare, deferred in ((2000, True), (500, False)):
        skeleton = make_plan(state, reserve=used + spare)
        assert (_captured(state, skeleton).deferred is not None) == deferred


def test_numbers_that_take_more_than_all_of_the_room_are_refused_late_once_and_then_at_once() -> None:
    state = _state()
    _saved(state)["names"] = [1] * 400
    skeleton = _ready(state)
    _saved(state)["names"] = [1 << 2000] * 400
    late = _captured(state, skeleton).deferred
    assert late is not None
    with pytest.raises(Outgrown) as caught:
        late.contents()
    assert caught.value.needed_bytes > 70_000
    with pytest.raises(Outgrown):
        _captured(state, skeleton)
    _saved(state)["names"] = [2] * 400
    assert _captured(state, skeleton).contents == taken(state, skeleton).contents, (
        "in full, and recalled again"
    )
    assert _captured(state, skeleton).deferred is not None


def test_a_deferred_pickle_keeps_no_tensor_alive() -> None:
    state = _state()
    skeleton = _ready(state)
    watched = [
        weakref.ref(tensor) for tensor in (*state["pair"], *state["twice"], *state["model"].parameters())
    ]
    late = _captured(state, skeleton).deferred
    assert late is not None
    del state
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    late.contents()


def test_a_deferred_pickle_leaves_little_python_per_tensor_to_save() -> None:
    calls = []
    for layers in (10, 60):
        model = torch.nn.ParameterList([torch.ones(2) for _ in range(layers)])
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones(2)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "note": 0}
        skeleton = make_plan(state, ranks=2)
        taken(state, skeleton)
        state["note"] = 1
        tree = collect(state)
        count = 0

        def counted(_frame: FrameType, event: str, _argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            found = capture(tree, skeleton, defer=True)
        finally:
            sys.setprofile(None)
        assert found is not None
        assert found.deferred is not None
        calls.append(count)
    assert calls[1] - calls[0] <= 4 * (60 - 10), (
        "one for a tensor, at most: seven where the pickle is made at once"
    )


def test_snapshots_that_are_pickled_in_another_way_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without snapshots saves are slower, but still correct."""
    state = _state()

    def wrong(tree: Any, known: Any) -> Snapshot | None:
        made = snapshot(tree, known)
        assert made is not None
        return made._replace(tree={**made.tree, "counts": {}})

    monkeypatch.setattr(recall_module, "snapshot", wrong)
    skeleton = _ready(state)
    found = _captured(state, skeleton)
    assert found.deferred is None
    assert found.contents == taken(state, skeleton).contents
