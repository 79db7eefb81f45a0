"""The words of the flush pipeline: what happened (events, in) and what is to be done (actions, out)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flusher.index import LayoutIndex
from holdfast.errors import HoldfastError
from holdfast.ring import Source

__all__ = [
    "Aborted",
    "Action",
    "Begin",
    "ChunkFull",
    "Discard",
    "Event",
    "Failed",
    "FreeSlots",
    "Key",
    "Open",
    "Opened",
    "PartWritten",
    "Patch",
    "Patched",
    "Publish",
    "Published",
    "Staged",
    "Verified",
    "Verify",
    "WritePart",
]


class Key(NamedTuple):
    """Names one checkpoint; older ones compare lower."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


# -- events: from the stager ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Chunks of a new checkpoint are going to come."""

    key: Key
    index: LayoutIndex


@dataclass(frozen=True, slots=True)
class ChunkFull:
    """All senders' bytes of `chunk` are in `slot`."""

    key: Key
    slot: int
    chunk: int
    nbytes: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """All slices of the checkpoint were sent; no further chunk will come."""

    key: Key


@dataclass(frozen=True, slots=True)
class Aborted:
    """The checkpoint is given up; `error` says by whom and why."""

    key: Key
    error: HoldfastError


# -- events: from the workers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The upload takes parts of `part_chunks` chunks."""

    key: Key
    part_chunks: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Every sender's CRC held; these are the CRCs of the chunk's segments, in order."""

    key: Key
    chunk: int
    segment_crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Patched:
    """The CRC fields are in place; `(index, crc)` of the segments they lie in."""

    key: Key
    chunk: int
    segment_crcs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PartWritten:
    """The store has the part; its chunks are no longer needed."""

    key: Key
    part: int


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest is written: the checkpoint exists."""

    key: Key


@dataclass(frozen=True, slots=True)
class Failed:
    """The job that worked on `slots` of this checkpoint gave up."""

    key: Key
    slots: tuple[int, ...]
    error: HoldfastError


Event = Begin | ChunkFull | Staged | Aborted | Opened | Verified | Patched | PartWritten | Published | Failed


# -- actions: jobs, each answered by one event from the workers ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Start the upload. Answer: `Opened`."""

    key: Key
    index: LayoutIndex

    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verify:
    """Zero the CRC fields, then check every sender's frame. Answer: `Verified`."""

    key: Key
    slots: tuple[int, ...]  # one
    chunk: int
    sources: tuple[Source, ...]
    index: LayoutIndex


@dataclass(frozen=True, slots=True)
class Patch:
    """Write `(offset in the chunk, bytes)`, then CRC the segments `touched`. Answer: `Patched`."""

    key: Key
    slots: tuple[int, ...]  # one
    chunk: int
    values: tuple[tuple[int, bytes], ...]
    touched: tuple[int, ...]
    index: LayoutIndex


@dataclass(frozen=True, slots=True)
class WritePart:
    """Write `(slot, nbytes)` back to back as one part. Answer: `PartWritten`."""

    key: Key
    part: int
    pieces: tuple[tuple[int, int], ...]
    crc32: int

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots it reads."""
        return tuple(slot for slot, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Publish:
    """Make it visible and write its manifest. Answer: `Published`."""

    key: Key
    index: LayoutIndex
    image_crc32: int
    chunk_crc32s: tuple[int, ...]
    entry_crc32s: tuple[int, ...]

    slots: tuple[int, ...] = ()


# -- actions: done at once, not answered ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Nothing reads these slots any more."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Take back what was written; no job of this checkpoint is left. `error` says why."""

    key: Key
    error: HoldfastError


Job = Open | Verify | Patch | WritePart | Publish
Action = Job | FreeSlots | Discard
