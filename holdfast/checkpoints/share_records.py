"""Records in the store by which the writers of one image coordinate: they share nothing else.

    committed ─► all removed      void ─► all but the void removed, which a later commit or the next writer removes

docs/format.md (Shares) lists the objects. A flusher that gives a checkpoint up first puts the void in the place of its
own seal, and only the lead may replace a seal with one: the seals alone say whether the checkpoint may be published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.publish import FinishedImage, exists
from holdfast.errors import DamageError, PeerLost, ProtocolError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.share_sums import ShareSums, combine_sums
from holdfast.image.shares import WRITERS_MAX, ImageShare, Shares
from holdfast.sealed import seal, unseal
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo, Store, Upload

_PREFIX = ".holdfast/shares/"
_NAME = re.compile(r"\.holdfast/shares/a(\d{6,18})-s(\d{9,18})\.[a-z0-9-]{1,20}")
_CRC_FIELD = "share_crc32"
_REASON_CHARACTERS_MAX = 2000
_SMALL_BYTES_MAX = 1 << 16  # of a record that states no CRCs
_Text = Annotated[str, Field(min_length=1, max_length=4096)]
_Number = Annotated[int, Field(ge=0, lt=2**62)]
_Size = Annotated[int, Field(gt=0, lt=2**62)]
_Index = Annotated[int, Field(ge=0, lt=WRITERS_MAX)]
_Crcs = tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]


class _Record(BaseModel):
    """One object of one checkpoint. `host`: its writer's, for messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    attempt: Annotated[int, Field(ge=1, lt=2**62)]
    step: _Number
    host: Annotated[str, Field(max_length=1024)]

    @property
    def key(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


class ShareStart(_Record):
    """The upload of all shares of an image, and how the image is split."""

    format: Literal["holdfast-share-start/1"] = "holdfast-share-start/1"
    file: Annotated[str, Field(pattern=r"^step-\d{9,19}(-a\d{3,19})?\.pt$")]
    write_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    token: _Text
    image_bytes: _Size
    chunk_bytes: _Size
    part_bytes: _Size
    layout_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    count: Annotated[int, Field(ge=2, le=WRITERS_MAX)]

    @classmethod
    def of(
        cls, key: CheckpointId, layout: Layout, share: ImageShare, upload: Upload, *, file: str, write_id: str
    ) -> Self:
        """Return the start of a new upload. Raises `ProtocolError` if no other process can write into it."""
        if upload.token is None:
            raise ProtocolError(
                f"{file}: this store cannot resume an upload, so several stagers cannot write one file; use one "
                "stager, or a store on S3 or in a directory"
            )
        return cls(
            **_record_fields(key),
            file=file,
            write_id=write_id,
            token=upload.token,
            image_bytes=layout.image_bytes,
            chunk_bytes=layout.chunk_bytes,
            part_bytes=upload.part_bytes,
            layout_digest=layout.digest,
            count=share.shares.count,
        )

    def describe_mismatch(self, layout: Layout, shares: Shares) -> str:
        """Return how it differs from what another writer expects; empty if it does not."""
        expected = {
            "image_bytes": layout.image_bytes,
            "chunk_bytes": layout.chunk_bytes,
            "part_bytes": shares.part_chunks * layout.chunk_bytes,
            "layout_digest": layout.digest,
            "count": shares.count,
        }
        wrong = [
            f"{name} {getattr(self, name)}, expected {value}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]
        return "; ".join(wrong)

    def interrupted_upload(self, crc32s: dict[int, int] | None = None) -> InterruptedUpload:
        """Return the upload, for `Store.resume`. `crc32s`: of its parts, as far as they are known."""
        return InterruptedUpload(self.image_bytes, self.part_bytes, self.write_id, self.token, crc32s or {})


class _ShareRecord(_Record):
    write_id: _Text
    index: _Index
    count: Annotated[int, Field(ge=2, le=WRITERS_MAX)]
    entry_crcs: _Crcs

    def require_same_write(self, start: ShareStart, index: int) -> None:
        """Raise `ProtocolError` if it belongs to another write, another checkpoint or another share."""
        actual = (*self.key, self.write_id, self.index, self.count)
        expected = (*start.key, start.write_id, index, start.count)
        if actual != expected:
            raise ProtocolError(
                f"{start.key}: what share {index + 1} of {start.count} left in the store is of {self.key}, write "
                f"{self.write_id[:80]}, share {self.index + 1} of {self.count}; expected write {start.write_id}: "
                "another job writes to this run; nothing is published"
            )


class ShareCrcs(_ShareRecord):
    """The CRCs of the entries' bytes in one share, all of them verified."""

    format: Literal["holdfast-share-crcs/1"] = "holdfast-share-crcs/1"


class ShareSeal(_ShareRecord):
    """One share is written. `record`, `staged_at_unix`: for the manifest, from the lead."""

    format: Literal["holdfast-share-seal/1"] = "holdfast-share-seal/1"
    layout_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    first_chunk: _Number
    chunk_crcs: _Crcs
    staged_at_unix: Annotated[float, Field(allow_inf_nan=False)]
    record: dict[str, Any] = {}


class ShareVoid(_Record):
    """The checkpoint is given up. `index`: the share whose writer gave it up."""

    format: Literal["holdfast-share-void/1"] = "holdfast-share-void/1"
    index: _Index
    reason: Annotated[str, Field(max_length=_REASON_CHARACTERS_MAX)]


R = TypeVar("R", bound=_Record)
_START, _CRCS = TypeAdapter(ShareStart), TypeAdapter(ShareCrcs)
_VOID = TypeAdapter(ShareVoid)
_SEAL_OR_VOID: TypeAdapter[ShareSeal | ShareVoid] = TypeAdapter(
    Annotated[ShareSeal | ShareVoid, Field(discriminator="format")]
)


class ShareRecords:
    """The objects of one checkpoint. Any thread. Methods raise `StoreError`, and `ProtocolError` or `DamageError` for
    an object that another program has left there.
    """

    def __init__(self, store: Store, key: CheckpointId) -> None:
        self._store, self.key = store, key
        self._prefix = f"{_PREFIX}a{key.attempt:06d}-s{key.step:09d}."

    def begin(self, start: ShareStart, layout: Layout) -> None:
        """Let the other writers begin. May be called again."""
        self._store.write(f"{self._prefix}layout", layout.to_bytes())
        self._write("start", start)

    def start(self) -> ShareStart | None:
        """Return the start; None: the lead has not begun, or all is over."""
        return self._read("start", _START)

    def layout(self) -> Layout | None:
        try:
            return Layout.from_bytes(self._store.read(f"{self._prefix}layout"))
        except StoreMissing:
            return None

    def put_crcs(self, start: ShareStart, share: ImageShare, entry_crcs: Sequence[int]) -> None:
        """Publish the CRCs of a share, all bytes of which are verified. May be called again."""
        record = ShareCrcs(**_share_fields(start, share), entry_crcs=tuple(entry_crcs))
        self._write(f"crcs-{share.index + 1}", record)

    def crcs(self, start: ShareStart, index: int) -> ShareCrcs | None:
        """Return the CRCs of a share; None: not verified yet. Raises `ProtocolError`: they are of another write."""
        found = self._read(f"crcs-{index + 1}", _CRCS)
        if found is not None:
            found.require_same_write(start, index)
        return found

    def put_seal(
        self,
        start: ShareStart,
        share: ImageShare,
        sums: ShareSums,
        *,
        staged_at_unix: float,
        record: dict[str, Any],
    ) -> ShareSeal:
        """Seal a share that is written. May be called again. Call after `require_not_voided`, in the same process."""
        sealed = ShareSeal(
            **_share_fields(start, share),
            entry_crcs=sums.entry_crcs,
            layout_digest=start.layout_digest,
            first_chunk=share.chunks.start,
            chunk_crcs=sums.chunk_crcs,
            staged_at_unix=staged_at_unix,
            record=record,
        )
        self._write(f"seal-{share.index + 1}", sealed)
        return sealed

    def require_not_voided(self, index: int) -> None:
        """Raise `PeerLost` if a writer of this share, which has died since, gave the checkpoint up."""
        void = self._read_void(f"seal-{index + 1}")
        if void is not None:
            raise voided_error(void)

    def seal(self, start: ShareStart, index: int) -> ShareSeal | None:
        """Return a share's seal; None: not written yet. Raises `PeerLost`: given up; `ProtocolError`: another write."""
        found = self._read(f"seal-{index + 1}", _SEAL_OR_VOID)
        if isinstance(found, ShareVoid):
            raise voided_error(found)
        if found is not None:
            found.require_same_write(start, index)
        return found

    def put_void(self, index: int, reason: str) -> bool:
        """Give the checkpoint up; the first reason stays. False: share `index` is sealed, and not ours to undo."""
        void = ShareVoid(**_record_fields(self.key), index=index, reason=reason[:_REASON_CHARACTERS_MAX])
        name = f"seal-{index + 1}"
        if index == 0:
            self._write(name, void)
        # Some servers ignore that a creation is exclusive, so look first.
        elif self._read_void(name) is None and (
            exists(self._store, self._prefix + name) or not self._create(name, void)
        ):
            return False
        self._create("void", void)
        return True

    def void(self) -> ShareVoid | None:
        return self._read("void", _VOID)

    def clear(self, count: int, *, keep_void: bool = False) -> None:
        """Remove all objects, the start first: without it no flusher takes part any more. `count`: of the shares."""
        numbered = (f"{kind}-{index + 1}" for kind in ("crcs", "seal") for index in range(count))
        for name in ("start", "layout", *numbered, *(() if keep_void else ("void",))):
            self._store.delete(self._prefix + name)

    def _write(self, name: str, record: _Record) -> None:
        self._store.write(self._prefix + name, seal(record.model_dump_json().encode(), _CRC_FIELD))

    def _create(self, name: str, record: _Record) -> bool:
        return self._store.create(self._prefix + name, seal(record.model_dump_json().encode(), _CRC_FIELD))

    def _read_void(self, name: str) -> ShareVoid | None:
        try:
            found = self._read(name, _SEAL_OR_VOID)
        except (ProtocolError, DamageError):
            return None  # another program's
        return found if isinstance(found, ShareVoid) else None

    def _read(self, name: str, kind: TypeAdapter[R]) -> R | None:
        full = self._prefix + name
        bytes_max = _SMALL_BYTES_MAX if kind in (_START, _VOID) else SMALL_BYTES_MAX
        try:
            body = unseal(self._store.read(full, bytes_max), _CRC_FIELD)
        except StoreMissing:
            return None
        if body is None:
            raise DamageError(
                f"{self._store.url}/{full}: its CRC-32 does not hold; the checkpoint is given up"
            )
        try:
            found = kind.validate_json(body)
        except (ValidationError, RecursionError) as error:
            raise ProtocolError(f"{self._store.url}/{full}: this version cannot read it: {error}") from error
        if found.key != self.key:
            raise ProtocolError(f"{self._store.url}/{full}: is of {found.key}, expected {self.key}")
        return found


def combine_seals(
    start: ShareStart, seals: Sequence[ShareSeal], index: LayoutIndex, shares: Shares
) -> FinishedImage:
    """Return the facts about an image whose shares are all sealed. `seals`: of each share, in order. Raises
    `ProtocolError`: a seal is of another write, layout or share, or one is missing; nothing may be published.
    """
    for number, one in enumerate(seals):
        one.require_same_write(start, number)
        chunks = shares.chunks_of(number)
        actual = (one.layout_digest, one.first_chunk, len(one.chunk_crcs))
        if actual != (index.layout.digest, chunks.start, len(chunks)):
            raise ProtocolError(
                f"{start.key}: share {number + 1} of {shares.count} on {one.host} sealed {actual[2]} chunks from chunk "
                f"{actual[1]} of layout {actual[0][:12]}, expected {len(chunks)} from {chunks.start} of "
                f"{index.layout.digest[:12]}; nothing is published"
            )
    sums = combine_sums(index.layout, shares, [ShareSums(one.chunk_crcs, one.entry_crcs) for one in seals])
    return FinishedImage(start.key, index, *sums)


def list_share_objects(objects: Sequence[ObjectInfo]) -> dict[CheckpointId, list[str]]:
    """Return the names of share records in a listing, by their checkpoints, oldest first."""
    found: dict[CheckpointId, list[str]] = {}
    for info in objects:
        match = _NAME.fullmatch(info.name)
        if match is not None:
            found.setdefault(CheckpointId(int(match[1]), int(match[2])), []).append(info.name)
    return dict(sorted(found.items()))


def voided_error(void: ShareVoid) -> PeerLost:
    """Return the error for a flusher that finds its checkpoint given up."""
    return PeerLost(f"{void.key}: share {void.index + 1}, on {void.host}, gave it up: {void.reason}")


def _record_fields(key: CheckpointId) -> dict[str, Any]:
    return {"attempt": key.attempt, "step": key.step, "host": Identity.of_this_process().host[:1024]}


def _share_fields(start: ShareStart, share: ImageShare) -> dict[str, Any]:
    return {
        **_record_fields(start.key),
        "write_id": start.write_id,
        "index": share.index,
        "count": share.shares.count,
    }
