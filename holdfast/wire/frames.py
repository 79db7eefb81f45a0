"""The control messages between training ranks and stager, and among the ranks: one MPI message each, header and body.

    offset  0      4        6     8        16    24     28     32   40          44     48
            magic  version  kind  attempt  step  chunk  flags  arg  body_bytes  crc32  body …

Byte tables, the meaning of every field per kind, and the state table: docs/wire.md. Payloads (slices of chunks) are
bare bytes under a tag of their own, `data_tag(slot)`, in as many messages as `payload_messages` says; a SENT control
message says their size and CRC.

Every message is input from outside. `decode` checks magic, version, kind, sizes and CRC before anything is used;
`json_body` and the classes below check what is inside. Whatever does not hold is a `ProtocolError`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Self

from holdfast.crc import crc32
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.image.layout import SPLIT
from holdfast.image.regions import Pattern, Region
from holdfast.price import inflate_json
from holdfast.wire.proof import decode_sums, encode_sums
from holdfast.wire.state_union import Stage, StateUnion

VERSION = 7
CONTROL_TAG = 1
_FIRST_DATA_TAG = 16
_PIECES_APART_MAX = 64
_MAGIC = 0x31574648  # "HFW1" as it lies in memory
_HEADER = struct.Struct("<IHHQQIIQII")
_CRC_OFFSET = _HEADER.size - 4
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 64 * 1024 * 1024  # a layout of a million tensors; checked before memory is taken for it
MAX_MESSAGE_BYTES = HEADER_BYTES + MAX_BODY_BYTES
_MAX_TABLE_BYTES = 512 * 1024 * 1024  # of a PROPOSE body, unpacked
_U64_MAX, _U32_MAX = 2**64 - 1, 2**32 - 1
_WHOLE_MAX = 2**62
_SLOTS_MAX = 1 << 20
_ERROR_CHARACTERS_MAX = 60_000
_TEXT_BYTES_MAX = 4000
_NOTHING_HELD: dict[str, Any] = {"regions": [], "rows": []}
_SECONDS_MAX = 1e9  # what selectors and threads can wait for; also refuses infinity and NaN


class Role(IntEnum):
    """Role of a process of the MPI job, as the processes tell each other in one collective exchange at start-up."""

    TRAINER = 1
    STAGER = 2


class Kind(IntEnum):
    """Kinds of control message. Below 32: trainer to stager; from 32: stager to trainer; BEAT: either.

    From 64: among the ranks of a job that has local tiers, which use PROPOSE, RESERVED, REFUSED, NOTICE, AT, SAVE_AT
    and BYE among themselves as well. Neither stager nor link takes one of these.
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
    SEALED = 64
    SKIPPED = 65
    READY = 66
    COMPLETE = 67
    VOID = 68
    GO = 69
    ROOM = 70

    @property
    def to_stager(self) -> bool:
        """Whether a rank may send it to the stager."""
        return self < Kind.WELCOME or self is Kind.BEAT


@dataclass(frozen=True, slots=True)
class Frame:
    """One control message. What `chunk`, `flags`, `arg` and `body` mean depends on `kind`; unused ones are 0 or empty.

    Attributes:
        kind: What it says.
        attempt: Fencing epoch of the run; 0 before WELCOME.
        step: Training step of the checkpoint it is about.
        chunk: Chunk of the image.
        flags: SENT: CRC-32 of the payload. SAVE_AT, SAVE_EVERY: `holdfast.notices.messages.StepWord`. FETCH and
            FETCHED: what is asked for (`holdfast.ring.remains.Asked`).
        arg: CREDIT: slot. SENT: payload bytes. DECLINE: pickle bytes needed. SAVE_AT, AT, SAVE_EVERY, HERE: number of
            the proposal. FETCH: attempt of the checkpoint. FETCHED: 1 if it is there. SEALED, SKIPPED, COMPLETE, VOID:
            number of the tier. ROOM: bytes.
        body: JSON, or what `kind` says.
    """

    kind: Kind
    attempt: int = 0
    step: int = 0
    chunk: int = 0
    flags: int = 0
    arg: int = 0
    body: bytes = b""


def data_tag(slot: int) -> int:
    """MPI tag of the payloads for ring slot `slot`."""
    if not 0 <= slot < _SLOTS_MAX:
        raise ProtocolError(f"slot {slot}: expected 0 to {_SLOTS_MAX - 1}")
    return _FIRST_DATA_TAG + slot


