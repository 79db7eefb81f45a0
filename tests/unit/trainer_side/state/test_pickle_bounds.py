"""The depth of a pickle's tuples: equal to Python's own result, without building the tuples."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StateError
from holdfast.pickle_cost import check_pickle
from trainer_side.state.pickle_bounds import refuse_costly_pickle


def depth_of(value: Any) -> int:
    """How deep tuples lie in tuples; the count begins again in a list or dict."""
    found, pending = 0, [(value, 0)]
    while pending:
        node, depth = pending.pop()
        if isinstance(node, tuple):
            found = max(found, depth + 1)
            pending += [(child, depth + 1) for child in node]
        elif isinstance(node, list):
            pending += [(child, 0) for child in node]
        elif isinstance(node, dict):
            pending += [(child, 0) for pair in node.items() for child in pair]
    return found


_leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(value=_values)
def test_a_pickles_depth_is_what_python_finds(value: Any) -> None:
    assert check_pickle(pickle.dumps(value, protocol=2)) == depth_of(value)


def test_a_torch_file_is_shallow_however_much_it_holds() -> None:
    tree = {
        "model": OrderedDict((f"layer.{n}", torch.nn.Parameter(torch.zeros(2, 3))) for n in range(400)),
        "lists": [[[(1, (2, torch.ones(1).t()))]]],
    }
    file = io.BytesIO()
    torch.save(tree, file)
    refuse_costly_pickle(file, "file")
    assert file.tell() == 0
    with zipfile.ZipFile(file) as archive:
        assert 0 < check_pickle(archive.read("archive/data.pkl")) < 10


def _zipped(pickled: bytes) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return file


_TUPLE = b"\x80\x02)"


@pytest.mark.parametrize(
    "pickled",
    [
        _TUPLE + b"\x85" * 5000 + b".",
        b"\x80\x02" + b"(" * 5000 + b")" + b"t" * 5000 + b".",
        _TUPLE + b"K\1\x86" * 5000 + b".",
        _TUPLE + b"NN\x87" * 5000 + b".",
        # By the memo, each a tuple of the one before; short and long numbers name the same place.
        _TUPLE + b"q\0" + b"h\0h\0\x86q\0" * 5000 + b".",
        _TUPLE + b"r\0\0\0\0" + b"h\0\x85r\0\0\0\0" * 5000 + b".",
        # Through what a call makes of its arguments.
        b"\x80\x02)" + b"\x85" * 600 + b"q\0ccollections\nOrderedDict\nh\0R" + b"\x85" * 600 + b".",
        # In between strings whose bytes look like something else.
        _TUPLE + b"X\x02\0\0\0..\x86U\x01.\x86" * 3000 + b".",
        # A key, an argument, a storage's name.
        b"\x80\x02})" + b"\x85" * 5000 + b"Ns.",
        b"\x80\x02ccollections\nOrderedDict\n)" + b"\x85" * 5000 + b"R.",
        _TUPLE + b"\x85" * 5000 + b"Q.",
    ],
)
def test_tuples_without_end_are_refused(pickled: bytes) -> None:
    assert check_pickle(pickled, 1000) > 1000
    with pytest.raises(StateError, match="a file: holds a tuple that is nested deeper than 1000"):
        refuse_costly_pickle(_zipped(pickled), "a file")


def test_the_limit_itself() -> None:
    assert check_pickle(_TUPLE + b"\x85" * 999 + b".") == 1000
    assert check_pickle(_TUPLE + b"\x85" * 1000 + b".") == 1001


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"a",
        b"\x85",
        b"h\x05.",
        b"q\0",
        b"t",
        b"cos\nsystem",
        b"R",
    ],
)
def test_a_pickle_that_torch_does_not_read_is_left_to_torch(pickled: bytes) -> None:
    assert check_pickle(pickled) == 0
    with pytest.raises((EOFError, LookupError, RuntimeError, pickle.UnpicklingError, struct.error)):
        torch.load(_zipped(pickled), weights_only=True)
