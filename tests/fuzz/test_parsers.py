"""Every parser, on any input: it accepts the input, or an error of ours names the fault.

Inputs are noise, real inputs with changes, and JSON of the right shape with wrong values.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import DamageError, HoldfastError, ProtocolError
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.sealed import seal
from holdfast.store.base import SMALL_BYTES_MAX, ObjectInfo
from holdfast.wire.frames import Frame, Kind, decode, to_json
from holdfast.wire.state_messages import Proposal
from holdfast.wire.welcome import Welcome
from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS, within_our_errors
from tests.support.memory_store import MemoryStore

_MEMORY_BYTES_MAX = 256 * 1024 * 1024
_SECONDS_MAX = 250.0  # on a busy machine; a faulty parser takes hours
_PARSERS = sorted(set(TARGETS) - {"structure"})
_STRUCTURED = {"wire": b"\x09", "layout": b"", "manifest": b"", "message": b"", "claim": b"", "profile": b""}
_AS_THEY_ARE = {"message", "profile"}  # their inputs have no first byte for sealing

_ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**32,
        2**53,
        2**62,
        2**63,
        2**64,
        10**400,
        -(2**62),
        0.5,
        1e308,
        float("inf"),
    ),
    *(
        float("nan"),
        "",
        "x" * 5000,
        "../x",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        [],
        {},
        [[]],
        {"a": {}},
        [1, 2, 3, 4],
    ),
]


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Fail a test that takes long or much memory, whatever sizes its inputs name."""
    begun, before_kib = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib * 1024 < _MEMORY_BYTES_MAX
    assert time.monotonic() - begun < _SECONDS_MAX


def _budget(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        derandomize=True,
    )


@pytest.mark.parametrize("target", _PARSERS)
def test_the_seeds_are_taken(target: str) -> None:
    taken = [within_our_errors(TARGETS[target], seed) for seed in SEEDS[target]]
    assert all(taken) or target == "name"


@pytest.mark.parametrize("target", _PARSERS)
@given(noise=st.binary(max_size=3000))
@_budget(100)
def test_parser_takes_noise_or_raises_an_error_of_ours(target: str, noise: bytes) -> None:
    within_our_errors(TARGETS[target], noise)


@pytest.mark.parametrize("target", _PARSERS)
@given(seed=st.integers(0, 2**32))
@_budget(400)
def test_real_inputs_that_are_changed(target: str, seed: int) -> None:
    within_our_errors(TARGETS[target], _changed(random.Random(seed), SEEDS[target]))


def _changed(chance: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randrange(1, 40)]
            case 2:
                data[at:at] = data[chance.randrange(len(data)) :][: chance.randrange(60)]
            case 3:
                data[at : at + 8] = struct.pack(
                    "<Q", chance.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1))
                )
            case 4:
                data[at : at + 1] = chance.choice(
                    (b"-1", b"1e999", b"NaN", b"[" * 3000, b"null", b"9" * 5000, b'"')
                )
        if not data:
            return b""
    return bytes(data)


def _documents() -> list[tuple[str, dict[str, Any], list[Any]]]:
    """Every value in every JSON document, by its path."""
    found = []
    for target, prefix in _STRUCTURED.items():
        for seed in SEEDS[target]:
            raw = seed if target in _AS_THEY_ARE else seed[1 + len(prefix) :]
            try:
                document = json.loads(raw)
            except ValueError:
                continue
            found += [(target, document, path) for path in _paths(document)]
    return found


def _paths(node: Any) -> Iterator[list[Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield [key]
        yield from ([key, *rest] for rest in _paths(value))


def test_every_field_with_every_odd_value() -> None:
    """Types, signs, sizes of 2^62, NaN, half surrogates, names that lead outside: in each field of each document."""
    tried = refused = 0
    for target, document, path in _documents():
        for value in [*_ODD, _Missing]:
            changed = json.loads(json.dumps(document))
            node = changed
            for key in path[:-1]:
                node = node[key]
            if value is _Missing:
                del node[path[-1]]
            else:
                node[path[-1]] = value
            data = json.dumps(changed).encode()
            prefix = b"" if target in _AS_THEY_ARE else b"\0" + _STRUCTURED[target]
            refused += not within_our_errors(TARGETS[target], prefix + data)
            tried += 1
    assert tried > 3000
    assert refused > tried // 5


class _Missing:
    """Stands for a field that is left out."""


@pytest.mark.parametrize("target", sorted(_STRUCTURED))
@pytest.mark.parametrize("bomb", [b"[" * 200_000, b'{"a":' * 200_000, b"[" * 500 + b"]" * 500])
def test_deep_nesting_is_refused_and_fast(target: str, bomb: bytes) -> None:
    prefix = b"" if target in _AS_THEY_ARE else b"\0" + _STRUCTURED[target]
    within_our_errors(TARGETS[target], prefix + bomb)


# -- found once ------------------------------------------------------------------------------------------------------


def _layout(**changes: Any) -> bytes:
    document = json.loads(SEEDS["layout"][1][1:]) | changes
    return zlib.compress(json.dumps(document).encode())


def test_a_layout_of_countless_chunks_is_refused_before_they_are_counted_out() -> None:
    with pytest.raises(ProtocolError, match="at most 1048576 chunks"):
        Layout.from_bytes(_layout(image_bytes=2**61, chunk_bytes=4096))


@pytest.mark.parametrize("name", [["a"], "x" * 5000, "\ud800", 7, None])
def test_names_in_a_layout_are_text_that_a_manifest_can_hold(name: Any) -> None:
    entries = json.loads(SEEDS["layout"][1][1:])["entries"]
    entries[0][0] = name
    with pytest.raises(HoldfastError):
        Layout.from_bytes(_layout(entries=entries))


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_a_manifest_that_cannot_be_handed_on_is_damage(seconds: float) -> None:
    """It was once readable, but rank 0's copy of it was not: restore ended instead of going back a step."""
    document = json.loads(SEEDS["manifest"][1][1:]) | {"pgt1_seconds": seconds}
    with pytest.raises(DamageError):
        Manifest.from_bytes(seal(json.dumps(document).encode(), "manifest_crc32"), source="odd")


def test_waits_without_end_are_refused_in_a_welcome() -> None:
    for seconds in (float("inf"), float("nan"), -1.0, 1e300):
        document = json.loads(SEEDS["wire"][1][2:]) | {"beat_seconds": seconds}
        with pytest.raises(ProtocolError, match="WELCOME"):
            Welcome.from_frame(Frame(Kind.WELCOME, body=to_json(document)))


@pytest.mark.parametrize(
    "row", [["w", "f", 3, -1], ["w", "f", [2**63], -1], ["w", 1, [2], -1], ["w", "f", [2], "0"]]
)
def test_rows_of_a_proposal_are_what_they_should_be(row: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="row 0"):
        Proposal.from_frame(decode(Proposal("d", [row], 1, {}).to_frame(1)))


def test_a_manifest_of_gigabytes_is_not_even_read() -> None:
    store = _Huge()
    (item,) = Catalog(store).list()
    assert "not read" in item.fault


class _Huge(MemoryStore):
    """Claims that its one object has a terabyte."""

    def list(self) -> list[ObjectInfo]:
        return [ObjectInfo("step-000000007.json", 1 << 40)]

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        raise AssertionError("it was read")
