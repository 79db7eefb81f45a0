"""Control messages: written ones are read back, and all others are refused."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.crc import crc32
from holdfast.errors import ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind

_WHOLE = st.integers(0, 2**62 - 1)


@given(
    kind=st.sampled_from(Kind),
    attempt=_WHOLE,
    step=_WHOLE,
    chunk=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 2**32 - 1),
    arg=_WHOLE,
    body=st.binary(max_size=200),
)
def test_every_field_comes_back(
    kind: Kind, attempt: int, step: int, chunk: int, flags: int, arg: int, body: bytes
) -> None:
    message = wire.encode(kind, attempt=attempt, step=step, chunk=chunk, flags=flags, arg=arg, body=body)
    assert len(message) == 48 + len(body)
    assert wire.decode(message) == Frame(kind, attempt, step, chunk, flags, arg, body)


def test_bytes_are_as_documented() -> None:
    """docs/wire.md promises these bytes to other implementations."""
    message = wire.encode(Kind.CREDIT, attempt=2, step=3, chunk=4, flags=5, arg=6, body=b"{}")
    assert message[:4] == b"HFW1"
    fields = struct.unpack("<4sHHQQIIQII", message[:48])
    assert fields[1:9] == (11, 35, 2, 3, 4, 5, 6, 2)
    assert fields[9] == zlib.crc32(message[:44] + b"\0\0\0\0" + b"{}")


@given(st.data())
def test_a_flipped_bit_in_a_control_message_is_refused(data: st.DataObject) -> None:
    message = bytearray(wire.encode(Kind.SENT, attempt=1, step=9, chunk=3, flags=77, arg=4096, body=b"abc"))
    bit = data.draw(st.integers(0, len(message) * 8 - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        wire.decode(message)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(noise)


@pytest.mark.parametrize("cut", [0, 1, 47, 48, 50])
def test_a_cut_message_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(Kind.DONE, body=b"abc")[:cut])


def _with_valid_crc(**changed: int) -> bytes:
    fields = {
        "magic": 0x31574648,
        "version": 11,
        "kind": 4,
        "attempt": 1,
        "step": 1,
        "chunk": 0,
        "flags": 0,
        "arg": 0,
    }
    fields.update(changed)
    header = struct.pack("<IHHQQIIQII", *fields.values(), 0, 0)
    return header[:44] + struct.pack("<I", crc32(header))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"magic": 1}, "magic"),
        ({"version": 12}, "version 12"),
        ({"kind": 99}, "kind 99"),
        ({"step": 2**63}, "2\\^62"),
        ({"attempt": 2**63}, "2\\^62"),
        ({"arg": 2**63}, "2\\^62"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, int], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        wire.decode(_with_valid_crc(**changed))


@pytest.mark.parametrize("field", ["attempt", "step", "chunk", "flags", "arg"])
def test_fields_out_of_range_are_not_sent(field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        wire.encode(Kind.OFFER, **{field: -1})  # type: ignore[arg-type]


def test_a_body_above_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 10)
    with pytest.raises(ProtocolError, match="at most 10"):
        wire.encode(Kind.LAYOUT, body=b"x" * 11)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nan?", b"\xff", b"[" * 100_000, b'{"step": "x"}', b'{"step": true}']
)
def test_json_bodies_are_checked(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="DONE"):
        wire.json_body(Frame(Kind.DONE, body=body), step=int)


def test_an_unknown_error_code_is_still_an_error() -> None:
    error = wire.peer_error("from_the_future", "what happened")
    assert isinstance(error, ProtocolError)
    assert "what happened" in str(error)


def test_tags_of_slots_do_not_meet_the_control_tag() -> None:
    assert wire.data_tag(0) > wire.CONTROL_TAG
    assert wire.data_tag(5) == wire.data_tag(0) + 5
    for slot in (-1, 1 << 20):
        with pytest.raises(ProtocolError):
            wire.data_tag(slot)