def payload_messages(pieces: int) -> int:
    """The number of messages in which a frame travels: one for each piece, or one for all if there are many pieces.

    MPI reads a message that has one place at the receiver out of the sender's memory in one go, where it can; one with
    several places it takes to fragments, each copied twice, and moves them only while both sides ask. Beyond some tens
    of pieces the messages themselves cost more than that.
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
    """The bytes of one control message.

    Raises:
        ProtocolError: A field is out of range, or the body above `MAX_BODY_BYTES`.
    """
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
    """Read one control message; `buffer` is exactly the MPI message.

    Raises:
        ProtocolError: naming the field, expected and got.
    """
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
    if attempt >= _WHOLE_MAX or step >= _WHOLE_MAX or arg >= _WHOLE_MAX:
        raise ProtocolError(f"{known.name}: attempt {attempt}, step {step}, arg {arg}: expected below 2^62")
    return Frame(known, attempt, step, chunk, flags, arg, body)


def to_json(document: Mapping[str, Any]) -> bytes:
    """A JSON body."""
    return json.dumps(document, separators=(",", ":")).encode()


def json_body(frame: Frame, **required: type) -> dict[str, Any]:
    """The JSON object in a frame's body, with the fields in `required` present and of that type.

    Raises:
        ProtocolError: It is not; names kind and field.
    """
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


def text_body(text: str) -> bytes:
    """A body for people, cut at 4,000 bytes. A path in it may hold bytes that are no UTF-8."""
    return text.encode(errors="backslashreplace")[:_TEXT_BYTES_MAX]


def body_text(frame: Frame) -> str:
    """The text that is the frame's body; a character that was cut through is marked."""
    return frame.body[:_TEXT_BYTES_MAX].decode(errors="replace")


def error_body(error: HoldfastError) -> bytes:
    """A JSON body that says what went wrong; `peer_error` makes the error of it again."""
    return to_json({"code": error.code, "message": str(error)[:_ERROR_CHARACTERS_MAX]})


def peer_error(code: str, message: str) -> HoldfastError:
    """The error of class `code` (see holdfast.errors) that a peer reports; an unknown code gives a ProtocolError."""
    for kind in _error_classes(HoldfastError):
        if kind.code == code:
            return kind(message)
    return ProtocolError(f"unknown error code {code!r:.40} from a peer: {message}")


def _is_row(row: Any) -> bool:
    """Whether it is `[path, dtype, shape, owner]`."""
    if not isinstance(row, list) or len(row) != 4:
        return False
    path, dtype, shape, owner = row
    sizes = shape if isinstance(shape, list) else [None]
    return (
        isinstance(path, str)
        and isinstance(dtype, str)
        and all(type(size) is int and 0 <= size < _WHOLE_MAX for size in sizes)
        and type(owner) is int
        and SPLIT <= owner < _WHOLE_MAX
    )


