"""The two messages about the state: a rank's proposal, and the agreement on the room that all ranks reserve."""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Pattern, Region
from holdfast.parse_cost import inflate_json
from holdfast.wire import frames as wire
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.replica_proof import decode_sums, encode_sums
from holdfast.wire.state_union import Stage, StateUnion

_MAX_TABLE_BYTES = 512 * 1024 * 1024  # of a PROPOSE body, unpacked
_CHANGE_CHARACTERS_MAX = 2000
_PARTS = struct.Struct("<II")  # bytes of the shared part, and of the rank's own; checksums are the rest


@dataclass(frozen=True)
class HeldRegions:
    """The regions that one rank holds of the split tensors in its table. Many rows share a region."""

    # `(bytes of one element, region)`; an empty region for a tensor of which the rank holds no element
    regions: tuple[tuple[int, Region], ...] = ()
    rows: tuple[tuple[int, int], ...] = ()  # `(row of the table, index into regions)`, rows ascending

    @classmethod
    def of(cls, held: Iterable[tuple[int, int, Region]]) -> Self:
        """Collect `(row, bytes of one element, region)` of each split tensor."""
        numbers: dict[tuple[int, Region], int] = {}
        rows = [
            (row, numbers.setdefault((item_bytes, region), len(numbers))) for row, item_bytes, region in held
        ]
        return cls(tuple(numbers), tuple(rows))

    def regions_to_json(self) -> list[Any]:
        return [[item_bytes, list(one.start), list(one.size)] for item_bytes, one in self.regions]

    @classmethod
    def from_json(cls, regions: Any, rows: tuple[tuple[int, int], ...], needed: int) -> Self:
        """Read `regions_to_json`, for rows that refer to `needed` regions. Raises `ProtocolError`."""
        try:
            read = tuple(
                (wire.whole_numbers([nbytes])[0], Region(*map(wire.whole_numbers, (start, size))))
                for nbytes, start, size in regions
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"PROPOSE: regions that cannot be read: {error}") from error
        if needed > len(read):
            raise ProtocolError(f"PROPOSE: {len(read)} regions, and rows that name {needed}")
        return cls(read, rows)


def held_rows(
    document: Any, table: list[list[Any]], *, of_stage: bool = False
) -> tuple[tuple[int, int], ...]:
    """Read `HeldRegions.rows`: all split rows of the table, for a stage also others. Raises `ProtocolError`."""
    try:
        rows = tuple((row, number) for row, number in map(wire.whole_numbers, document))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"PROPOSE: regions that cannot be read: {error}") from error
    wanted = [row for row, (_, _, _, owner) in enumerate(table) if owner == SPLIT]
    given = [row for row, _ in rows]
    if of_stage:
        fits = given == sorted({*given, *wanted}) and all(row < len(table) for row in given)
    else:
        fits = given == wanted
    if not fits:
        raise ProtocolError(f"PROPOSE: regions for {len(rows)} rows, expected one for each of {len(wanted)}")
    return rows


@dataclass(frozen=True)
class _SharedPart:
    """The part of a proposal that many ranks have in common, as received."""

    table_digest: str
    table: list[list[Any]]
    held_rows: tuple[tuple[int, int], ...]
    stage: Stage | None
    regions: int  # how many regions the rows refer to

    @classmethod
    def from_bytes(cls, data: memoryview) -> _SharedPart:
        document = _document(data, table_digest=str, table=list)
        for index, row in enumerate(document["table"]):
            if not _is_row(row):
                raise ProtocolError(
                    f"PROPOSE: row {index} is {row!r:.100}, expected [path, dtype, shape, owner]"
                )
        stage = Stage.from_json(document["stage"]) if "stage" in document else None
        rows = held_rows(document.get("held_rows", []), document["table"], of_stage=stage is not None)
        regions = max((number for _, number in rows), default=-1) + 1
        return cls(document["table_digest"], document["table"], rows, stage, regions)


