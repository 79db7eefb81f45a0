"""The cost estimate of a pickle: above its objects' memory, far below the limit for real ones, by opcode."""

from __future__ import annotations

import pickle
import pickletools
import struct
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest

from holdfast.parse_cost import InputTooLarge
from holdfast.pickle_cost import PICKLE_FACTOR, check_pickle, pickle_cost

_REAL: dict[str, Any] = {
    "numbers": list(range(20_000)),
    "fractions": [number / 7 for number in range(20_000)],
    "dicts": [{"step": number, "lr": 0.5} for number in range(5_000)],
    "empty ones": [[{}, []] for _ in range(5_000)],
    "sets": [{number} for number in range(5_000)],
    "names": {f"model.layers.{number}.weight": (number, None) for number in range(5_000)},
    "bytes": [bytes(1000), bytearray(b"\xff" * 100_000), b"\xff" * 100_000],
    "called": [OrderedDict(a=number) for number in range(2_000)],
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", _REAL)
def test_a_real_pickles_cost_is_about_its_memory_and_far_below_the_limit(name: str, protocol: int) -> None:
    pickled = pickle.dumps(_REAL[name], protocol=protocol)
    tracemalloc.start()
    kept = pickle.loads(pickled)
    taken_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept == _REAL[name]
    cost = pickle_cost(pickled)
    assert taken_bytes < 2 * cost
    assert cost < PICKLE_FACTOR * len(pickled) / 2


def test_every_opcode_is_known() -> None:
    for opcode in pickletools.opcodes:
        check_pickle(opcode.code.encode("latin-1") + bytes(8))


_HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (b"\x8e" + _HUGE + b"abc.", "BINBYTES8 at byte 0 claims 1152921504606846976 bytes, of which 4 are there"),
        (b"\x96" + _HUGE + b".", "BYTEARRAY8 at byte 0 claims 1152921504606846976 bytes, of which 1 are there"),
        (b"\x8d" + _HUGE + b".", "BINUNICODE8 at byte 0 claims"),
        (b"\x8b" + struct.pack("<I", 2**31 - 1) + b".", "LONG4 at byte 0 claims 2147483647 bytes"),
        (b"\x80\x04\x95" + _HUGE + b"N.", "FRAME at byte 2 claims 1152921504606846976 bytes, of which 2 are there"),
        (b"Nr" + struct.pack("<I", 2**31) + b".", "LONG_BINPUT at byte 1 claims place 2147483648 of the memo"),
        (b"Np4000000000\n.", "PUT at byte 1 claims place 4000000000 of the memo, of which 0 are taken"),
        (b"cbuiltins\nbytearray\n(I2000000000\ntR.", "would take 20000046.. bytes or more"),
        (b"cbuiltins\nbytearray\n(I0x77359400\ntR.", "exceeded at REDUCE at byte"),
        (b"(cbuiltins\nbytearray\nJ\xff\xff\xff\x7fo.", "exceeded at OBJ at byte"),
        (b"(J\xff\xff\xff\x7fibuiltins\nbytearray\n.", "exceeded at INST at byte"),
        (b"\x8c\x08builtins\x8c\x09bytearray\x93J\xff\xff\xff\x7f\x85R.", "exceeded at REDUCE at byte"),
    ],
)  # fmt: skip
def test_a_claim_is_refused_with_what_is_claimed_and_what_is_there(pickled: bytes, said: str) -> None:
    with pytest.raises(InputTooLarge, match=said):
        check_pickle(pickled)


def test_a_number_is_only_a_number() -> None:
    """Seeds and sizes of tensors are large, and take nothing."""
    pickled = pickle.dumps({"seed": 2**63 - 1, "shape": (2**31, 2**20), "big": 10**40})
    assert check_pickle(pickled) == 1
    assert pickle_cost(pickled) < 2000


def test_no_pickle_changes_what_the_next_one_costs() -> None:
    cost = pickle_cost(b"(NK\x07t.")
    for target in (b"N", b"K\x07"):
        check_pickle(target + b"(" + b"N" * 100 + b"e.")
        check_pickle(target + b"(" + b"N" * 100 + b"u.")
    assert pickle_cost(b"(NK\x07t.") == cost