def _error_classes(base: type[HoldfastError]) -> Iterator[type[HoldfastError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _error_classes(kind)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The stager's message to each rank at start-up.

    Attributes:
        store_url: URL of the run; restore reads from it.
        attempt: Fencing epoch of this job; all later frames carry it.
        chunk_bytes: Size of a chunk, for the layout.
        ring_chunks: Chunks in the ring.
        ranks: Training ranks that the stager sees.
        offer_seconds_max: How long it waits for the last rank's offer of a step.
        beat_seconds: How often it gives a sign of life.
    """

    store_url: str
    attempt: int
    chunk_bytes: int
    ring_chunks: int
    ranks: int
    offer_seconds_max: float
    beat_seconds: float

    def to_frame(self) -> bytes:
        """The WELCOME message."""
        return encode(Kind.WELCOME, attempt=self.attempt, body=to_json(asdict(self)))

    @classmethod
    def from_frame(cls, frame: Frame) -> Welcome:
        """Read one.

        Raises:
            HoldfastError: The stager could not start; its error, of its class.
            ProtocolError: The message does not hold what it should.
        """
        document = json_body(frame)
        error = document.get("error")
        if isinstance(error, dict):
            raise peer_error(str(error.get("code")), str(error.get("message")))
        document = json_body(
            frame,
            store_url=str,
            attempt=int,
            chunk_bytes=int,
            ring_chunks=int,
            ranks=int,
            offer_seconds_max=float,
            beat_seconds=float,
        )
        welcome = cls(**{name: document[name] for name in cls.__slots__})
        wholes = (welcome.attempt, welcome.chunk_bytes, welcome.ring_chunks, welcome.ranks)
        seconds = (welcome.beat_seconds, welcome.offer_seconds_max)
        if not all(0 < number < _WHOLE_MAX for number in wholes) or not all(
            0 < s < _SECONDS_MAX for s in seconds
        ):
            raise ProtocolError(
                f"WELCOME: expected numbers above 0 that are no infinity, got {welcome!r:.500}"
            )
        return welcome

    @staticmethod
    def refusal(error: HoldfastError) -> bytes:
        """A WELCOME that says why the stager could not start."""
        return encode(
            Kind.WELCOME,
            body=to_json({"error": {"code": error.code, "message": str(error)[:_ERROR_CHARACTERS_MAX]}}),
        )


@dataclass(frozen=True)
class HeldRegions:
    """The regions that one rank holds of the split tensors in its table. Many rows have the same one.

    Attributes:
        regions: `(bytes of one element, region)`; a region without elements where the rank holds nothing.
        rows: `(row of the table, which of the regions)`, rows ascending.
    """

    regions: tuple[tuple[int, Region], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, held: Iterable[tuple[int, int, Region]]) -> Self:
        """From `(row, bytes of one element, region)` of each split tensor."""
        numbers: dict[tuple[int, Region], int] = {}
        rows = [
            (row, numbers.setdefault((item_bytes, region), len(numbers))) for row, item_bytes, region in held
        ]
        return cls(tuple(numbers), tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        regions = [[item_bytes, list(one.start), list(one.size)] for item_bytes, one in self.regions]
        return {"regions": regions, "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_json(cls, document: Any, table: list[list[Any]], *, of_stage: bool = False) -> Self:
        """Read what `to_json` made, for the rows of this table that are split; of a stage, for others as well.

        Raises:
            ProtocolError: It is not that.
        """
        try:
            regions = tuple(
                (_wholes([item_bytes])[0], Region(_wholes(start), _wholes(size)))
                for item_bytes, start, size in document["regions"]
            )
            rows = tuple((row, number) for row, number in map(_wholes, document["rows"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"PROPOSE: regions that cannot be read: {error}") from error
        wanted = [row for row, (_, _, _, owner) in enumerate(table) if owner == SPLIT]
        given = [row for row, _ in rows]
        if of_stage:
            fits = given == sorted({*given, *wanted}) and all(row < len(table) for row in given)
        else:
            fits = given == wanted
        if not fits or any(number >= len(regions) for _, number in rows):
            raise ProtocolError(
                f"PROPOSE: regions for {len(rows)} rows, expected one for each of {len(wanted)}"
            )
        return cls(regions, rows)


def _wholes(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and 0 <= value < _WHOLE_MAX for value in found):
        raise ValueError(f"expected whole numbers from 0 to 2^62, got {found!r:.80}")
    return found


@dataclass(frozen=True)
class Proposal:
    """One rank's view of the state, sent before the first save and whenever its tensors change.

    Attributes:
        table_digest: Digest of `table`; equal digests are not compared further.
        table: Rows `[path, dtype, shape, owner]`, in the order of the state.
        pickle_bytes: Size of the rank's pickle now; rank 0's decides the reserve.
        per_rank_bytes: For each `PerRank` value the bytes this rank needs, slack included.
        sums: For each row of the table, the CRC-32 of all bytes of the tensor; empty where they are not compared.
        refusal: Instead of all that: why this rank cannot save its state, as `(code, message)`.
        held: What it holds of tensors that are split.
        stage: Where the ranks have different tensors, the places of this rank's. `held` then has the tensors, too, of
            which a rank may have to send all.
    """

    table_digest: str
    table: list[list[Any]]
    pickle_bytes: int
    per_rank_bytes: dict[str, int]
    sums: tuple[int, ...] = ()
    refusal: tuple[str, str] | None = None
    held: HeldRegions = HeldRegions()
    stage: Stage | None = None

    @classmethod
    def refused(cls, error: HoldfastError) -> Proposal:
        """The proposal of a rank whose state cannot be saved: the others need not wait for it."""
        return cls("", [], 0, {}, refusal=(error.code, str(error)[:_ERROR_CHARACTERS_MAX]))

    def to_frame(self, attempt: int) -> bytes:
        """The PROPOSE message."""
        document: dict[str, Any] = {
            "table_digest": self.table_digest,
            "pickle_bytes": self.pickle_bytes,
            "per_rank_bytes": self.per_rank_bytes,
            "table": self.table,
        }
        if self.sums:
            document["sums"] = encode_sums(self.sums)
        if self.held.rows:
            document["held"] = self.held.to_json()
        if self.stage is not None:
            document["stage"] = self.stage.to_json()
        if self.refusal is not None:
            document["refusal"] = dict(zip(("code", "message"), self.refusal, strict=True))
        return encode(Kind.PROPOSE, attempt=attempt, body=zlib.compress(to_json(document), 1))

    @classmethod
    def from_frame(cls, frame: Frame) -> Proposal:
        """Read one; never unpacks more than a named limit, nor what costs more than the message is worth.

        Raises:
            ProtocolError: It is not readable, or a field is not what it should be.
        """
        try:
            raw = inflate_json(frame.body, _MAX_TABLE_BYTES)
        except (zlib.error, ValueError) as error:
            raise ProtocolError(f"PROPOSE: the body cannot be unpacked: {error}") from error
        document = json_body(
            Frame(frame.kind, body=raw), table_digest=str, table=list, pickle_bytes=int, per_rank_bytes=dict
        )
        for index, row in enumerate(document["table"]):
            if not _is_row(row):
                raise ProtocolError(
                    f"PROPOSE: row {index} is {row!r:.100}, expected [path, dtype, shape, owner]"
                )
        sizes = [document["pickle_bytes"], *document["per_rank_bytes"].values()]
        if not all(type(size) is int and 0 <= size < _WHOLE_MAX for size in sizes):
            raise ProtocolError(f"PROPOSE: sizes must be whole numbers from 0 to 2^62, got {sizes!r:.200}")
        sums, refusal = document.get("sums", ""), document.get("refusal")
        if not isinstance(sums, str):
            raise ProtocolError(f"PROPOSE: sums is {type(sums).__name__}, expected text")
        if refusal is not None and not (
            isinstance(refusal, dict) and all(type(refusal.get(name)) is str for name in ("code", "message"))
        ):
            raise ProtocolError(f"PROPOSE: refusal is {refusal!r:.100}, expected code and message")
        stage = Stage.from_json(document["stage"]) if "stage" in document else None
        held = document.get("held", _NOTHING_HELD)
        return cls(
            table_digest=document["table_digest"],
            table=document["table"],
            pickle_bytes=document["pickle_bytes"],
            per_rank_bytes=document["per_rank_bytes"],
            sums=decode_sums(sums, len(document["table"])) if sums else (),
            refusal=(refusal["code"], refusal["message"]) if refusal is not None else None,
            held=HeldRegions.from_json(held, document["table"], of_stage=stage is not None),
            stage=stage,
        )


@dataclass(frozen=True)
class Agreement:
    """The room that all ranks leave, so that the layout stays the same while the pickle changes a little.

    Attributes:
        pickle_reserve_bytes: Room for data.pkl.
        per_rank_reserve_bytes: Room for each `PerRank` value of each rank.
        rank0_only: Paths of tensors of which other ranks hold other bytes than rank 0, whose are saved.
        patterns: How tensors are split that are.
        split_rows: `(row of the table, number of its pattern)` of these.
        asks_stages: Nothing is agreed on yet: the ranks have different tensors, and each is to say what is where.
        union: What they have together, if they have different tensors; rows are then of its table.
    """

    pickle_reserve_bytes: int
    per_rank_reserve_bytes: dict[str, int]
    rank0_only: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    split_rows: tuple[tuple[int, int], ...] = ()
    asks_stages: bool = False
    union: StateUnion | None = None

    def to_frame(self, attempt: int) -> bytes:
        """The RESERVED message."""
        document: dict[str, Any] = {
            "pickle_reserve_bytes": self.pickle_reserve_bytes,
            "per_rank_reserve_bytes": self.per_rank_reserve_bytes,
        }
        if self.rank0_only:
            document["rank0_only"] = self.rank0_only
        if self.patterns:
            document["patterns"] = [pattern.to_json() for pattern in self.patterns]
            document["split_rows"] = self.split_rows
        if self.asks_stages:
            document["asks_stages"] = True
        if self.union is not None:
            document["union"] = self.union.to_json()
        return encode(Kind.RESERVED, attempt=attempt, body=to_json(document))

    @classmethod
    def from_frame(cls, frame: Frame) -> Agreement:
        """Read one. Raises `ProtocolError` when it does not hold what it should."""
        document = json_body(frame, pickle_reserve_bytes=int, per_rank_reserve_bytes=dict)
        sizes = [document["pickle_reserve_bytes"], *document["per_rank_reserve_bytes"].values()]
        if not all(type(size) is int and 0 <= size < _WHOLE_MAX for size in sizes):
            raise ProtocolError(f"RESERVED: sizes must be whole numbers from 0 to 2^62, got {sizes!r:.200}")
        paths = document.get("rank0_only", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise ProtocolError(f"RESERVED: rank0_only is {paths!r:.100}, expected paths")
        try:
            patterns = tuple(map(Pattern.from_json, document.get("patterns", [])))
            rows = tuple((row, number) for row, number in map(_wholes, document.get("split_rows", [])))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"RESERVED: patterns that cannot be read: {error}") from error
        if any(number >= len(patterns) for _, number in rows):
            raise ProtocolError(f"RESERVED: a row has a pattern that is not among the {len(patterns)}")
        return cls(
            document["pickle_reserve_bytes"],
            dict(document["per_rank_reserve_bytes"]),
            tuple(paths),
            patterns,
            rows,
            document.get("asks_stages") is True,
            StateUnion.from_json(document["union"]) if "union" in document else None,
        )
