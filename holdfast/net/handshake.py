"""The handshake of a rank's connection to a stager: both prove that they have the key, and the rank identifies itself.

    rank   ── hello      versions, rank of ranks, channel, launch, incarnation, … nonce ──►  stager
           ◄─ challenge  status, nonce, proof that the stager has the key ──
           ── proof      that the rank has the key; how many messages it has received ──►
           ◄─ admission  status, how many messages the stager has received, or why not ──

A proof is an HMAC-SHA256 under the key over the sender's role, the whole hello and both nonces: a recording of one
connection opens no other, and neither side's proof can be sent back as the other's. All sizes are limited before memory
is allocated. With TLS (tls.py) the handshake runs inside it; without TLS the bytes that follow are neither encrypted
nor signed (docs/threat-model.md).
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
RANKS_MAX = 1 << 16  # one stager process has a message connection and some payload connections of each rank
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
    """The stager's answer. A peer that has not proved the key can get only ADMITTED, VERSION or TLS."""

    ADMITTED = 0
    VERSION = 1  # another holdfast
    KEY = 2  # the rank's proof is wrong
    BUSY = 3  # the stager serves another job
    RANKS = 4  # another number of ranks than the stager's setting, or than other ranks of the job state
    LOST = 5  # this incarnation and generation is unknown or has ended; the next generation may connect
    ENDING = 6  # the stager accepts no further job
    TLS = 7  # the stager accepts only connections with TLS
    REPLACED = 8  # the launcher has restarted the job: these processes stay out for good
    SHARE = 9  # the rank takes this stager for another one of several


class JobStart(NamedTuple):
    """One start of a job, and how often its ranks have returned to a stager since."""

    launch: str  # names the launcher's job; the same after a restart by the launcher
    incarnation: bytes  # random, the same on all ranks of one start of the job, different for each start
    generation: int = 0  # how often the ranks of this incarnation have lost a stager and returned


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first message on a connection. `launch`, `incarnation`, `generation`: see `JobStart`."""

    rank: int
    ranks: int
    channel: int  # 0 for messages, from 1 on for payloads
    launch: str
    incarnation: bytes
    nonce: bytes  # random bytes of this connection
    resuming: bool = False  # was admitted before; only the stager that admitted it can resume the connection
    generation: int = 0
    # The attempt that the lead of several stagers has chosen, for the others. For the lead itself 0, or, from ranks
    # that have lost it, the attempt that its next process may continue.
    lead_attempt: int = 0

    def to_bytes(self) -> bytes:
        """Encode; `launch` comes last."""
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


def hello_bytes(prefix: bytes) -> int | None:
    """Size in bytes of the hello that begins with `prefix`; None while that is too short. Raises `ProtocolError`."""
    if not is_hello(prefix):
        raise ProtocolError("it speaks another protocol")
    if len(prefix) < _HELLO.size:
        return None
    launch_bytes = int(_HELLO.unpack_from(prefix)[6])
    if launch_bytes > LAUNCH_BYTES_MAX:
        raise ProtocolError(f"a launch of {launch_bytes} bytes, expected at most {LAUNCH_BYTES_MAX}")
    return _HELLO.size + launch_bytes


class VersionMismatch(ProtocolError):
    """The peer speaks another version."""


def read_hello(data: bytes) -> Hello:
    """Decode a hello. Raises `VersionMismatch`; `ProtocolError`: it is malformed."""
    _, version, wire_version, channel, rank, ranks, _, resuming, *start, incarnation, nonce = (
        _HELLO.unpack_from(data)
    )
    if (version, wire_version) != (VERSION, WIRE_VERSION):
        raise VersionMismatch(
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


def _make_proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + hashlib.sha256(hello).digest() + nonce, "sha256")


def challenge(key: bytes, hello: bytes, nonce: bytes) -> bytes:
    """The stager's answer to a valid hello; `nonce` is the stager's own."""
    return _CHALLENGE.pack(_MAGIC, Status.ADMITTED, nonce, _make_proof(key, b"stager", hello, nonce))


def rejection(status: Status) -> bytes:
    """The stager's answer to a hello of another version, or without TLS."""
    return _CHALLENGE.pack(_MAGIC, status, bytes(NONCE_BYTES), bytes(PROOF_BYTES))


def is_hello(prefix: bytes) -> bool:
    """Whether these first bytes may begin a hello."""
    return prefix[: len(_MAGIC)] == _MAGIC[: len(prefix)]


class TlsRequired(ProtocolError):
    """The stager accepts only connections with TLS."""


def answer_challenge(key: bytes, hello: bytes, data: bytes, received: int) -> bytes | None:
    """Check the stager's proof and return the rank's; None if the stager has another key. `received`: how many messages
    this rank has received on this channel. Raises `VersionMismatch`; `TlsRequired`; `ProtocolError`: it is no stager.
    """
    magic, status, nonce, proof = _CHALLENGE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("what answers there is no stager")
    if status == Status.TLS:
        raise TlsRequired("the stager takes connections with TLS alone")
    if status != Status.ADMITTED:
        raise VersionMismatch(
            "the stager speaks another version of the protocol; install the same holdfast on all machines"
        )
    if not hmac.compare_digest(proof, _make_proof(key, b"stager", hello, nonce)):
        return None
    return _PROOF.pack(_make_proof(key, b"rank", hello, nonce), received)


def check_proof(key: bytes, hello: bytes, nonce: bytes, data: bytes) -> int | None:
    """Check the rank's proof and return how many messages it has received; None if the rank has another key."""
    proof, received = _PROOF.unpack(data)
    return int(received) if hmac.compare_digest(proof, _make_proof(key, b"rank", hello, nonce)) else None


def admission(status: Status, received: int = 0, text: str = "") -> bytes:
    """The stager's last message of the handshake; `text`: the reason of a refusal."""
    reason = text.encode()[:TEXT_BYTES_MAX]
    return _ADMISSION.pack(status, received, len(reason)) + reason


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    """An admission without its text. `received`: how many messages the stager has received on this channel."""

    status: Status
    received: int
    text_bytes: int


def read_admission(data: bytes) -> AdmissionReply:
    """Decode an admission. Raises `ProtocolError`."""
    status, received, text_bytes = _ADMISSION.unpack(data)
    if status not in set(Status) or text_bytes > TEXT_BYTES_MAX:
        raise ProtocolError(f"an admission with status {status} and {text_bytes} bytes of text")
    return AdmissionReply(Status(status), received, text_bytes)
