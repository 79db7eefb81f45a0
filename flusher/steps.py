"""Vocabulary of the flush pipeline: events (in) and actions (out)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.checkpoints.publish import FinishedImage
from holdfast.checkpoints.share_records import ShareSeal
from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import Manifest
from holdfast.image.share_sums import ShareSums
from holdfast.image.shares import ImageShare


@dataclass(frozen=True, slots=True)
class Resume:
    """How far a dead flusher got. `parts`: for each part that the store has, the segment CRCs of each of its chunks."""

    part_chunks: int
    parts: Mapping[int, tuple[tuple[int, ...], ...]]


# -- events: from the stager ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Chunks of a checkpoint will follow; with `resume`, only those that the store does not have. `share`: this
    flusher's chunks, where other flushers write the others.
    """

    key: CheckpointId
    index: LayoutIndex
    resume: Resume | None = None
    share: ImageShare | None = None


@dataclass(frozen=True, slots=True)
class ChunkFull:
    """All senders' bytes of `chunk` are in `slot`."""

    key: CheckpointId
    slot: int
    chunk: int
    nbytes: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """All slices of the checkpoint were sent; no further chunk will follow."""

    key: CheckpointId


@dataclass(frozen=True, slots=True)
class Aborted:
    """The checkpoint is given up; `error` says by whom and why."""

    key: CheckpointId
    error: HoldfastError


# -- events: from the workers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The upload takes parts of `part_chunks` chunks. One that is not `resumable` dies with this process."""

    key: CheckpointId
    part_chunks: int
    resumable: bool = True


@dataclass(frozen=True, slots=True)
class Verified:
    """Every sender's CRC matched; these are the CRCs of the chunk's segments, in order."""

    key: CheckpointId
    chunk: int
    segment_crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Patched:
    """The CRC fields are filled; `(index, crc)` of the segments that contain them."""

    key: CheckpointId
    chunk: int
    segment_crcs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PartWritten:
    """The store has the part; its chunks are no longer needed."""

    key: CheckpointId
    part: int


@dataclass(frozen=True, slots=True)
class CrcsPut:
    """The flushers of later shares can read this share's entry CRCs."""

    key: CheckpointId


@dataclass(frozen=True, slots=True)
class CrcsRead:
    """Another share is verified; these are the CRCs of its `holdfast.image.share_sums.entry_pieces`."""

    key: CheckpointId
    share: int
    entry_crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """This share is written, and its seal is in the store."""

    key: CheckpointId
    share: ImageShare
    seal: ShareSeal


@dataclass(frozen=True, slots=True)
class SealRead:
    """Share `share_index` is sealed."""

    key: CheckpointId
    share_index: int
    seal: ShareSeal


@dataclass(frozen=True, slots=True)
class AllSealed:
    """Every share is sealed; only the lead gets this."""

    image: FinishedImage

    @property
    def key(self) -> CheckpointId:
        return self.image.key


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest is written: the checkpoint exists."""

    key: CheckpointId


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job that worked on `slots` of this checkpoint failed for good."""

    key: CheckpointId
    slots: tuple[int, ...]
    error: HoldfastError


Event = (
    Begin
    | ChunkFull
    | Staged
    | Aborted
    | Opened
    | Verified
    | Patched
    | PartWritten
    | CrcsPut
    | CrcsRead
    | Sealed
    | SealRead
    | AllSealed
    | Published
    | JobFailed
)


# -- actions: jobs, each answered by one event from the workers ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Start the upload, or resume a dead flusher's. Answer: `Opened`; `Published` if it was complete."""

    key: CheckpointId
    index: LayoutIndex
    resume: Resume | None = None
    share: ImageShare | None = None

    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verify:
    """Zero the CRC fields, then check every sender's frame. Answer: `Verified`."""

    key: CheckpointId
    slots: tuple[int, ...]  # one
    chunk: int
    sources: tuple[Source, ...]
    index: LayoutIndex


@dataclass(frozen=True, slots=True)
class Patch:
    """Fill the CRC fields, and compute the CRCs of the segments that contain them. Answer: `Patched`."""

    key: CheckpointId
    slots: tuple[int, ...]  # one
    chunk: int
    entry_crcs: tuple[int, ...]  # for the fields: see `holdfast.image.index.ChunkFields.entries`
    verified_crcs: tuple[int, ...]  # of `ChunkFields.segments`, with their fields zero
    index: LayoutIndex


@dataclass(frozen=True, slots=True)
class WritePart:
    """Write `(slot, nbytes)` back to back as one part, and record its segments' CRCs. Answer: `PartWritten`."""

    key: CheckpointId
    part: int
    pieces: tuple[tuple[int, int], ...]
    crc32: int
    segment_crcs: tuple[tuple[int, ...], ...]  # per chunk

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(slot for slot, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the file and write its manifest. Answer: `Published`."""

    image: FinishedImage
    slots: tuple[int, ...] = ()

    @property
    def key(self) -> CheckpointId:
        return self.image.key


@dataclass(frozen=True, slots=True)
class PutCrcs:
    """Give the flushers of later shares the CRCs of this one's entries. Answer: `CrcsPut`."""

    key: CheckpointId
    share: ImageShare
    entry_crcs: tuple[int, ...]
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadCrcs:
    """Wait for the entry CRCs of share `share_index`. Answer: `CrcsRead`."""

    key: CheckpointId
    index: LayoutIndex
    share: ImageShare
    share_index: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SealShare:
    """Record in the store that this share is written. Answer: `Sealed`."""

    key: CheckpointId
    share: ImageShare
    sums: ShareSums
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadSeal:
    """Wait until share `share_index` is sealed. Answer: `SealRead`."""

    key: CheckpointId
    share: ImageShare
    share_index: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assemble:
    """Make one image of all shares, and open the upload with the parts of all. Answer: `AllSealed`."""

    key: CheckpointId
    index: LayoutIndex
    share: ImageShare
    seals: tuple[ShareSeal, ...]
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AwaitPublished:
    """Wait until the lead has published. Answer: `Published`."""

    key: CheckpointId
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndOrphan:
    """Publish a checkpoint whose lead is gone; with `error`, void it. Answer: `OrphanEnded`, to the engine."""

    key: CheckpointId
    error: HoldfastError | None = None
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OrphanEnded:
    """A checkpoint whose lead is gone has ended. `manifest`: None if it was given up."""

    key: CheckpointId
    manifest: Manifest | None


# -- actions: done at once, not answered ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Free these slots: nothing reads them any more."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Abort the upload of a checkpoint that has no job left. `error` says why."""

    key: CheckpointId
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Discarded:
    """The upload is aborted; to the engine."""

    key: CheckpointId
    error: HoldfastError


Job = (
    Open
    | Verify
    | Patch
    | WritePart
    | PutCrcs
    | ReadCrcs
    | SealShare
    | ReadSeal
    | Assemble
    | AwaitPublished
    | Publish
    | EndOrphan
)
Action = Job | FreeSlots | Discard
