"""Refuses a pickle whose tuples are nested too deep, before torch's unpickler sees it.

A tuple is hashed by hashing what is in it, and Python does that without looking at how much stack is left: a key that
is nested a million deep ends the process. CRCs stop accidents, not somebody who may write to the store.

    opcode by opcode, as torch.load(weights_only=True) reads them:  a stack of depths instead of values

Only tuples count: lists, dicts and sets have no hash, and a tensor's does not look into it. What this does not know
torch refuses, too, and where it ends torch has raised by then.
"""

from __future__ import annotations

import pickletools
from typing import IO

import torch

from holdfast.errors import StateError

_DEPTH_MAX = 1000  # as `tensor_paths`; Python's own pickle goes no deeper either

_CODE = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
# Opcodes that push a value without a depth → bytes of their operand.
_PLAIN = {
    _CODE[name]: nbytes
    for name, nbytes in {
        **dict.fromkeys(("NONE", "NEWFALSE", "NEWTRUE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0),
        "BININT1": 1,
        "BININT2": 2,
        "BININT": 4,
        "BINFLOAT": 8,
    }.items()
}
# Opcodes that push a string or number → bytes of the length before it.
_COUNTED = {_CODE["BINUNICODE"]: 4, _CODE["SHORT_BINSTRING"]: 1, _CODE["LONG1"]: 1}
# Opcodes that take a value off → how many.
_TAKING = {_CODE["APPEND"]: 1, _CODE["SETITEM"]: 2, _CODE["BUILD"]: 1}
_TUPLES = {_CODE["TUPLE1"]: 1, _CODE["TUPLE2"]: 2, _CODE["TUPLE3"]: 3}
_GETS = {_CODE["BINGET"]: 1, _CODE["LONG_BINGET"]: 4}
_PUTS = {_CODE["BINPUT"]: 1, _CODE["LONG_BINPUT"]: 4}
_MARK, _TUPLE, _EMPTY_TUPLE = _CODE["MARK"], _CODE["TUPLE"], _CODE["EMPTY_TUPLE"]
_EMPTYING = {_CODE["APPENDS"], _CODE["SETITEMS"]}
_CALLS = {_CODE["REDUCE"], _CODE["NEWOBJ"]}
_GLOBAL, _PERSID, _PROTO = _CODE["GLOBAL"], _CODE["BINPERSID"], _CODE["PROTO"]


def refuse_deep_tuples(file: IO[bytes], what: str) -> None:
    """Look at the pickle of a file in torch's zip format, by torch's own reader of it. Leaves the file at its begin.

    Args:
        file: The file.
        what: Its name, for the message.

    Raises:
        StateError: A tuple in it is nested deeper than 1000 levels.
        RuntimeError: torch does not read it; neither will `torch.load`.
    """
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    if tuple_depth(reader.get_record("data.pkl")) > _DEPTH_MAX:
        raise StateError(
            f"{what}: holds a tuple that is nested deeper than {_DEPTH_MAX} levels; holdfast never saves such a state, "
            "so find out which program wrote the file"
        )
    file.seek(0)


def tuple_depth(pickled: bytes) -> int:
    """How deep the tuples of a pickle are nested; just above the limit if deeper. Reads no further than torch does."""
    try:
        return _depth(pickled)
    except (
        IndexError,
        KeyError,
        ValueError,
    ):  # it ends early, or takes what is not there: torch finds the same
        return 0


def _depth(pickled: bytes) -> int:  # noqa: C901 - one branch for each kind of opcode, as in the unpickler itself
    deepest, position = 0, 0
    stack: list[int] = []
    below: list[list[int]] = []
    memo: dict[bytes, int] = {}
    while deepest <= _DEPTH_MAX:
        code = pickled[position]
        position += 1
        if (nbytes := _PUTS.get(code)) is not None:
            memo[pickled[position : position + nbytes].rstrip(b"\0")] = stack[-1]
            position += nbytes
        elif (nbytes := _PLAIN.get(code)) is not None:
            position += nbytes
            stack.append(0)
        elif (nbytes := _GETS.get(code)) is not None:
            stack.append(memo[pickled[position : position + nbytes].rstrip(b"\0")])
            position += nbytes
        elif (nbytes := _COUNTED.get(code)) is not None:
            end = position + nbytes
            position = end + int.from_bytes(pickled[position:end], "little")
            stack.append(0)
        elif code == _MARK:
            below.append(stack)
            stack = []
        elif code == _TUPLE:
            depth = max(stack, default=0) + 1
            deepest = max(deepest, depth)
            stack = below.pop()
            stack.append(depth)
        elif (count := _TUPLES.get(code)) is not None:
            depth = max(stack[-count:]) + 1
            deepest = max(deepest, depth)
            stack[-count:] = [depth]
        elif (count := _TAKING.get(code)) is not None:
            del stack[-count:]
        elif code in _EMPTYING:
            stack = below.pop()
        elif code in _CALLS:
            # Whatever is made of the arguments may hold them: a named tuple does.
            arguments = stack.pop()
            stack[-1] = max(stack[-1], arguments)
        elif code == _PERSID:
            stack[-1] = 0
        elif code == _EMPTY_TUPLE:
            stack.append(1)
            deepest = max(deepest, 1)
        elif code == _GLOBAL:
            position = pickled.index(b"\n", pickled.index(b"\n", position) + 1) + 1
            stack.append(0)
        elif code == _PROTO:
            position += 1
        else:  # the end, or what torch refuses
            break
    return deepest
