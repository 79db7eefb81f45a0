"""A recalled capture equals a full capture byte for byte, at almost no cost per tensor."""

from __future__ import annotations

import collections
import gc
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import StateError
from tests.support.seeds import each_seed
from tests.unit.trainer_side.assemble import make_plan, sent, taken
from trainer_side.state import skeleton as skeleton_module
from trainer_side.state.per_rank import PerRank
from trainer_side.state.pickling import Pickling
from trainer_side.state.recall import FastPickling, StandIn
from trainer_side.state.skeleton import Capture, Skeleton, capture
from trainer_side.state.survey import survey
from trainer_side.state.tree import collect

State = dict[str, Any]
CHANCE = random.Random(0)


class _Reference:
    """Captures a state twice, recalled and in full, and compares all that can be seen of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.surveys = 0
        self._monkeypatch = monkeypatch

        def counted(tree: Any) -> Any:
            self.surveys += 1
            return survey(tree)

        monkeypatch.setattr(skeleton_module, "survey", counted)

    def compare(self, state: Mapping[str, Any], skeleton: Skeleton) -> bool | None:
        """Whether it was recalled; None if the plan does not fit any more. Fails if the two differ."""
        tree = collect(state)
        self.surveys = 0
        quick = _outcome(lambda: capture(tree, skeleton))
        recalled = self.surveys == 0
        kept = list(skeleton._recalls)
        skeleton._recalls.clear()
        full = _outcome(lambda: capture(tree, skeleton))
        skeleton._recalls[:] = kept
        assert isinstance(quick, Capture) == isinstance(full, Capture), (quick, full)
        if not isinstance(quick, Capture) or not isinstance(full, Capture):
            assert quick == full
            return None if quick is None else False
        assert quick.contents == full.contents
        assert quick.signature == full.signature
        assert [_described(source) for source in quick.sources] == [
            _described(source) for source in full.sources
        ]
        assert sent(skeleton, quick) == sent(skeleton, full)
        return recalled


def _outcome(capture_it: Callable[[], Capture | None]) -> Capture | tuple[str, str] | None:
    try:
        return capture_it()
    except StateError as error:
        return type(error).__name__, str(error)


def _described(source: Any) -> Any:
    return source and (*source._replace(storage=source.storage._cdata),)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> _Reference:
    return _Reference(monkeypatch)


# -- a state, and what may happen to it --------------------------------------------------------------------------


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.embed(ids)))
        return result


class _Counts:
    """Anything with a `state_dict()`."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {"epoch": 0, "names": ["a", "b"], "best": None}

    def state_dict(self) -> dict[str, Any]:
        return self.saved


def _state() -> State:
    torch.manual_seed(0)
    model = _Net()
    groups: list[State] = [
        {"params": model.body.parameters()},
        {"params": [model.head.weight, model.head.bias], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    momentum = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(0.1), momentum=0.9)
    box = [torch.ones(1)]
    state: State = {
        "model": model,
        "optimizer": optimizer,
        "momentum": momentum,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        "counts": _Counts(),
        "rng": PerRank({"seed": 1, "state": torch.zeros(4)}),
        "lone": torch.nn.Parameter(torch.ones(2, 2)),
        "views": list(torch.arange(12.0).reshape(3, 4)),
        "pair": [torch.ones(3), torch.zeros(3)],
        "wave": torch.zeros(2, dtype=torch.complex64),
        "twice": [torch.ones(2)] * 2,
        "window": torch.arange(20.0)[4:9],
        "named": {"tensor": torch.ones(7)},
        "boxes": [box, box, [torch.ones(1)]],
        "set": {1},
        "ordered": _ordered(1),
        "extra": {},
    }
    _train(state)
    return state


def _train(state: State) -> None:
    state["model"](torch.tensor([0, 1, 2])).sum().backward()
    for parameter in state["momentum"].param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    for name in ("optimizer", "momentum", "scheduler"):
        state[name].step()


def _move(state: State) -> None:
    """Every parameter and moment comes to lie somewhere else."""
    for parameter in state["model"].parameters():
        parameter.data = parameter.data.clone()
    for moments in state["optimizer"].state.values():
        for name, value in moments.items():
            moments[name] = value.clone()


def _plain(state: State) -> State:
    found: State = state["counts"].saved
    return found


def _group(state: State) -> State:
    found: State = state["optimizer"].param_groups[0]
    return found


# What changes values only: the plan holds, and nothing needs to be surveyed.
VALUES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda state: None,
    "a step": _train,
    "moved tensors": _move,
    "learning rate": lambda state: _group(state).update(lr=CHANCE.random()),
    "an int becomes a float": lambda state: _plain(state).update(epoch=1.0),
    "an int becomes true": lambda state: _plain(state).update(epoch=True),
    "minus zero": lambda state: _plain(state).update(epoch=-0.0),
    "not a number": lambda state: _plain(state).update(best=float("nan")),
    "a large int": lambda state: _plain(state).update(epoch=10**40),
    "another string": lambda state: _plain(state).update(best="x" * CHANCE.randrange(300)),
    "words of torch": lambda state: _plain(state).update(best=CHANCE.choice(["storage", "cpu", "0", "7"])),
    "one string twice": lambda state: _plain(state).update(names=["word w"] * 2),
    "two equal strings": lambda state: _plain(state).update(names=["word w", "word " + chr(119)]),
    "a value of its own rank": lambda state: state["rng"].value.update(seed=CHANCE.random()),
    "a tensor of its own rank": lambda state: state["rng"].value["state"].normal_(),
    "metadata": lambda state: state["model"].register_state_dict_post_hook(_note),
    "swapped tensors": lambda state: state["pair"].reverse(),
    "new window": lambda state: state.update(window=torch.arange(20.0)[4:9]),
}

