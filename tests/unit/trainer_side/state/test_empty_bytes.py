"""Empty bytes in a pickle of protocol 2, which plain `torch.load` refuses as Python writes them."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_side.state.per_rank_blob import decode, encode
from trainer_side.state.pickling import ReadablePickler, with_readable_empty_bytes

EMPTY = b""
VALUES: list[Any] = [
    b"",
    [b"", b"", b"x", b""],
    {"a": b"", "b": (b"", [b""], {}), b"": 1},
    [b"not empty"],
    ["\nbytes\n", b"\nbytes\n", b""],
    [EMPTY, EMPTY, *[f"text {number}" for number in range(300)], b""],  # the memo's long numbers
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_torch_reads_them_back(value: Any) -> None:
    out = io.BytesIO()
    torch.save(value, out, pickle_module=SimpleNamespace(Pickler=ReadablePickler, __name__="pickle"))
    out.seek(0)
    assert torch.load(out, weights_only=True) == value
    assert pickle.loads(with_readable_empty_bytes(pickle.dumps(value, 2))) == value
    assert decode(encode(value, name="own")) == value


def test_a_pickle_without_them_is_left_as_it_is() -> None:
    for value in ([b"x", "bytes", 1], [bytes, b""], bytes):  # the type itself is refused by torch, and named
        pickled = pickle.dumps(value, 2)
        assert with_readable_empty_bytes(pickled) == pickled
