"""A data.pkl that is made after `save()` has returned says what was in the state at `save()`, byte for byte."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from tests.unit.trainer_side.assemble import make_plan, taken
from trainer_side import recall as recall_module
from trainer_side.per_rank import PerRank
from trainer_side.skeleton import Capture, Outgrown, Skeleton, capture
from trainer_side.snapshot import Snapshot, snapshot
from trainer_side.state import collect

State = dict[str, Any]


class _Counts:
    """Anything with a `state_dict()` that gives away what it goes on with."""

    def __init__(self) -> None:
        self.saved: State = {"epoch": 0, "loss": 0.5, "names": ["a", "b"], "deep": {"er": [(1, [2])], 3: {}}}

    def state_dict(self) -> State:
        return self.saved


def _state() -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    ordered: Any = OrderedDict(b=[1], a=torch.ones(2))
    ordered.mine = {"version": [1]}
    state: State = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "counts": _Counts(),
        "rng": PerRank({"seed": 1}),
        "pair": [torch.ones(3), torch.zeros(3)],
        "twice": [torch.ones(2)] * 2,
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


def _spoil(state: State) -> None:
    """What a script may do after `save()` and before its next update; and more."""
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


VALUES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda state: None,
    "a step": _train,
    "numbers": lambda state: _saved(state).update(epoch=7, loss=float("nan")),
    "an int becomes a float": lambda state: _saved(state).update(epoch=1.0),
    "a float becomes nothing": lambda state: _saved(state).update(loss=None),
    "a large int": lambda state: _saved(state).update(epoch=10**40),
    "another string of the same length": lambda state: _saved(state).update(names=["c", "é"]),
    "a word that is a key, too": lambda state: _saved(state).update(names=["b", "a"]),
    "an attribute": lambda state: setattr(state["ordered"], "mine", {"version": [8]}),
    "swapped tensors": lambda state: state["pair"].reverse(),
}


@pytest.mark.parametrize("what", VALUES)
def test_it_says_what_was_there_whatever_becomes_of_the_state(what: str) -> None:
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
    "a longer string": lambda state: _saved(state).update(names=["a", "bc"]),
    "longer bytes": lambda state: _saved(state).update(names=["a", b"bc"]),
    "nothing becomes a string": lambda state: _saved(state).update(loss="x"),
    "a list becomes a tuple": lambda state: _saved(state).update(names=("a", "b")),
    "a dict becomes an OrderedDict": lambda state: state.update(extra=OrderedDict()),
    "an object of another class": lambda state: _saved(state).update(loss=torch.float32),
    "something in a set": lambda state: _saved(state).update(loss={1}),
    "a container twice": lambda state: _saved(state).update(loss=_saved(state)["names"]),
    "an attribute of another class": lambda state: setattr(state["ordered"], "mine", {1}),
    "new metadata of a module": lambda state: state["model"].register_state_dict_post_hook(
        lambda _module, saved, *_: saved._metadata.update(more="x")
    ),
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


def test_a_text_that_has_grown_is_known_at_the_next_one() -> None:
    state = _state()
    skeleton = _ready(state)
    _saved(state)["names"] = ["a", "b" * 100]
    assert _captured(state, skeleton).deferred is None
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


def test_it_keeps_no_tensor_alive() -> None:
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


def test_it_leaves_little_python_per_tensor_to_the_save() -> None:
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
    """Whatever the reason: then saves are as slow as they were, and not wrong."""
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