# What the plan does not depend on, but the pickle, or the places of tensors in the tree.
OTHER_TREE: dict[str, Callable[[State], Any]] = {
    "a plain value more": lambda state: _plain(state).update(more=[1, (2, "3")]),
    "a plain value less": lambda state: _plain(state).pop("names", None),
    "a plain value renamed": lambda state: _plain(state).update(renamed=_plain(state).pop("epoch", 0)),
    "a list instead of a number": lambda state: _plain(state).update(epoch=[1]),
    "a container twice": lambda state: _plain(state).update(
        a=_plain(state)["names"], b=_plain(state)["names"]
    ),
    "itself": lambda state: _plain(state).update(me=_plain(state)),
    "an ordered dict": lambda state: _plain(state).update(best=state["model"].state_dict()._metadata),
    "slid window": lambda state: state.update(window=torch.arange(20.0)[6:11]),
    "larger storage": lambda state: state.update(window=torch.arange(30.0)[4:9]),
    "requires grad": lambda state: state["lone"].requires_grad_(not state["lone"].requires_grad),
    "attributes of a tensor": lambda state: setattr(state["lone"], "mine", [1]),
    "a parameter becomes a tensor": lambda state: state.update(lone=torch.ones(2, 2)),
    "conjugate": lambda state: state.update(wave=state["wave"].conj()),
    "negative": lambda state: state["pair"].__setitem__(0, torch._neg_view(state["pair"][0])),
    "a size": lambda state: _plain(state).update(best=torch.ones(2, 3).shape),
    "a dtype": lambda state: _plain(state).update(best=torch.bfloat16),
    "two objects instead of one": lambda state: state.update(
        twice=[state["twice"][0], state["twice"][0].detach()]
    ),
}

# What the plan does not fit.
OTHER_TENSORS: dict[str, Callable[[State], Any]] = {
    "new": lambda state: state["extra"].update(tensor=torch.ones(1)),
    "renamed": lambda state: state["named"].update(other=state["named"].pop("tensor")),
    "another of the containers twice": lambda state: state.update(
        boxes=[state["boxes"][place] for place in (0, 2, 0)]
    ),
    "gone": lambda state: state["views"].pop(),
    "larger": lambda state: state.update(window=torch.arange(20.0)[4:10]),
    "another dtype": lambda state: state.update(window=torch.arange(20)[4:9]),
    "another dtype of the same size": lambda state: state.update(
        window=torch.arange(20, dtype=torch.int32)[4:9]
    ),
    "other strides": lambda state: state.update(lone=torch.nn.Parameter(torch.ones(2, 2).t())),
    "tied": lambda state: state["pair"].__setitem__(1, state["pair"][0].detach()),
    "untied": lambda state: setattr(state["model"].head, "weight", torch.nn.Parameter(torch.ones(5, 4))),
    "one storage instead of two": lambda state: state.update(
        twice=[state["views"][0][:2], state["views"][0][:2]]
    ),
    "two storages instead of one": lambda state: state.update(twice=[torch.ones(2), torch.ones(2)]),
    "an int instead of a step": lambda state: [
        moments.update(step=7) for moments in state["optimizer"].state.values()
    ],
    "a key that reads the same": lambda state: state.update(
        views={str(i): v for i, v in enumerate(state["views"][:2])}
    ),
}

