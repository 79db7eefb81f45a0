"""The fast search for DTensors in a later tree finds the same as a slow one, at the cost of a loop in C."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_side.state.split_tensor import Split
from trainer_side.state.stand_ins import ExpandedTree, SplitStandIns

RANKS = 2
ROWS, WIDTH = 4, 3  # of a local tensor


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def _split(
    mesh: DeviceMesh, *, rows: int = ROWS, dtype: torch.dtype = torch.float32, dim: int = 0
) -> DTensor:
    local = torch.zeros(rows, WIDTH, dtype=dtype)
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def _tree(mesh: DeviceMesh, layers: int = 2) -> dict[str, Any]:
    """As `collect` gives it: an OrderedDict with attributes, dicts by number, lists, plain values and tensors."""
    model: OrderedDict[str, Any] = OrderedDict((f"w{number}", _split(mesh)) for number in range(layers))
    model.__dict__["_metadata"] = {"": {"version": 1}}
    moments = {number: {"m": _split(mesh), "step": torch.zeros(())} for number in range(layers)}
    groups = [{"lr": 0.1, "params": [*range(layers)], "pair": (_split(mesh), 1)}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "note": "n"}


def _planned(mesh: DeviceMesh, layers: int = 2) -> SplitStandIns:
    shards = SplitStandIns()
    shards.expand(_tree(mesh, layers))
    return shards


def _flat(expanded: ExpandedTree) -> list[tuple[str, Any]]:
    """The tree with what stands at each place: tensors by identity, containers with class and attributes."""
    found: list[tuple[str, Any]] = []

    def visit(node: Any, path: str) -> None:
        if isinstance(node, dict):
            found.append((path, (type(node), [*node], getattr(node, "__dict__", None))))
            for key, value in node.items():
                visit(value, f"{path}/{key}")
        elif isinstance(node, list | tuple):
            found.append((path, (type(node), len(node))))
            for number, value in enumerate(node):
                visit(value, f"{path}/{number}")
        else:
            found.append((path, id(node) if isinstance(node, torch.Tensor) else node))

    visit(expanded.tree, "")
    return found


def test_places_found_at_once_are_those_found_one_by_one(mesh: DeviceMesh) -> None:
    shards, later = _planned(mesh), _tree(mesh)
    assert shards._places is not None
    assert shards._places.match(later) is not None
    quick, slow = shards.expand_again(later), shards._expand_one_by_one(later)
    assert quick is not None
    assert slow is not None
    assert _flat(quick) == _flat(slow)
    assert {path: id(tensor) for path, tensor in quick.live.items()} == {
        path: id(tensor) for path, tensor in slow.live.items()
    }
    assert quick.held.keys() == slow.held.keys()
    for path, part in quick.held.items():
        other = slow.held[path]
        assert (part.shape, part.region) == (other.shape, other.region)
        assert part.local.data_ptr() == other.local.data_ptr()
    entries = {address: number for number, address in enumerate(shards.storages)}
    assert {
        entry: source and source._replace(storage=source.storage._cdata)
        for entry, source in shards.sources(quick, entries).items()
    } == {
        entry: source and source._replace(storage=source.storage._cdata)
        for entry, source in shards.sources(slow, entries).items()
    }
    assert later["model"]["w0"] is quick.live["model/w0"], "the tree that was given is as it was"


CHANGES: dict[str, Callable[[dict[str, Any], DeviceMesh], object]] = {
    "other rows": lambda tree, mesh: tree["model"].update(w0=_split(mesh, rows=ROWS + 1)),
    "another dtype": lambda tree, mesh: tree["model"].update(w0=_split(mesh, dtype=torch.float16)),
    "another dimension": lambda tree, mesh: tree["model"].update(w0=_split(mesh, dim=1)),
    "whole on each rank": lambda tree, mesh: tree["model"].update(
        w0=DTensor.from_local(torch.zeros(RANKS * ROWS, WIDTH), mesh, [Replicate()], run_check=False)
    ),
    "a plain tensor": lambda tree, _: tree["model"].update(w0=torch.zeros(RANKS * ROWS, WIDTH)),
    "split by hand": lambda tree, _: tree["model"].update(
        w0=Split(torch.zeros(1, WIDTH), (2, WIDTH), (0, 0))
    ),
    "one less": lambda tree, _: tree["model"].pop("w0"),
    "one more": lambda tree, mesh: tree["model"].update(w9=_split(mesh)),
    "one at another place": lambda tree, mesh: tree.update(note=_split(mesh)),
    "one container at two places": lambda tree, _: tree["optimizer"]["state"].update(
        {1: tree["optimizer"]["state"][0]}
    ),
    "not in one piece": lambda tree, _: tree["model"]["w0"].__setattr__(
        "_local_tensor", torch.zeros(WIDTH, ROWS).t()
    ),
    "less than it says": lambda tree, _: tree["model"]["w0"].__setattr__(
        "_local_tensor", torch.zeros(1, WIDTH)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_part_is_not_taken_for_the_one_of_the_plan(mesh: DeviceMesh, change: str) -> None:
    shards, later = _planned(mesh), _tree(mesh)
    CHANGES[change](later, mesh)
    assert shards._places is not None
    assert shards._places.match(later) is None
    assert shards.expand_again(later) is None


SAME: dict[str, Callable[[dict[str, Any]], object]] = {
    "another class of a plain value": lambda tree: tree.update(note=None),
    "another order": lambda tree: tree["model"].move_to_end("w0"),
}


@pytest.mark.parametrize("change", SAME)
def test_a_tree_of_another_outline_is_looked_at_one_by_one_and_known_from_then_on(
    mesh: DeviceMesh, change: str
) -> None:
    shards, later = _planned(mesh), _tree(mesh)
    SAME[change](later)
    assert shards._places is not None
    assert shards._places.match(later) is None
    again = shards.expand_again(later)
    assert again is not None
    slow = shards._expand_one_by_one(later)
    assert slow is not None
    assert _flat(again) == _flat(slow)
    assert shards._places.match(later) is not None


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


def test_no_python_runs_for_a_dtensor_beyond_its_container(mesh: DeviceMesh) -> None:
    calls = []
    for layers in (20, 120):
        shards, later = _planned(mesh, layers), _tree(mesh, layers)
        for number in range(layers):  # as torch gives them: with the specs of those before
            for spot, path in ((later["model"], f"w{number}"), (later["optimizer"]["state"][number], "m")):
                known = shards._places
                assert known is not None
                at = f"model/{path}" if path != "m" else f"optimizer/state/{number}/m"
                spot[path]._spec = known._known[known.paths.index(at)][0]
        calls.append(_calls(lambda shards=shards, later=later: shards.expand_again(later)))  # type: ignore[misc]
    more = (calls[1] - calls[0]) / 100
    assert more <= 3, f"per layer of two DTensors and a container: {more} calls of Python functions"
