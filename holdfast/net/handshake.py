"""How a connection of a rank to a stager begins: each proves to the other that it has the key; the rank says who it is.

    rank   ── hello      versions, rank of ranks, channel, launch, incarnation, … nonce ──►  stager
           ◄─ challenge  status, nonce, proof that the stager has the key ──
           ── proof      that the rank has the key; how much it has received before ──►
           ◄─ admission  status, how much the stager has received before, or why not ──

A proof is an HMAC-SHA256 under the key of its sender's role, the whole hello and both nonces: what was recorded of one
connection opens no other, and neither side's proof can be sent back as the other's. All sizes have a limit before any
memory is taken. The bytes that follow are encrypted and signed only where the connection has TLS (tls.py), within which
all of this takes place: docs/threat-model.md says what that means.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from holdfast.errors import ProtocolError
from holdfast.wire.frames import VERSION as WIRE_VERSION
from holdfast.wire.frames import WHOLE_MAX

VERSION = 3
MESSAGES_CHANNEL = 0  # the others carry payloads
CHANNELS_MAX = 17
NONCE_BYTES = 32
INCARNATION_BYTES = 16
PROOF_BYTES = 32
LAUNCH_BYTES_MAX = 255
TEXT_BYTES_MAX = 2000
RANKS_MAX = 1 << 16  # each of a job has a connection for messages to one process, and some for payloads
GENERATION_MAX = 0xFFFF
_MAGIC = b"HOLDFAST"
_HELLO = struct.Struct(f"<8sHHHIIHHHQ{INCARNATION_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<8sH{NONCE_BYTES}s{PROOF_BYTES}s")
_PROOF = struct.Struct(f"<{PROOF_BYTES}sQ")
_ADMISSION = struct.Struct("<HQH")
HELLO_BYTES_MIN = _HELLO.size
HELLO_BYTES_MAX = _HELLO.size + LAUNCH_BYTES_MAX
CHALLENGE_BYTES = _CHALLENGE.size
PROOF_MESSAGE_BYTES = _PROOF.size
ADMISSION_BYTES = _ADMISSION.size


class Status(IntEnum):
    """The stager's answer. A peer that has not proved the key gets only ADMITTED, VERSION or TLS."""

    ADMITTED = 0
    VERSION = 1  # another holdfast
    KEY = 2  # the rank's proof is wrong
    BUSY = 3  # the stager serves another job
    RANKS = 4  # another number of ranks than the stager was told, or than other ranks of the job say
    # The stager knows no job of this incarnation and generation, or it is over: the next one may come.
    LOST = 5
    ENDING = 6  # the stager takes no further job
    TLS = 7  # the stager takes connections with TLS alone
    REPLACED = 8  # the launcher has started the job again: these processes stay out for good


class Start(NamedTuple):
    """One start of a job, and how often its ranks have come again since.

    Attributes:
        launch: Names the launcher's job; the same after a restart by the launcher.
        incarnation: Random bytes, the same on all ranks of one start of the job, and on no other.
        generation: How often the ranks of this incarnation have lost a stager and come again.
    """

    launch: str
    incarnation: bytes
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """The rank that connects.

    Attributes:
        channel: 0 for messages, from 1 on for payloads.
        launch: With `incarnation` and `generation`: see `Start`.
        nonce: Random bytes of this connection.
        resuming: This rank has been admitted before: only the stager that did so can go on with it.
        lead_attempt: The attempt that the lead of several stagers has given, for the others; 0 for a stager that gives
            attempts itself.
    """

    rank: int
    ranks: int
    channel: int
    launch: str
    incarnation: bytes
    nonce: bytes
    resuming: bool = False
    generation: int = 0
    lead_attempt: int = 0

    def to_bytes(self) -> bytes:
        """As it is sent; its last bytes are `launch`."""
        launch = self.launch.encode()[:LAUNCH_BYTES_MAX]
        return (
            _HELLO.pack(
                _MAGIC,
                VERSION,
                WIRE_VERSION,
                self.channel,
                self.rank,
                self.ranks,
                len(launch),
                int(self.resuming),
                self.generation,
                self.lead_attempt,
                self.incarnation,
                self.nonce,
            )
            + launch
        )


def hello_bytes(begun: bytes) -> int | None:
    """Size in bytes of the hello that begins so; None while it is not known. Raises `ProtocolError`."""
    if not is_hello(begun):
        raise ProtocolError("it speaks another protocol")
    if len(begun) < _HELLO.size:
        return None
    launch_bytes = int(_HELLO.unpack_from(begun)[6])
    if launch_bytes > LAUNCH_BYTES_MAX:
        raise ProtocolError(f"a launch of {launch_bytes} bytes, expected at most {LAUNCH_BYTES_MAX}")
    return _HELLO.size + launch_bytes