# What cannot be saved: said by the capture in full.
REFUSED: dict[str, Callable[[State], Any]] = {
    "a subclass": lambda state: state.update(window=torch.ones(5).as_subclass(_Subclass)),
    "sparse": lambda state: state.update(window=torch.ones(5).to_sparse()),
    "nested": lambda state: state.update(window=_nested()),
    "quantised": lambda state: state.update(
        window=torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.quint8)
    ),
    "meta": lambda state: state.update(window=torch.arange(20.0, device="meta")[4:9]),
    "given back": lambda state: state["window"].untyped_storage().resize_(0),
    "a bare storage": lambda state: _plain(state).update(best=torch.ones(2).untyped_storage()),
    "a tensor in a set": lambda state: state["set"].add(torch.ones(2)),
    "a new class in a set": lambda state: state["set"].add(np.float64(2.5)),
    "a class of Python's own in a set": lambda state: state["set"].add(frozenset()),
    "a storage in a set": lambda state: state["set"].add(torch.ones(2).untyped_storage()),
    "a tensor in an object": lambda state: _plain(state).update(best=_Holder(torch.ones(2))),
    "a tensor as attribute of a dict": lambda state: setattr(state["ordered"], "mine", torch.ones(2)),
    "a class of its own": lambda state: _plain(state).update(best=_Holder(1)),
    "a function": lambda state: _plain(state).update(best=lambda: None),
    "too much": lambda state: _plain(state).update(best="x" * 100_000),
    "too much of its own rank": lambda state: state["rng"].value.update(seed="x" * 100_000),
}


class _Subclass(torch.Tensor):
    pass


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def _ordered(attribute: Any) -> Any:
    made: Any = collections.OrderedDict()
    made.mine = attribute
    return made


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        return torch.nested.nested_tensor([torch.ones(5)])


def _note(module: torch.nn.Module, saved: Any, prefix: str, metadata: State) -> None:
    saved._metadata["more"] = [1]


def _ready(state: State) -> Skeleton:
    """A plan, and a capture in full."""
    skeleton = make_plan(state, reserve=65536)
    taken(state, skeleton)
    assert skeleton._recalls, "the state is of a kind that can be recalled"
    return skeleton


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_capture_needs_no_second_look(rank: int, reference: _Reference) -> None:
    state = _state()
    skeleton = make_plan(state, rank=rank, ranks=2, reserve=65536)
    assert reference.compare(state, skeleton), "what the plan has found is recalled, and the same"


@pytest.mark.parametrize("what", VALUES)
def test_where_only_values_change_the_capture_is_recalled(what: str, reference: _Reference) -> None:
    state = _state()
    skeleton = _ready(state)
    before = taken(state, skeleton)
    VALUES[what](state)
    assert reference.compare(state, skeleton), "recalled, and the same"
    if what not in ("nothing", "moved tensors", "a tensor of its own rank", "swapped tensors", "new window"):
        assert taken(state, skeleton).contents != before.contents, "the new values are in it"


@pytest.mark.parametrize("what", OTHER_TREE)
def test_another_tree_is_captured_in_full_and_recalled_then(what: str, reference: _Reference) -> None:
    state = _state()
    skeleton = _ready(state)
    OTHER_TREE[what](state)
    found = reference.compare(state, skeleton)
    if found is None:  # the plan does not fit either
        skeleton = make_plan(state, reserve=65536)
        taken(state, skeleton)
    else:
        assert found is False
    again = reference.compare(state, skeleton)
    assert again is (what not in NEVER_RECALLED)


NEVER_RECALLED = {"attributes of a tensor"}


@pytest.mark.parametrize("what", OTHER_TENSORS)
def test_other_tensors_need_another_plan(what: str, reference: _Reference) -> None:
    state = _state()
    skeleton = _ready(state)
    OTHER_TENSORS[what](state)
    assert reference.compare(state, skeleton) is None


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_that_cannot_be_saved_is_refused_as_ever(what: str, reference: _Reference) -> None:
    state = _state()
    skeleton = _ready(state)
    REFUSED[what](state)
    assert reference.compare(state, skeleton) is False


@each_seed(3)
def test_over_many_random_changes_both_captures_are_the_same(seed: int, reference: _Reference) -> None:
    CHANCE.seed(seed)
    state = _state()
    skeleton = _ready(state)
    recalled = 0
    changes = {**VALUES, **OTHER_TREE, **OTHER_TENSORS}
    del changes["an int instead of a step"]  # AdamW cannot go on with it
    for count in range(40):
        what = CHANCE.choice([*(VALUES if CHANCE.random() < 0.7 else changes)])
        if count % 15 == 14:
            state = _state()
        try:
            changes[what](state)
        except (KeyError, IndexError, TypeError, RuntimeError):
            state = _state()  # it has gone too far to be changed like this
        found = reference.compare(state, skeleton)
        recalled += found is True
        if found is None:
            skeleton = make_plan(state, reserve=65536)
            taken(state, skeleton)
    assert recalled > 8