@dataclass(frozen=True)
class Proposal:
    """One rank's view of the state, sent before the first save and whenever its tensors change."""

    table_digest: str  # digest of `table`; equal digests are not compared further
    table: list[list[Any]]  # rows `[path, dtype, shape, owner]`, in the order of the state
    pickle_bytes: int  # size of the rank's pickle now; rank 0's decides the reserve
    per_rank_bytes: dict[str, int]  # for each `PerRank` value the bytes this rank needs, slack included
    # For each row of the table, the CRC-32 of all bytes of the tensor; empty if replicas are not compared. The reader
    # makes an array, 4 bytes each: as Python ints the sums of 512 ranks would take a gigabyte.
    sums: Sequence[int] = field(default_factory=lambda: array("I"))
    # Why this rank cannot save its state, as `(code, message)`; the fields above are then empty.
    refusal: tuple[str, str] | None = None
    held: HeldRegions = field(default_factory=HeldRegions)
    # This rank's tree, if the ranks have different tensors. `held` then also has tensors that this rank may have to
    # send whole.
    stage: Stage | None = None
    step: int = -1  # step of the save; -1: not given
    # How the state differs from this rank's last proposal, for people; empty the first time.
    change: str = ""

    @classmethod
    def refused(cls, error: HoldfastError, step: int = -1) -> Proposal:
        """The proposal of a rank whose state cannot be saved, so that the others need not wait for it."""
        fields = wire.error_fields(error)
        return cls("", [], 0, {}, refusal=(fields["code"], fields["message"]), step=step)

    def to_frame(self, attempt: int) -> bytes:
        own: dict[str, Any] = {"pickle_bytes": self.pickle_bytes, "per_rank_bytes": self.per_rank_bytes}
        if self.held.rows:
            own["regions"] = self.held.regions_to_json()
        if self.refusal is not None:
            own["refusal"] = dict(zip(("code", "message"), self.refusal, strict=True))
        if self.step >= 0:
            own["step"] = self.step
        if self.change:
            own["change"] = self.change[:_CHANGE_CHARACTERS_MAX]
        shared: dict[str, Any] = {"table_digest": self.table_digest, "table": self.table}
        if self.held.rows:
            shared["held_rows"] = [list(row) for row in self.held.rows]
        if self.stage is not None:
            shared["stage"] = self.stage.to_json()
        parts = [zlib.compress(wire.to_json(document), 1) for document in (shared, own)]
        body = [_PARTS.pack(*map(len, parts)), *parts, encode_sums(self.sums)]
        return wire.encode(Kind.PROPOSE, attempt=attempt, body=b"".join(body))

    @classmethod
    def from_frame(cls, frame: Frame) -> Proposal:
        """Read a single proposal; `ProposalReader` is cheaper for many."""
        return ProposalReader().read(frame)


class ProposalReader:
    """Reads the proposals of one round; unpacks and keeps parts that ranks have in common only once."""

    def __init__(self, kept_max: int = 1) -> None:
        self._kept_max = kept_max
        self._cache: dict[bytes, _SharedPart] = {}
        self._sums: tuple[bytes, Sequence[int]] = (b"", array("I"))

    def reset(self) -> None:
        """Drop the shared parts at the end of a round."""
        self._cache.clear()
        self._sums = (b"", array("I"))

    def read(self, frame: Frame) -> Proposal:
        """Read one proposal, within limits. Raises `ProtocolError`: it is unreadable, or a field is wrong."""
        body = memoryview(frame.body)
        ends = (0, 0)
        if len(body) >= _PARTS.size:
            shared_bytes, own_bytes = _PARTS.unpack_from(body)
            ends = (_PARTS.size + shared_bytes, _PARTS.size + shared_bytes + own_bytes)
        if not 0 < ends[1] <= len(body):
            raise ProtocolError(
                f"PROPOSE: the body cannot be unpacked: {len(body)} bytes are fewer than its parts have"
            )
        shared = self._shared(body[_PARTS.size : ends[0]])
        own = _document(body[ends[0] : ends[1]], pickle_bytes=int, per_rank_bytes=dict)
        sizes = [own["pickle_bytes"], *own["per_rank_bytes"].values()]
        if not all(type(size) is int and 0 <= size < wire.WHOLE_MAX for size in sizes):
            raise ProtocolError(f"PROPOSE: sizes must be whole numbers from 0 to 2^62, got {sizes!r:.200}")
        refusal = own.get("refusal")
        if refusal is not None and not (
            isinstance(refusal, dict) and all(type(refusal.get(name)) is str for name in ("code", "message"))
        ):
            raise ProtocolError(f"PROPOSE: refusal is {refusal!r:.100}, expected code and message")
        step, change = own.get("step", -1), own.get("change", "")
        if not (type(step) is int and -1 <= step < wire.WHOLE_MAX and type(change) is str):
            raise ProtocolError(
                f"PROPOSE: step {step!r:.40} and change {change!r:.100}, expected a number and a text"
            )
        return Proposal(
            table_digest=shared.table_digest,
            table=shared.table,
            pickle_bytes=own["pickle_bytes"],
            per_rank_bytes=own["per_rank_bytes"],
            sums=self._sums_of(bytes(body[ends[1] :]), len(shared.table)),
            refusal=(refusal["code"], refusal["message"]) if refusal is not None else None,
            held=HeldRegions.from_json(own.get("regions", []), shared.held_rows, shared.regions),
            stage=shared.stage,
            step=step,
            change=change[:_CHANGE_CHARACTERS_MAX],
        )

    def _shared(self, data: memoryview) -> _SharedPart:
        key = hashlib.blake2b(data, digest_size=32).digest()
        found = self._cache.get(key)
        if found is None:
            found = _SharedPart.from_bytes(data)
            if len(self._cache) >= self._kept_max:
                self._cache.clear()
            self._cache[key] = found
        return found

    def _sums_of(self, data: bytes, rows: int) -> Sequence[int]:
        if data != self._sums[0]:
            self._sums = (data, decode_sums(data, rows))
        elif data and len(self._sums[1]) != rows:
            decode_sums(data, rows)  # raises: the length is wrong for this table
        return self._sums[1]


