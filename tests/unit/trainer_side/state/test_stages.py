"""Trees of ranks with different tensors are merged: each rank then has the same tensors in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.wire.layout_round import LayoutRound
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.state.optimizer_places import first_names, keyed_by_name, parameter_names
from trainer_side.state.pickling import load_structure
from trainer_side.state.skeleton import Capture, Skeleton, capture, plan
from trainer_side.state.sparse_file import SparseFile
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect

State = dict[str, Any]
CHUNK_BYTES = 4096


class Stage(nn.Module):
    """Some layers of a model, under the names of the whole model."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(3, 2) for layer in layers})
        for layer in layers:
            for parameter in self.layers[str(layer)].parameters():
                nn.init.constant_(parameter, layer)
        if 2 in layers:
            self.norm = nn.BatchNorm1d(2)


def stepped(*layers: int) -> State:
    stage = Stage(*layers)
    optimizer = torch.optim.AdamW(stage.parameters())
    for parameter in stage.parameters():
        parameter.grad = parameter.detach() * 0 + 1
    optimizer.step()
    return {"net": stage, "optimizer": optimizer, "epoch": 3}


def agreed(states: Sequence[State]) -> tuple[Agreement, list[Any]]:
    """Return the ranks' agreement, and their trees."""
    round_, answer = LayoutRound(len(states), 60), None
    trees = []
    names_of = [first_names(parameter_names(state)) for state in states]
    for rank, (state, names) in enumerate(zip(states, names_of, strict=True)):
        tree = keyed_by_name(collect(state), names, names)
        trees.append(tree)
        made = table(state, tree, rank=rank, ranks=len(states), names=names)
        answer = round_.propose(
            rank,
            Proposal(
                made.digest, made.rows, made.pickle_bytes, {}, made.sums, held=made.held, stage=made.stage
            ),
            0.0,
        )
    assert isinstance(answer, Agreement), answer
    assert answer.union is not None
    groups = answer.union.groups
    return answer, [
        keyed_by_name(collect(state), names, groups) for state, names in zip(states, names_of, strict=True)
    ]


def planned(states: Sequence[State]) -> list[tuple[Skeleton, Any]]:
    answer, trees = agreed(states)
    return [
        (
            plan(
                tree,
                classify(state, tree),
                rank=rank,
                ranks=len(states),
                chunk_bytes=CHUNK_BYTES,
                agreed=answer,
            ),
            tree,
        )
        for rank, (state, tree) in enumerate(zip(states, trees, strict=True))
    ]


def taken(skeleton: Skeleton, tree: Any) -> Capture:
    found = capture(tree, skeleton)
    assert found is not None
    return found


def test_all_ranks_lay_out_the_same_file_and_each_tensor_has_its_holders() -> None:
    states = [stepped(0, 1), stepped(2), stepped(2)]
    plans = planned(states)
    layouts = [skeleton.layout for skeleton, _ in plans]
    assert len({layout.digest for layout in layouts}) == 1
    layout = layouts[0]
    holders = {
        tensor.path: pattern.holders
        for tensor in layout.tensors
        if (pattern := layout.pattern_of(layout.entries[tensor.entry])) is not None
    }
    assert holders["net/layers.0.weight"] == ((0,),)
    assert holders["net/layers.2.weight"] == ((1, 2),)
    assert holders["net/norm.running_mean"] == ((1,),), "a buffer: that of the lowest rank"
    assert holders["optimizer/state/layers.2.bias/step"] == ((1, 2),)
    for rank, (skeleton, tree) in enumerate(plans):
        sources = taken(skeleton, tree).sources
        sent = {tensor.path for tensor in layout.tensors if sources[tensor.entry] is not None}
        own = {path for path, ranks in holders.items() if any(rank in some for some in ranks)}
        assert own <= sent, rank
    assert sum(layout.slice_bytes(rank) for rank in range(3)) == layout.image_bytes


