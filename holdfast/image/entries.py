"""The parts of an image: runs of bytes, the entries, their tensors, and the parts of entries that lie in one chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REPLICATED = -1  # owner of an entry that every rank holds with the same bytes
SPLIT = -2  # owner of an entry with the first pattern; -3 with the second one, and so on
TEXT_MAX = 4096  # characters of a name or a path in a manifest


class Extent(NamedTuple):
    """A run of bytes of the image."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Image offset of the byte after the last one."""
        return self.offset + self.nbytes


class Segment(NamedTuple):
    """The part of one entry that lies in one chunk. `entry` None: literals."""

    offset: int
    nbytes: int
    entry: int | None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class SentPart(NamedTuple):
    """The bytes of one segment that one rank sends. `inside`: its first byte among the rank's own; 0 for literals."""

    entry: int | None
    inside: int
    nbytes: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A run of bytes with its own CRC-32 in the zip file."""

    name: str  # name of the zip entry, such as `archive/data/17`
    offset: int  # in the image
    nbytes: int  # may be 0
    # `REPLICATED`, or the rank that alone sends the entry, or `SPLIT` - n: split by the layout's pattern n
    owner: int
    # image offsets of the four-byte little-endian fields that state the entry's CRC-32 (data descriptor, central
    # directory); they lie in literals
    crc_fields: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the state, for people and for comparing ranks."""

    path: str  # path in the state, such as `model/blocks.0.weight`
    dtype: str
    shape: tuple[int, ...]
    entry: int  # index of the entry that holds its storage (tied tensors share one)