TYING: dict[str, Callable[[State], Any]] = {
    "one storage": lambda state: state.update(b=state["a"].detach()),
    "one object": lambda state: state.update(b=state["a"]),
    "one storage, another part": lambda state: state.update(b=torch.ones(6)[3:], a=torch.ones(3)),
    "both parts of one storage": lambda state: state.update(
        zip("ab", torch.arange(6.0).reshape(2, 3), strict=True)
    ),
}


@pytest.mark.parametrize("what", TYING)
def test_tensors_that_all_differed_and_no_longer_do_are_seen_at_once(
    what: str, reference: _Reference
) -> None:
    state: State = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(3)}
    skeleton = _ready(state)
    assert reference.compare(state, skeleton)
    TYING[what](state)
    assert not reference.compare(state, skeleton), "not what was known"


def test_tied_tensors_that_are_tied_to_others_are_seen_at_once(reference: _Reference) -> None:
    one, other = torch.ones(3), torch.zeros(3)
    state: State = {"a": one, "b": one.detach(), "c": other, "d": one.detach()}
    skeleton = _ready(state)
    assert reference.compare(state, skeleton)
    state["d"] = other.detach()
    assert reference.compare(state, skeleton) is None


def test_a_rank_that_sends_no_pickle_recalls_too(reference: _Reference) -> None:
    state = _state()
    skeleton = make_plan(state, rank=1, ranks=2)
    taken(state, skeleton)
    for what in ("a step", "moved tensors", "another string", "a value of its own rank"):
        VALUES[what](state)
        assert reference.compare(state, skeleton), what
    _plain(state)["best"] = {torch.ones(2)}
    assert reference.compare(state, skeleton) is False, "not the same outline"


# -- what it costs -----------------------------------------------------------------------------------------------


def _calls(call: Callable[[], Any]) -> int:
    """How many functions written in Python run in `call`."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def _many(parameters: int) -> State:
    model = torch.nn.ParameterList([torch.ones(2) for _ in range(parameters)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": 0}


@pytest.mark.parametrize(("rank", "calls_per_tensor"), [(0, 7), (1, 2)])
def test_a_recalled_capture_runs_little_python_per_tensor(rank: int, calls_per_tensor: int) -> None:
    calls = []
    for parameters in (20, 120):
        state = _many(parameters)
        skeleton = make_plan(state, rank=rank, ranks=2)
        taken(state, skeleton)
        state["note"] = 1
        tree = collect(state)
        calls.append(_calls(lambda tree=tree, skeleton=skeleton: capture(tree, skeleton)))  # type: ignore[misc]
    tensors = 4 * (120 - 20)
    assert calls[1] - calls[0] <= calls_per_tensor * tensors


@pytest.mark.parametrize("recalled", [True, False])
def test_a_recall_keeps_no_tensor_alive(recalled: bool) -> None:
    state = {"w": torch.ones(3), "p": torch.nn.Parameter(torch.ones(3)), "note": 1}
    skeleton = _ready(state)
    watched = [weakref.ref(state["w"]), weakref.ref(state["p"])]
    if not recalled:
        state["more"] = 2
    gc.collect()
    gc.disable()  # memory is to be given back at once
    try:
        captured: Any = taken(state, skeleton)
        del state, captured
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


# -- the proof ---------------------------------------------------------------------------------------------------


def test_a_recall_that_does_not_prove_itself_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should torch come to pickle tensors in another way, saves get slower, and not wrong."""
    state = _many(2)
    skeleton = make_plan(state)
    expected = taken(state, skeleton).contents
    skeleton._recalls.clear()
    pickled = FastPickling.pickle

    def wrong(ready: FastPickling, value: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]]:
        data, kinds = pickled(ready, value, stand_ins)
        return data.replace(b"exp_avg", b"exp_abc"), kinds

    monkeypatch.setattr(FastPickling, "pickle", wrong)
    for _ in range(2):
        assert taken(state, skeleton).contents == expected
        assert not skeleton._recalls


def test_a_tensor_that_was_not_pickled_cannot_be_pickled_again() -> None:
    tree = {"w": torch.ones(3)}
    job = Pickling(survey(tree))
    assert FastPickling.of(job, [tree["w"]]) is None
    job.pickle(tree)
    assert FastPickling.of(job, [tree["w"]]) is not None
