from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import DamageError
from operator_side.drill.values import read_per_rank_values, read_values


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def blob(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue()).to_bytes(8, "little") + file.getvalue() + bytes(64)


def test_values_are_found_by_path() -> None:
    state = {"scheduler": {"last_epoch": 3, "lrs": [0.5, 0.25]}, "model": OrderedDict(weight=torch.zeros(2))}
    values = read_values(pickled(state), source="test")
    assert values["scheduler/last_epoch"] == "3"
    assert values["scheduler/lrs/1"] == "0.25"
    assert "model/weight" in values


def test_a_text_that_is_json_has_values_of_its_own() -> None:
    """As the state of Hugging Face's Trainer has."""
    state = {
        "trainer": {"json": json.dumps({"log_history": [{"step": 1, "loss": 0.5}]})},
        "name": "{not json",
    }
    values = read_values(pickled(state), source="test")
    assert values["trainer/json/log_history/0/loss"] == "0.5"
    assert values["name"] == "'{not json'"
    deep = '{"a":' * 100_000
    assert read_values(pickled({"text": deep}), source="test")["text"] == repr(deep)


def test_padding_and_other_tensor_bytes_change_nothing() -> None:
    one, other = ({"step": 1, "w": torch.full((3,), value)} for value in (1.0, 2.0))
    assert read_values(pickled(one) + bytes(100), source="a") == read_values(pickled(other), source="b")


def test_values_of_runs_no_code_of_a_pickle(tmp_path: Path) -> None:
    read_values(pickled({"a": Harmful(tmp_path / "touched")}), source="test")
    assert not (tmp_path / "touched").exists()


def test_bytes_that_are_no_pickle_are_damage() -> None:
    with pytest.raises(DamageError, match="test"):
        read_values(b"nothing", source="test")


def test_inside_a_per_rank_value_each_part_has_a_name() -> None:
    first, second = ({"torch": torch.arange(4) + add, "python": {"version": 3}} for add in (0, 1))
    one, other = read_per_rank_values(blob(first)), read_per_rank_values(blob(second))
    assert one is not None
    assert other is not None
    assert {path for path in one if one[path] != other[path]} == {"torch"}
    assert read_per_rank_values(bytes(32)) is None