class OtherVersion(ProtocolError):
    """The other side speaks another version."""


def read_hello(data: bytes) -> Hello:
    """The rank's description of itself.

    Raises:
        OtherVersion: It speaks another version.
        ProtocolError: It makes no sense.
    """
    _, version, wire_version, channel, rank, ranks, _, resuming, *start, incarnation, nonce = (
        _HELLO.unpack_from(data)
    )
    if (version, wire_version) != (VERSION, WIRE_VERSION):
        raise OtherVersion(
            f"it speaks version {version}.{wire_version}, expected {VERSION}.{WIRE_VERSION}; "
            "install the same holdfast on all machines"
        )
    try:
        launch = data[_HELLO.size :].decode()
    except UnicodeDecodeError:
        raise ProtocolError("its launch is not UTF-8") from None
    if not (rank < ranks <= RANKS_MAX and channel < CHANNELS_MAX and launch.isprintable()):
        raise ProtocolError(
            f"rank {rank} of {ranks}, channel {channel}: expected at most {RANKS_MAX} ranks, and channels below "
            f"{CHANNELS_MAX}"
        )
    generation, lead_attempt = start
    if lead_attempt >= WHOLE_MAX:
        raise ProtocolError(f"attempt {lead_attempt}: expected below 2^62")
    return Hello(rank, ranks, channel, launch, incarnation, nonce, bool(resuming), generation, lead_attempt)


def _prove(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + hashlib.sha256(hello).digest() + nonce, "sha256")


def challenge(key: bytes, hello: bytes, nonce: bytes) -> bytes:
    """The stager's answer to a hello that it can read; `nonce` is its own."""
    return _CHALLENGE.pack(_MAGIC, Status.ADMITTED, nonce, _prove(key, b"stager", hello, nonce))


def refuse_hello(status: Status) -> bytes:
    """The stager's answer to a hello of another version, or without TLS."""
    return _CHALLENGE.pack(_MAGIC, status, bytes(NONCE_BYTES), bytes(PROOF_BYTES))


def is_hello(begun: bytes) -> bool:
    """Whether what begins so may be a hello."""
    return begun[: len(_MAGIC)] == _MAGIC[: len(begun)]


class WantsTls(ProtocolError):
    """The stager takes connections with TLS alone."""


def answer_challenge(key: bytes, hello: bytes, data: bytes, received: int) -> bytes | None:
    """The rank's proof, once the stager's was checked; None if the stager has another key. `received`: how much this
    rank has received on this channel before.

    Raises:
        OtherVersion: The stager speaks another version.
        WantsTls: The stager takes connections with TLS alone.
        ProtocolError: No stager answers there.
    """
    magic, status, nonce, proof = _CHALLENGE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("what answers there is no stager")
    if status == Status.TLS:
        raise WantsTls("the stager takes connections with TLS alone")
    if status != Status.ADMITTED:
        raise OtherVersion(
            "the stager speaks another version of the protocol; install the same holdfast on all machines"
        )
    if not hmac.compare_digest(proof, _prove(key, b"stager", hello, nonce)):
        return None
    return _PROOF.pack(_prove(key, b"rank", hello, nonce), received)


def check_proof(key: bytes, hello: bytes, nonce: bytes, data: bytes) -> int | None:
    """How much the rank has received before, if its proof is right; None if it has another key."""
    proof, received = _PROOF.unpack(data)
    return int(received) if hmac.compare_digest(proof, _prove(key, b"rank", hello, nonce)) else None


def admission(status: Status, received: int = 0, text: str = "") -> bytes:
    """The stager's last word; `text` says why not."""
    reason = text.encode()[:TEXT_BYTES_MAX]
    return _ADMISSION.pack(status, received, len(reason)) + reason


@dataclass(frozen=True, slots=True)
class StagerAnswer:
    """The stager's last word, without its text. `received`: how much the stager has received on this channel before."""

    status: Status
    received: int
    text_bytes: int


def read_admission(data: bytes) -> StagerAnswer:
    """Raises: ProtocolError: It makes no sense."""
    status, received, text_bytes = _ADMISSION.unpack(data)
    if status not in set(Status) or text_bytes > TEXT_BYTES_MAX:
        raise ProtocolError(f"an admission with status {status} and {text_bytes} bytes of text")
    return StagerAnswer(Status(status), received, text_bytes)