def test_the_pickle_has_the_names_of_all_ranks_and_the_versions_of_their_modules() -> None:
    (first, tree), _ = planned([stepped(0), stepped(2)])
    pickled = taken(first, tree).contents[first.zip_parts.pickle_entry]
    for text in (b"layers.2.weight", b"layers.0.weight", b"norm.running_var", b"num_batches_tracked"):
        assert text in pickled
    modules = [*tree["net"]._metadata, "layers.2", "norm"]
    loaded = planned_versions(first, pickled)
    assert loaded.keys() == {*modules}
    assert loaded["norm"] == {"version": 2}, "of BatchNorm, which only the other rank has"


def planned_versions(skeleton: Skeleton, pickled: bytes) -> dict[str, Any]:
    """Return the versions that a plain `torch.load` finds beside the module's state."""
    entry = skeleton.layout.entries[skeleton.zip_parts.pickle_entry]
    loaded = load_structure(
        SparseFile.of(skeleton.literals, skeleton.layout.image_bytes, (entry.offset, pickled))
    )
    versions: dict[str, Any] = loaded["net"]._metadata
    return versions


def test_tensors_that_are_tied_on_one_rank_alone_have_places_of_their_own() -> None:
    tied = torch.ones(3)
    states: list[State] = [{"a": torch.zeros(2)}, {"b": tied, "c": tied}]
    layouts = [skeleton.layout for skeleton, _ in planned(states)]
    assert len({layout.digest for layout in layouts}) == 1
    entry_of = {tensor.path: tensor.entry for tensor in layouts[1].tensors}
    assert len({*entry_of.values()}) == 3


def test_a_plan_holds_while_the_tensors_do_and_no_longer() -> None:
    states = [stepped(0), stepped(2)]
    for rank, (skeleton, tree) in enumerate(planned(states)):
        assert capture(tree, skeleton) is not None
        with torch.no_grad():
            next(states[rank]["net"].parameters()).add_(1)
        assert capture(tree, skeleton) is not None
        assert capture({**tree, "more": torch.zeros(2)}, skeleton) is None
        fewer = {**tree, "net": {**tree["net"]}}
        fewer["net"].popitem()
        assert capture(fewer, skeleton) is None
        moved = {**tree, "net": dict(reversed(tree["net"].items()))}
        again = capture(moved, skeleton)
        assert (again is None) == (rank == 0), "only rank 0 writes its order"


def test_optimizers_are_keyed_by_name_as_torch_keys_them() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = stepped(0, 2)
    names = first_names(parameter_names(state))
    ours = keyed_by_name(collect(state), names, names)["optimizer"]
    theirs: Any = get_optimizer_state_dict(state["net"], state["optimizer"])
    assert ours["state"].keys() == theirs["state"].keys()
    assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
    for name, moments in ours["state"].items():
        assert all(torch.equal(one, theirs["state"][name][key]) for key, one in moments.items())


def test_parameters_without_a_name_of_their_own_are_refused_by_name() -> None:
    state = stepped(0)
    lone = torch.optim.SGD([*state["net"].parameters(), torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(StateError, match=r"optimizer: parameter 2 of group 0, of shape \[3\]"):
        parameter_names({**state, "optimizer": lone})
    other = Stage(0)
    both = torch.optim.SGD([*state["net"].parameters(), *other.parameters()])
    with pytest.raises(StateError, match=r"two of its parameters are named layers\.0\.weight"):
        parameter_names({"net": state["net"], "other": other, "optimizer": both})


def test_a_tensor_that_lies_scattered_is_refused_by_name() -> None:
    states = [{"a": torch.zeros(2)}, {"b": torch.zeros(2, 3).T}]
    round_, answer = LayoutRound(2, 60), None
    for rank, state in enumerate(states):
        made = table(state, state, rank=rank, ranks=2, names={})
        answer = round_.propose(
            rank, Proposal(made.digest, made.rows, 1, {}, held=made.held, stage=made.stage), 0.0
        )
    assert isinstance(answer, StateError)
    assert "rank 1: b does not lie in one piece" in str(answer)
