"""One rank's slice of one checkpoint, as a tier keeps it: the place of each frame, and the seal that makes it valid.

    staging area and slot   │ frame of chunk 0 │pad│ frame of chunk 1 │pad│ …      each frame begins on a page
    seal                    attempt, step, rank of ranks, layout digest, CRC-32 of each frame

A slice without a valid seal does not exist. All slices of one `order` and one layout make one image; readers need not
know which rank kept a slice, or where.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.entries import Extent
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.sealed import seal, unseal

FRAME_ALIGNMENT_BYTES = 4096  # O_DIRECT's requirement for memory, offset and length
_CRC_FIELD = "seal_crc32"
_Whole = Annotated[int, Field(ge=0, lt=2**62)]
_Crc = Annotated[int, Field(ge=0, lt=2**32)]


class SliceFrame(NamedTuple):
    """A rank's part of one chunk: `extents` of the image, back to back, from `offset` of the slice on."""

    chunk: int
    extents: tuple[Extent, ...]
    offset: int
    nbytes: int

    @property
    def padded_bytes(self) -> int:
        """Bytes up to the next frame, as written with O_DIRECT."""
        return _align_up(self.nbytes)


@lru_cache(maxsize=64)
def frames_of(layout: Layout, rank: int) -> tuple[SliceFrame, ...]:
    """Return the frames of `rank`'s slice, in the order of sending and keeping."""
    frames: list[SliceFrame] = []
    offset = 0
    for chunk, extents in layout.sent_frames(rank):
        frames.append(SliceFrame(chunk, extents, offset, sum(extent.nbytes for extent in extents)))
        offset += frames[-1].padded_bytes
    return tuple(frames)


def area_bytes(layout: Layout, rank: int) -> int:
    """Return the bytes of `rank`'s slice, padding included."""
    frames = frames_of(layout, rank)
    return frames[-1].offset + frames[-1].padded_bytes if frames else 0


def area_bytes_by_rank(layout: Layout) -> list[int]:
    """Return `area_bytes` of every rank in one sweep over the chunks, which a single rank needs as well."""
    areas = [0] * layout.ranks
    for chunk in range(layout.chunks):
        for rank in layout.senders(chunk):
            areas[rank] += _align_up(sum(extent.nbytes for extent in layout.pieces(chunk, rank)))
    return areas


class SliceSeal(BaseModel):
    """Written once the slice's bytes are durable; only the seal makes them a slice."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format: Literal["holdfast-slice/1"] = "holdfast-slice/1"
    run: Annotated[str, Field(max_length=4096)]
    attempt: Annotated[int, Field(ge=1, lt=2**62)]  # attempt of the job that wrote it
    step: _Whole  # the step that is saved
    rank: Annotated[int, Field(ge=0, lt=2**31)]  # whose slice
    ranks: Annotated[int, Field(gt=0, lt=2**31)]  # of how many
    layout_digest: Annotated[str, Field(max_length=128)]
    frame_crc32s: tuple[_Crc, ...]  # of each of `frames_of(layout, rank)`, without padding
    # when the slice was sealed, for people and reports; 0 if unknown
    sealed_at_unix: Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)] = 0.0
    # times and bytes, for people and reports; and `job`, a random name that all ranks of a job share: slices of two
    # jobs are never combined, even if their attempts have the same number
    record: dict[str, Any] = Field(default_factory=dict)

    @property
    def order(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)

    @property
    def save_record(self) -> SaveRecord:
        return SaveRecord.from_json(self.record)

    def to_bytes(self) -> bytes:
        """Return JSON, with the CRC-32 of all other bytes in its last line."""
        return seal(self.model_dump_json(indent=None).encode(), _CRC_FIELD)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> SliceSeal:
        """Read a result of `to_bytes`. `source`: For messages. DamageError: truncated or altered."""
        body = unseal(data, _CRC_FIELD)
        if body is None:
            raise DamageError(f"{source}: the seal is truncated or altered; the slice is not used")
        try:
            found = cls.model_validate_json(body)
        except (ValidationError, RecursionError) as error:
            raise DamageError(f"{source}: this version cannot read the seal: {error}") from error
        if found.rank >= found.ranks:
            raise DamageError(f"{source}: the seal names rank {found.rank} of {found.ranks}")
        return found

    def check_layout(self, layout: Layout, *, source: str) -> None:
        """Raise `DamageError` if the seal does not belong to `layout`."""
        if self.layout_digest != layout.digest or self.ranks != layout.ranks:
            raise DamageError(f"{source}: the seal names another layout than the layout file beside it")
        if len(self.frame_crc32s) != len(frames_of(layout, self.rank)):
            raise DamageError(
                f"{source}: the seal has {len(self.frame_crc32s)} frame CRCs, expected "
                f"{len(frames_of(layout, self.rank))}"
            )


def _align_up(nbytes: int) -> int:
    return -(-nbytes // FRAME_ALIGNMENT_BYTES) * FRAME_ALIGNMENT_BYTES
