"""Makes an empty `bytes` in a pickle readable for `torch.load(weights_only=True)`, as other bytes are.

    b"rng"  ─► _codecs.encode("rng", "latin1")    allowed
    b""     ─► __builtin__.bytes()                refused  ─► _codecs.encode("", "latin1")

A value that becomes empty in the middle of a run (the extra state of a module) must not end the training.
"""

from __future__ import annotations

import pickletools
from typing import Any

_BYTES_TYPE = frozenset({"__builtin__ bytes", "builtins bytes"})
_MARK = b"\nbytes\n"
_ENCODE = b"c_codecs\nencode\n"
_NOTHING_AS_LATIN1 = b"X\0\0\0\0X\x06\0\0\0latin1\x86"  # two texts, and the tuple of both
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def with_readable_empty_bytes(pickled: bytes) -> bytes:
    """The same pickle, of protocol 2, with each `b""` written as other bytes are. Any other pickle is left as it is."""
    if _MARK not in pickled:
        return pickled
    ops: list[tuple[str, Any, int]] = [
        (op.name, argument, position or 0) for op, argument, position in pickletools.genops(pickled)
    ]
    uses: list[int] = []  # which of `ops` push the type
    memo: set[Any] = set()
    for index, (name, argument, _) in enumerate(ops):
        if name == "GLOBAL" and argument in _BYTES_TYPE:
            uses.append(index)
            if ops[index + 1][0] in _PUTS:
                memo.add(ops[index + 1][1])
        elif name in _GETS and argument in memo:
            uses.append(index)
    pieces, done = [], 0
    for index in uses:
        called = index + 2 if ops[index + 1][0] in _PUTS else index + 1
        if [name for name, _, _ in ops[called : called + 2]] != ["EMPTY_TUPLE", "REDUCE"]:
            return pickled  # the type itself is a value: torch refuses it, and names it
        begin, after = ops[index][2], ops[index + 1][2]
        is_global = ops[index][0] == "GLOBAL"
        pieces += [pickled[done:begin], _ENCODE if is_global else pickled[begin:after]]
        pieces += [pickled[after : ops[called][2]], _NOTHING_AS_LATIN1]
        done = ops[called + 1][2]
    return b"".join([*pieces, pickled[done:]])
