"""The fields that make a layout: what is checked of them, and their bytes on the wire and on disk."""

from __future__ import annotations

import bisect
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from holdfast.errors import ProtocolError
from holdfast.image.entries import SPLIT, TEXT_MAX, Entry, TensorInfo
from holdfast.image.regions import Pattern
from holdfast.parse_cost import inflate_json

ALIGNMENT_BYTES = 4096
_FORMAT = 1
# Read only: older versions made it for ranks that were going to lose their machine. A ring may still hold one.
_FORMAT_SPARED = 2
_FORMAT_SPLIT = 3  # with patterns, and with `spared`, which is empty since no version spares ranks
_FORMATS = (_FORMAT, _FORMAT_SPARED, _FORMAT_SPLIT)
_MAX_LAYOUT_BYTES = 1 << 30  # decompressed; about three million tensors
_CHUNKS_MAX = 1 << 20  # all is kept for every chunk; 16 TiB in chunks of 16 MiB, and chunks may be larger
_RANKS_MAX = 1 << 31


@dataclass(frozen=True)
class LayoutFields:
    """The fields of a layout, as they travel and lie in files.

    Args:
        chunk_bytes: Size of a chunk; a multiple of 4096.
        spared: Ranks without a slice, ascending; not all of them. Empty but in layouts of older versions.

    Raises:
        ProtocolError: The parts contradict each other. A layout also comes from outside (wire, disk), so all that is
            used as an offset or a size is checked here.
    """

    image_bytes: int
    chunk_bytes: int
    ranks: int
    entries: tuple[Entry, ...]
    tensors: tuple[TensorInfo, ...] = field(default=())
    spared: tuple[int, ...] = ()
    patterns: tuple[Pattern, ...] = ()

    def __post_init__(self) -> None:
        if self.image_bytes <= 0 or self.ranks <= 0:
            raise ProtocolError(
                f"layout: image of {self.image_bytes} bytes for {self.ranks} ranks; both must be above 0"
            )
        if self.chunk_bytes <= 0 or self.chunk_bytes % ALIGNMENT_BYTES:
            raise ProtocolError(
                f"layout: chunk_bytes must be a multiple of {ALIGNMENT_BYTES}, got {self.chunk_bytes}"
            )
        if self.chunks > _CHUNKS_MAX or self.ranks >= _RANKS_MAX:
            raise ProtocolError(
                f"layout: {self.chunks} chunks for {self.ranks} ranks, expected at most {_CHUNKS_MAX} chunks and fewer "
                f"than {_RANKS_MAX} ranks; raise chunk_bytes"
            )
        self._check_spared()
        self._check_entries()
        self._check_crc_fields()
        for tensor in self.tensors:
            if not 0 <= tensor.entry < len(self.entries):
                raise ProtocolError(
                    f"layout: tensor {tensor.path} names entry {tensor.entry} of {len(self.entries)}"
                )

    def _check_entries(self) -> None:
        end = 0
        for entry in self.entries:
            if entry.offset < end or entry.nbytes < 0 or entry.end > self.image_bytes:
                raise ProtocolError(
                    f"layout: entry {entry.name} at {entry.offset}+{entry.nbytes} overlaps the one before (ends {end}) "
                    f"or leaves the image of {self.image_bytes} bytes"
                )
            if not SPLIT - len(self.patterns) < entry.owner < self.ranks:
                raise ProtocolError(
                    f"layout: entry {entry.name} has owner {entry.owner}, of {self.ranks} ranks and "
                    f"{len(self.patterns)} patterns"
                )
            pattern = self.pattern_of(entry)
            if pattern is not None and pattern.nbytes != entry.nbytes:
                raise ProtocolError(
                    f"layout: entry {entry.name} of {entry.nbytes} bytes has a pattern for {pattern.nbytes}"
                )
            end = entry.end
        for pattern in self.patterns:
            if max(pattern.region_of, default=0) >= self.ranks:
                raise ProtocolError(
                    f"layout: rank {max(pattern.region_of)} holds a region, of {self.ranks} ranks"
                )

    def _check_crc_fields(self) -> None:
        starts = [entry.offset for entry in self.entries]
        for entry in self.entries:
            for crc_field in entry.crc_fields:
                inside = bisect.bisect_right(starts, crc_field + 3) - 1
                in_entry = (
                    inside >= 0 and self.entries[inside].end > crc_field and self.entries[inside].nbytes > 0
                )
                if crc_field < entry.end or crc_field + 4 > self.image_bytes or in_entry:
                    raise ProtocolError(
                        f"layout: CRC field of {entry.name} at {crc_field} is not in a literal after it"
                    )

    def _check_spared(self) -> None:
        spared = list(self.spared)
        in_order = spared == sorted(set(spared))
        if spared and not (in_order and 0 <= spared[0] <= spared[-1] < self.ranks > len(spared)):
            raise ProtocolError(
                f"layout: spared ranks {spared[:20]}, expected some of {self.ranks} ranks, not all, ascending"
            )

    @cached_property
    def chunks(self) -> int:
        """Number of chunks; the last one may be short."""
        return -(-self.image_bytes // self.chunk_bytes)

    def pattern_of(self, entry: Entry) -> Pattern | None:
        """How an entry is split; None for one that is not."""
        number = self.pattern_number(entry)
        return None if number is None else self.patterns[number]

    def pattern_number(self, entry: Entry) -> int | None:
        """Which of the patterns says how an entry is split; None for an entry that is not."""
        return SPLIT - entry.owner if entry.owner <= SPLIT else None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex: equal on two ranks only if their layouts are."""
        return hashlib.sha256(self._canonical).hexdigest()

    @cached_property
    def _canonical(self) -> bytes:
        document: dict[str, Any] = {
            "format": _FORMAT_SPLIT if self.patterns else _FORMAT_SPARED if self.spared else _FORMAT,
            "image_bytes": self.image_bytes,
            "chunk_bytes": self.chunk_bytes,
            "ranks": self.ranks,
            "entries": [[e.name, e.offset, e.nbytes, e.owner, list(e.crc_fields)] for e in self.entries],
            "tensors": [[t.path, t.dtype, list(t.shape), t.entry] for t in self.tensors],
        }
        if self.spared or self.patterns:
            document["spared"] = list(self.spared)
        if self.patterns:
            document["patterns"] = [pattern.to_json() for pattern in self.patterns]
        return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()

    def to_bytes(self) -> bytes:
        """Zlib-compressed canonical JSON: what travels to the stager and lies beside the ring."""
        return zlib.compress(self._canonical, 1)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read what `to_bytes` wrote.

        Raises:
            ProtocolError: It is not that, its parts contradict each other, or it would cost more to parse than what was
                received is worth. Never allocates by a size it was told.
        """
        try:
            document = json.loads(_inflated(data))
            if document["format"] not in _FORMATS:
                raise ProtocolError(
                    f"layout: format {document['format']!r}, this version reads {_FORMAT} to {_FORMATS[-1]}"
                )
            return cls(
                image_bytes=_whole(document["image_bytes"]),
                chunk_bytes=_whole(document["chunk_bytes"]),
                ranks=_whole(document["ranks"]),
                entries=tuple(
                    Entry(_text(name), _whole(offset), _whole(nbytes), _whole(owner), _wholes(crc_fields))
                    for name, offset, nbytes, owner, crc_fields in document["entries"]
                ),
                tensors=tuple(
                    TensorInfo(_text(path), _text(dtype), _wholes(shape), _whole(entry))
                    for path, dtype, shape, entry in document["tensors"]
                ),
                spared=_wholes(document["spared"]) if document["format"] != _FORMAT else (),
                patterns=tuple(map(Pattern.from_json, document["patterns"]))
                if document["format"] == _FORMAT_SPLIT
                else (),
            )
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"layout: it cannot be read: {error}") from error


def _inflated(data: bytes | bytearray | memoryview) -> bytes:
    try:
        return inflate_json(data, _MAX_LAYOUT_BYTES)
    except ValueError as error:
        raise ProtocolError(
            f"layout: {error}; start the job again, and if its state holds millions of tensors, join some of them"
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX:
        raise ProtocolError(f"layout: expected a text of at most {TEXT_MAX} characters, got {value!r:.80}")
    value.encode()  # half a surrogate pair is valid JSON, and no text that a manifest or a log could hold
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not -(2**62) < value < 2**62:
        raise ProtocolError(f"layout: expected a whole number below 2^62, got {value!r:.80}")
    return value


def _wholes(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_whole(value) for value in values)
