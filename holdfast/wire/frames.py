"""Control messages between training ranks and stager, and among the ranks: header and body, one MPI message each.

    offset  0      4        6     8        16    24     28     32   40          44     48
            magic  version  kind  attempt  step  chunk  flags  arg  body_bytes  crc32  body …

docs/wire.md has the byte tables, the meaning of every field per kind, and the state table. Payloads (slices of chunks)
are raw bytes under a tag of their own, `data_tag(slot)`, in `payload_message_count` messages; a SENT control message
has their size and CRC.

Every message is untrusted input. `decode` checks magic, version, kind, sizes and CRC first; `json_body` and the
message's class, if it has one (welcome.py, state_messages.py), check the body. Each violation is a `ProtocolError`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from holdfast.crc import crc32
from holdfast.errors import HoldfastError, ProtocolError

VERSION = 11
CONTROL_TAG = 1
_FIRST_DATA_TAG = 16
_PIECES_APART_MAX = 64
_MAGIC = 0x31574648  # "HFW1" as it lies in memory
_HEADER = struct.Struct("<IHHQQIIQII")
_CRC_OFFSET = _HEADER.size - 4
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 64 * 1024 * 1024  # fits a layout of a million tensors; checked before memory is allocated
MAX_MESSAGE_BYTES = HEADER_BYTES + MAX_BODY_BYTES
_U64_MAX, _U32_MAX = 2**64 - 1, 2**32 - 1
WHOLE_MAX = 2**62
_SLOTS_MAX = 1 << 20
_ERROR_CHARACTERS_MAX = 60_000
_TEXT_BYTES_MAX = 4000


class Role(IntEnum):
    """Role of a process of the MPI job; the processes exchange roles at start-up."""

    TRAINER = 1
    STAGER = 2


class Kind(IntEnum):
    """Kinds of control message. Below 32: trainer to stager; from 32: stager to trainer; BEAT: either direction.

    From 64: among the ranks of a job with local tiers; stager and link refuse these. Such ranks also send each other
    PROPOSE, FITS, RESERVED, REFUSED, NOTICE, AT, SAVE_AT, DOUBT, DOUBTED and BYE.
    """

    HELLO = 1
    PROPOSE = 2
    LAYOUT = 3
    OFFER = 4
    DECLINE = 5
    SENT = 6
    RETURN = 7
    DONE = 8
    BYE = 9
    NOTICE = 10
    AT = 11
    FETCH = 12
    WISH = 13
    HERE = 14
    DOUBT = 15
    FITS = 16
    PROOF = 17
    ALL_STAGED = 18
    WELCOME = 32
    RESERVED = 33
    REFUSED = 34
    CREDIT = 35
    DECLINED = 36
    STAGED = 37
    DURABLE = 38
    FAILED = 39
    BEAT = 40
    SAVE_AT = 41
    FETCHED = 42
    SAVE_EVERY = 43
    DOUBTED = 44
    SEALED = 64
    SKIPPED = 65
    READY = 66
    COMPLETE = 67
    VOID = 68
    GO = 69
    ROOM = 70

    @property
    def to_stager(self) -> bool:
        return self < Kind.WELCOME or self is Kind.BEAT


@dataclass(frozen=True, slots=True)
class Frame:
    """One control message. The meaning of its fields depends on `kind`; unused ones are 0 or empty."""

    kind: Kind
    attempt: int = 0  # fencing epoch of the run; 0 before WELCOME
    step: int = 0
    chunk: int = 0
    # SENT: CRC-32 of the payload. SAVE_AT, SAVE_EVERY: `holdfast.notices.messages.AnnouncementKind`. FETCH, FETCHED:
    # `holdfast.ring.remains.FetchKind`. PROOF: `holdfast.wire.step_proof.ProofPart`.
    flags: int = 0
    # CREDIT: slot. SENT: payload bytes. DECLINE: pickle bytes needed. SAVE_AT, AT, SAVE_EVERY, HERE: number of the
    # proposal. FETCH, PROOF: attempt of the checkpoint. FETCHED: 1 if the answer is in the body. SEALED, SKIPPED,
    # COMPLETE, VOID: number of the tier. ROOM: bytes.
    arg: int = 0
    body: bytes = b""


def data_tag(slot: int) -> int:
    """MPI tag of the payloads for ring slot `slot`."""
    if not 0 <= slot < _SLOTS_MAX:
        raise ProtocolError(f"slot {slot}: expected 0 to {_SLOTS_MAX - 1}")
    return _FIRST_DATA_TAG + slot


def payload_message_count(pieces: int) -> int:
    """The number of messages for a payload of `pieces` parts: one for each part, or one for all of many parts.

    MPI receives into contiguous memory in one copy; a scattered target gets fragments, each copied twice. Beyond some
    tens of parts the messages themselves cost more.
    """
    return pieces if pieces <= _PIECES_APART_MAX else 1


def encode(
    kind: Kind,
    *,
    attempt: int = 0,
    step: int = 0,
    chunk: int = 0,
    flags: int = 0,
    arg: int = 0,
    body: bytes | memoryview = b"",
) -> bytes:
    """Encode one control message. Raises `ProtocolError`: a field is out of range, or the body too large."""
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"{kind.name}: body of {len(body)} bytes, at most {MAX_BODY_BYTES} can be sent")
    for name, value, most in (
        ("attempt", attempt, _U64_MAX),
        ("step", step, _U64_MAX),
        ("chunk", chunk, _U32_MAX),
        ("flags", flags, _U32_MAX),
        ("arg", arg, _U64_MAX),
    ):
        if not 0 <= value <= most:
            raise ProtocolError(f"{kind.name}: {name} is {value}, expected 0 to {most}")
    header = _HEADER.pack(_MAGIC, VERSION, kind, attempt, step, chunk, flags, arg, len(body), 0)
    crc = crc32(body, crc32(header))
    return b"".join((header[:_CRC_OFFSET], crc.to_bytes(4, "little"), body))


def decode(buffer: bytes | bytearray | memoryview) -> Frame:
    """Decode one control message from exactly its bytes. Raises `ProtocolError`: names the field, expected and got."""
    data = bytes(buffer)
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"control message of {len(data)} bytes, expected at least {HEADER_BYTES}")
    magic, version, kind, attempt, step, chunk, flags, arg, body_bytes, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(f"control message: magic {magic:#010x}, expected {_MAGIC:#010x}")
    if version != VERSION:
        raise ProtocolError(
            f"control message: version {version}, this process speaks {VERSION}; install the same holdfast on all nodes"
        )
    if body_bytes != len(data) - HEADER_BYTES:
        raise ProtocolError(
            f"control message: expected a body of {body_bytes} bytes, got {len(data) - HEADER_BYTES}"
        )
    body = data[HEADER_BYTES:]
    found = crc32(body, crc32(data[:_CRC_OFFSET] + b"\0\0\0\0"))
    if found != crc:
        raise ProtocolError(
            f"control message: expected CRC-32 {crc:#010x}, got {found:#010x}; it was damaged on the way"
        )
    try:
        known = Kind(kind)
    except ValueError:
        raise ProtocolError(f"control message: unknown kind {kind}") from None
    if attempt >= WHOLE_MAX or step >= WHOLE_MAX or arg >= WHOLE_MAX:
        raise ProtocolError(f"{known.name}: attempt {attempt}, step {step}, arg {arg}: expected below 2^62")
    return Frame(known, attempt, step, chunk, flags, arg, body)


def to_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def json_body(frame: Frame, **required: type) -> dict[str, Any]:
    """Read the JSON object in a frame's body. Raises `ProtocolError`: no such object, or a `required` type is wrong."""
    try:
        document = json.loads(frame.body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{frame.kind.name}: body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"{frame.kind.name}: body is {type(document).__name__}, expected an object")
    for name, expected in required.items():
        value = document.get(name)
        allowed = (int, float) if expected is float else (expected,)
        if type(value) not in allowed:
            wanted = "a number" if expected is float else expected.__name__
            raise ProtocolError(f"{frame.kind.name}: {name} is {value!r:.80}, expected {wanted}")
    return document


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Check that all values are whole numbers from 0 to 2^62, and return them. Raises `ValueError`."""
    found = tuple(values)
    if not all(type(value) is int and 0 <= value < WHOLE_MAX for value in found):
        raise ValueError(f"expected whole numbers from 0 to 2^62, got {found!r:.80}")
    return found


def encode_text(text: str) -> bytes:
    """Encode a text for people, cut at 4,000 bytes. A path in it may hold bytes that are not UTF-8."""
    return text.encode(errors="backslashreplace")[:_TEXT_BYTES_MAX]


def decode_text(frame: Frame) -> str:
    """Decode the output of `encode_text`; a character that the cut has split becomes U+FFFD."""
    return frame.body[:_TEXT_BYTES_MAX].decode(errors="replace")


def error_fields(error: HoldfastError) -> dict[str, str]:
    """Turn an error into fields of a message; `peer_error` is the inverse."""
    return {"code": error.code, "message": str(error)[:_ERROR_CHARACTERS_MAX]}


def error_body(error: HoldfastError) -> bytes:
    """`error_fields` as a JSON body."""
    return to_json(error_fields(error))


def peer_error(code: str, message: str) -> HoldfastError:
    """Make the error that a peer reports, of class `code` (holdfast.errors); ProtocolError for an unknown code."""
    kinds = HoldfastError.__subclasses__()
    for kind in kinds:  # grows
        if kind.code == code:
            return kind(message)
        kinds += kind.__subclasses__()
    return ProtocolError(f"unknown error code {code!r:.40} from a peer: {message}")
