"""NumPy scalars in a state: saved as equal Python values, at the first save and at each later one."""

from __future__ import annotations

import collections
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.unit.trainer_side.assemble import make_plan, save, taken
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import decode, encode
from trainer_side.state.pickling import is_scalar, with_python_scalars

SCALARS: list[Any] = [
    np.float64(0.1),
    np.float64(-0.0),
    np.float64("inf"),
    np.float32(0.1),
    np.float16(65504),
    np.int64(-(2**63)),
    np.uint64(2**64 - 1),
    np.int8(-5),
    np.bool_(True),
    np.bool_(False),
    np.complex64(1 - 2j),
    np.complex128(0.1j),
    np.str_("text"),
    np.bytes_(b"bytes"),
    np.bytes_(b""),
]
NOT_SCALARS: list[Any] = [
    1,
    0.5,
    True,
    "text",
    np.zeros(()),
    np.longdouble(1),
    np.timedelta64(1, "ns"),
    np.datetime64("2026-01-01", "ns"),
    np.void(b"bytes"),
    np.float64,
]


def loaded(path: Path, state: dict[str, Any]) -> Any:
    save(state, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_numpy_scalar_comes_back_as_the_python_value_that_it_equals(tmp_path: Path, scalar: Any) -> None:
    python = type(scalar.item())
    state = {"w": torch.ones(2), "best": scalar, "log": [{"best": (1, scalar)}]}
    whole = loaded(tmp_path / "file.pt", state)
    own = decode(encode({"best": scalar}, name="own"))
    for value in (whole["best"], whole["log"][0]["best"][1], own["best"]):
        assert type(value) is python
        assert value == scalar
        if python is float:
            assert struct.pack("d", value) == struct.pack("d", float(scalar))


def test_a_numpy_nan_stays_nan(tmp_path: Path) -> None:
    value = loaded(tmp_path / "file.pt", {"w": torch.ones(2), "best": np.float32("nan")})["best"]
    assert type(value) is float
    assert value != value


def test_keys_are_written_in_their_places(tmp_path: Path) -> None:
    ordered = collections.OrderedDict([(np.int64(3), "c"), (np.str_("a"), np.int32(1)), (2, "b")])
    for kept in (dict(ordered), ordered):
        value = loaded(tmp_path / "file.pt", {"w": torch.ones(2), "seen": kept})["seen"]
        assert type(value) is type(kept)
        assert [(type(key), key) for key in value] == [(int, 3), (str, "a"), (int, 2)]
        assert list(value.values()) == ["c", 1, "b"]


def test_each_later_save_writes_the_value_of_that_moment() -> None:
    """Also one that has become a NumPy scalar after the plan was made, as losses do."""
    state: dict[str, Any] = {
        "w": torch.ones(2),
        "own": PerRank({"loss": 0.5}),
        "log": {"loss": 0.5, "steps": []},
    }
    skeleton = make_plan(state, reserve=65536)
    for number in range(4):
        state["log"]["loss"] = np.float64(number)
        state["log"]["steps"].append(np.int64(number))
        state["own"].value["loss"] = np.float32(number)
        found = taken(state, skeleton)
        assert found.deferred is None
        pickled = found.contents[skeleton.zip_parts.pickle_entry]
        assert b"numpy" not in pickled
        assert struct.pack(">d", float(number)) in pickled
        assert type(state["log"]["loss"]) is np.float64, "the script's own state is as it was"


def test_shared_containers_stay_shared_and_the_rest_is_not_copied() -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    shared, plain = [np.float64(1.0)], {"w": torch.ones(2), "more": [1, 2]}
    tree = {"a": shared, "b": Pair(shared, plain), "c": plain}
    found = with_python_scalars(tree)
    assert found["a"] is found["b"].first
    assert type(found["a"][0]) is float
    assert isinstance(found["b"], Pair)
    assert found["c"] is plain
    assert found["b"].second is plain
    assert type(shared[0]) is np.float64
    assert with_python_scalars(plain) is plain


@pytest.mark.parametrize("value", NOT_SCALARS, ids=repr)
def test_other_values_are_not_taken_for_scalars(value: Any) -> None:
    assert not is_scalar(value)
    assert with_python_scalars(value) is value
