from __future__ import annotations

import dataclasses
import os

import pytest

from holdfast.errors import ProtocolError
from holdfast.net import handshake
from holdfast.net.handshake import Hello, Status, VersionMismatch

KEY, OTHER = b"k" * 32, b"o" * 32
HELLO = Hello(1, 4, 2, "slurm-17", b"i" * 16, b"n" * 32, resuming=True, generation=3, lead_attempt=12)


def _meet(rank_key: bytes, stager_key: bytes, received: int = 7) -> tuple[bytes | None, int | None]:
    """Run a handshake; return the rank's answer to the challenge, and the stager's verdict on it."""
    data, nonce = HELLO.to_bytes(), os.urandom(32)
    proof = handshake.answer_challenge(rank_key, data, handshake.challenge(stager_key, data, nonce), received)
    return proof, None if proof is None else handshake.check_proof(stager_key, data, nonce, proof)


def test_a_hello_is_read_as_it_was_said() -> None:
    data = HELLO.to_bytes()
    assert handshake.hello_bytes(data) == len(data)
    assert handshake.hello_bytes(data[: handshake.HELLO_BYTES_MIN - 1]) is None
    assert handshake.read_hello(data) == HELLO


def test_ends_with_the_same_key_accept_each_other() -> None:
    assert _meet(KEY, KEY)[1] == 7
    assert _meet(b"", b"")[1] == 7


@pytest.mark.parametrize(("rank_key", "stager_key"), [(KEY, OTHER), (KEY, b""), (b"", KEY)])
def test_a_rank_answers_no_stager_with_another_key(rank_key: bytes, stager_key: bytes) -> None:
    assert _meet(rank_key, stager_key) == (None, None)


def test_a_proof_is_good_for_its_connection_alone() -> None:
    data, nonce = HELLO.to_bytes(), os.urandom(32)
    proof = handshake.answer_challenge(KEY, data, handshake.challenge(KEY, data, nonce), 7)
    assert proof is not None
    assert handshake.check_proof(KEY, data, nonce, proof) == 7
    assert handshake.check_proof(KEY, data, os.urandom(32), proof) is None  # a replay on the next connection
    for changes in (
        {"rank": 0},
        {"channel": 0},
        {"incarnation": b"j" * 16},
        {"resuming": False},
        {"lead_attempt": 11},
    ):
        changed = dataclasses.replace(HELLO, **changes).to_bytes()
        assert handshake.check_proof(KEY, changed, nonce, proof) is None, changes


def test_the_stagers_own_proof_is_no_proof_of_a_rank() -> None:
    data, nonce = HELLO.to_bytes(), os.urandom(32)
    stagers = handshake.challenge(KEY, data, nonce)[-handshake.PROOF_BYTES :]
    reflected = stagers + bytes(handshake.PROOF_MESSAGE_BYTES - len(stagers))
    assert handshake.check_proof(KEY, data, nonce, reflected) is None


def test_another_version_is_said_on_both_sides() -> None:
    data = bytearray(HELLO.to_bytes())
    data[8] += 1
    with pytest.raises(VersionMismatch, match="install the same holdfast"):
        handshake.read_hello(bytes(data))
    with pytest.raises(VersionMismatch, match="install the same holdfast"):
        handshake.answer_challenge(KEY, bytes(data), handshake.rejection(handshake.Status.VERSION), 0)


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"HOLDFASX"])
def test_another_protocol_is_seen_by_its_first_bytes(begun: bytes) -> None:
    with pytest.raises(ProtocolError, match="another protocol"):
        handshake.hello_bytes(begun)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 4},
        {"ranks": 1 << 21, "rank": 3},
        {"channel": 17},
        {"launch": "two\nlines"},
        {"lead_attempt": 1 << 62},
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        handshake.read_hello(dataclasses.replace(HELLO, **changes).to_bytes())  # type: ignore[arg-type]


def test_a_launch_without_end_is_refused_before_it_comes() -> None:
    data = bytearray(HELLO.to_bytes()[: handshake.HELLO_BYTES_MIN])
    data[22:24] = (60_000).to_bytes(2, "little")
    with pytest.raises(ProtocolError, match="60000 bytes"):
        handshake.hello_bytes(bytes(data))


def test_an_answer_from_a_stranger_may_be_no_stager() -> None:
    with pytest.raises(ProtocolError, match="no stager"):
        handshake.answer_challenge(KEY, HELLO.to_bytes(), b"x" * handshake.CHALLENGE_BYTES, 0)


def test_an_admission_is_read_as_it_was_said() -> None:
    said = handshake.admission(Status.BUSY, 3, "why " * 1000)
    found = handshake.read_admission(said[: handshake.ADMISSION_BYTES])
    assert (found.status, found.received, found.text_bytes) == (Status.BUSY, 3, handshake.TEXT_BYTES_MAX)
    assert len(said) == handshake.ADMISSION_BYTES + found.text_bytes
    with pytest.raises(ProtocolError):
        handshake.read_admission(b"\xff" * handshake.ADMISSION_BYTES)