def _document(data: memoryview, **fields: type) -> dict[str, Any]:
    try:
        raw = inflate_json(data, _MAX_TABLE_BYTES)
    except (zlib.error, ValueError) as error:
        raise ProtocolError(f"PROPOSE: the body cannot be unpacked: {error}") from error
    return wire.json_body(Frame(Kind.PROPOSE, body=raw), **fields)


@dataclass(frozen=True)
class Agreement:
    """The room that all ranks reserve, so that the layout stays the same while the pickle changes a little."""

    pickle_reserve_bytes: int
    per_rank_reserve_bytes: dict[str, int]
    # Paths of tensors that differ between ranks; rank 0's bytes are saved.
    rank0_only: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    split_rows: tuple[tuple[int, int], ...] = ()  # `(row of the table, index into patterns)`
    # No agreement yet: the ranks have different tensors, and each must propose again with a `Stage`.
    asks_stages: bool = False
    # Union of the ranks' trees, if they have different tensors; rows then refer to its table.
    union: StateUnion | None = None

    def to_frame(self, attempt: int) -> bytes:
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
        return wire.encode(Kind.RESERVED, attempt=attempt, body=wire.to_json(document))

    @classmethod
    def from_frame(cls, frame: Frame) -> Agreement:
        """Read one. Raises `ProtocolError`: it is malformed."""
        document = wire.json_body(frame, pickle_reserve_bytes=int, per_rank_reserve_bytes=dict)
        sizes = [document["pickle_reserve_bytes"], *document["per_rank_reserve_bytes"].values()]
        if not all(type(size) is int and 0 <= size < wire.WHOLE_MAX for size in sizes):
            raise ProtocolError(f"RESERVED: sizes must be whole numbers from 0 to 2^62, got {sizes!r:.200}")
        paths = document.get("rank0_only", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise ProtocolError(f"RESERVED: rank0_only is {paths!r:.100}, expected paths")
        try:
            patterns = tuple(map(Pattern.from_json, document.get("patterns", [])))
            given = map(wire.whole_numbers, document.get("split_rows", []))
            rows = tuple((row, number) for row, number in given)
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


def _is_row(row: Any) -> bool:
    """Whether it is `[path, dtype, shape, owner]`."""
    if not isinstance(row, list) or len(row) != 4:
        return False
    path, dtype, shape, owner = row
    sizes = shape if isinstance(shape, list) else [None]
    return (
        isinstance(path, str)
        and isinstance(dtype, str)
        and all(type(size) is int and 0 <= size < wire.WHOLE_MAX for size in sizes)
        and type(owner) is int
        and SPLIT <= owner < wire.WHOLE_MAX
    )
