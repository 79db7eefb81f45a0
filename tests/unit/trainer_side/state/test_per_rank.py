"""A rank's own value comes back, and a damaged one is refused."""

from __future__ import annotations

import io
import os
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import DamageError, StateError
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import decode, encode, reserve_bytes


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.count = saved["count"]


@pytest.mark.parametrize("padding", [0, 1, 5000])
def test_a_blob_gives_back_the_value(padding: int) -> None:
    value: dict[str, Any] = {"a": [1, 2.5, None, "ü"], "t": torch.arange(5, dtype=torch.bfloat16)}
    blob = encode(value, name="x") + bytes(padding)
    for form in (blob, bytearray(blob), torch.frombuffer(bytearray(blob), dtype=torch.uint8)):
        found = decode(form)
        assert found["a"] == value["a"]
        assert torch.equal(found["t"], value["t"])


@pytest.mark.parametrize("used", [0, 1, 2457, 2458, 4096, 1_000_000])
def test_the_reserve_leaves_room(used: int) -> None:
    reserve = reserve_bytes(used)
    assert reserve % 4096 == 0
    assert used * 1.25 + 1024 < reserve <= used * 1.25 + 1024 + 4096


def test_objects_are_asked_and_given_back_their_state() -> None:
    counter = _Counter()
    counter.count = 3
    marked = PerRank(counter)
    saved = marked.snapshot()
    counter.count = 9
    marked.load(saved)
    assert counter.count == 3


def test_tensors_are_filled_in_place_and_plain_values_replaced() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    marked = PerRank(tensor)
    marked.load(torch.ones(3))
    assert marked.value is tensor
    assert tensor.tolist() == [1.0] * 3
    plain = PerRank([1])
    plain.load([2, 3])
    assert plain.value == [2, 3]


def _damaged() -> list[bytes]:
    good = encode([1, 2, 3], name="x")
    return [
        b"",
        good[:7],
        bytes(64),
        good[:-1],
        struct.pack("<Q", 2**63) + good[8:],
        struct.pack("<Q", 10) + good[8:],
        good[:8] + bytes(len(good) - 8),
    ]


@pytest.mark.parametrize("blob", _damaged())
def test_a_damaged_blob_is_refused(blob: bytes) -> None:
    with pytest.raises(DamageError, match=r"^rng: .*PerRank blob"):
        decode(blob, name="rng")


def test_a_blob_of_another_dtype_is_refused() -> None:
    with pytest.raises(DamageError):
        decode(torch.zeros(100))


@given(position=st.integers(0, 1 << 30), value=st.integers(0, 255))
def test_a_flipped_byte_gives_a_value_or_our_error(position: int, value: int) -> None:
    blob = bytearray(encode({"a": [1, 2, 3]}, name="x"))
    whole = bytes(blob)
    blob[position % len(blob)] = value
    try:
        found = decode(blob)
    except DamageError:
        assert blob != whole
    else:
        assert blob != whole or found == {"a": [1, 2, 3]}


_TRACE = Path(tempfile.gettempdir()) / "holdfast-code-was-run"


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(_TRACE),)


def test_code_in_a_blob_is_never_run() -> None:
    out = io.BytesIO()
    torch.save(_Evil(), out)
    with pytest.raises(DamageError):
        decode(struct.pack("<Q", len(out.getvalue())) + out.getvalue())
    assert not _TRACE.exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"dataset": {"rng": np.random.get_state()}}, r"^data/dataset/rng/1: plain torch\.load.*numpy"),
        ({"seen": [{1}, frozenset({2})]}, r"^data/seen/1: .*frozenset"),
        (_Evil(), r"^data: plain torch\.load"),
        ({_Evil(): 1}, r"^data: plain torch\.load"),
    ],
)
def test_a_value_that_could_not_be_read_back_is_refused_by_its_path(value: Any, said: str) -> None:
    for _ in range(2):
        with pytest.raises(StateError, match=said):
            encode(value, name="data")
    assert not _TRACE.exists()


def test_a_value_is_read_back_only_if_it_has_a_class_that_no_value_had_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = {"t": torch.arange(3), "history": OrderedDict(a=1)}
    encode(value, name="x")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("each save would cost a load"))
    encode(value, name="x")


def test_a_value_that_cannot_be_pickled_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"^rng: this PerRank value cannot be saved"):
        encode(lambda: None, name="rng")
