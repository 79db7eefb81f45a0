"""Coordinates the flusher of one share with those of the others, through records in the store.

    lead      start ──────────────────────────────► all seals? ─► (publish) ─► all records removed
    others      └─► the same upload ─► seal ────────────┘             └─► the manifest is there: durable

Nothing here waits: if another flusher is behind, `PeerNotReady` is raised, and the engine runs the job again later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flusher.steps import (
    AllSealed,
    Assemble,
    CrcsRead,
    PutCrcs,
    ReadCrcs,
    ReadSeal,
    Sealed,
    SealRead,
    SealShare,
)
from holdfast.checkpoints.share_records import (
    ShareRecords,
    ShareStart,
    combine_seals,
    voided_error,
)
from holdfast.errors import HoldfastError, PeerLost, ProtocolError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.share_sums import entry_pieces, part_crcs
from holdfast.image.shares import ImageShare
from holdfast.store.base import Store, Upload

if TYPE_CHECKING:
    from holdfast.image.layout import Layout

_log = logging.getLogger("holdfast.flusher")


class PeerNotReady(Exception):
    """Another flusher is behind. The message says what is awaited."""


class ShareJobs:
    """The share records of checkpoints in flight. Any worker thread; one job of a checkpoint at a time.

    Args:
        index: Number of this flusher's share; 0 leads.
        writers_of: Returns how many flushers write the checkpoints of an attempt.
    """

    def __init__(self, store: Store, index: int, writers_of: Callable[[int], int]) -> None:
        self._store, self._index, self._writers_of = store, index, writers_of
        self._shares: dict[CheckpointId, ImageShare | None] = {}
        self._starts: dict[CheckpointId, ShareStart] = {}
        # With the number of shares of each: a ring forgets older attempts.
        self._voided: dict[CheckpointId, int] = {}

    def set_share(self, key: CheckpointId, share: ImageShare | None) -> None:
        """Note which share of a checkpoint this flusher writes; None: all of it."""
        self._shares[key] = share

    def lead_start(self, key: CheckpointId, layout: Layout, share: ImageShare) -> ShareStart:
        """Return the lead's start. Raises `PeerNotReady`, and `ProtocolError` if it splits the image otherwise."""
        records = self._records(key)
        start = records.start()
        if start is None:
            self._raise_if_void(records)
            raise PeerNotReady("the first stager's flusher to begin the upload")
        mismatch = start.describe_mismatch(layout, share.shares)
        if mismatch:
            raise ProtocolError(
                f"{key}: the first stager's flusher on {start.host} begins an upload with {mismatch}; start all "
                "stagers of the run with the same version, store, chunk_bytes and number of shares"
            )
        return start

    def record_start(
        self,
        key: CheckpointId,
        layout: Layout,
        share: ImageShare,
        upload: Upload,
        *,
        file: str,
        write_id: str,
    ) -> None:
        """Note that the upload is open; the lead tells the others. Raises `PeerLost` if it was given up before."""
        self._records(key).require_not_voided(share.index)
        start = self._starts[key] = ShareStart.of(key, layout, share, upload, file=file, write_id=write_id)
        if self._index == 0:
            self._records(key).begin(start, layout)

    def put_crcs(self, job: PutCrcs) -> None:
        self._records(job.key).put_crcs(self._starts[job.key], job.share, job.entry_crcs)

    def read_crcs(self, job: ReadCrcs) -> CrcsRead:
        records, start, shares = self._records(job.key), self._starts[job.key], job.share.shares
        found = records.crcs(start, job.share_index)
        if found is None:
            self._raise_if_void(records)
            raise PeerNotReady(f"all chunks of share {job.share_index + 1} of {shares.count}")
        expected = len(entry_pieces(job.index.layout, shares.chunks_of(job.share_index)))
        if len(found.entry_crcs) != expected:
            raise ProtocolError(
                f"{job.key}: share {job.share_index + 1} of {shares.count}, on {found.host}, states CRCs of "
                f"{len(found.entry_crcs)} entries, expected {expected}"
            )
        return CrcsRead(job.key, job.share_index, found.entry_crcs)

    def seal(self, job: SealShare, *, staged_at_unix: float, record: dict[str, Any]) -> Sealed:
        """Seal the share. Call after `Upload.hand_over`."""
        made = self._records(job.key).put_seal(
            self._starts[job.key], job.share, job.sums, staged_at_unix=staged_at_unix, record=record
        )
        return Sealed(job.key, job.share, made)

    def read_seal(self, job: ReadSeal) -> SealRead:
        """Raises `PeerNotReady`."""
        found = self._records(job.key).seal(self._starts[job.key], job.share_index)
        if found is None:
            raise PeerNotReady(f"share {job.share_index + 1} of {job.share.shares.count} to be sealed")
        return SealRead(job.key, job.share_index, found)

    def assemble(self, job: Assemble) -> tuple[AllSealed, Upload]:
        """Return the image, and the upload with all its parts."""
        start = self._starts[job.key]
        image = combine_seals(start, job.seals, job.index, job.share.shares)
        upload = upload_of(self._store, start, job.index.layout, image.chunk_crc32s, job.share)
        return AllSealed(image), upload

    def check_ended(self, key: CheckpointId) -> None:
        """Return once the lead has published it, or never will. Raises `PeerNotReady`."""
        records = self._records(key)
        if records.start() is not None:  # the lead removes it after it wrote the manifest
            self._raise_if_void(records)
            raise PeerNotReady("the first stager's flusher to publish")

    def clear_published(self, key: CheckpointId) -> None:
        """Remove the records of a published checkpoint, and older voids; after an error the next writer does."""
        share = self._shares.get(key)
        if share is None:
            return
        with self._log_leftovers(key):
            self._records(key).clear(share.shares.count)
        for older in sorted(one for one in self._voided if one < key):
            with self._log_leftovers(older):
                self._records(older).clear(self._voided[older])
                del self._voided[older]

    def is_shared(self, key: CheckpointId) -> bool:
        """Whether other flushers may write shares of this checkpoint."""
        share = self._shares.get(key, _UNKNOWN)
        return self._writers_of(key.attempt) > 1 if share is _UNKNOWN else share is not None

    def give_up(self, key: CheckpointId, error: HoldfastError) -> None:
        """Void the checkpoint, unless this share is sealed: then only the lead may."""
        self._records(key).put_void(self._index, str(error))

    def clear(self, key: CheckpointId) -> None:
        """Remove the records of an aborted upload; the void stays for those who still poll."""
        count = self._voided[key] = self._writers_of(key.attempt)
        self._records(key).clear(count, keep_void=True)

    def forget(self, key: CheckpointId) -> None:
        for table in (self._shares, self._starts):
            table.pop(key, None)

    def _records(self, key: CheckpointId) -> ShareRecords:
        return ShareRecords(self._store, key)

    def raise_if_void(self, key: CheckpointId) -> None:
        """Raise `PeerLost` if the flusher of another share has given the checkpoint up."""
        self._raise_if_void(self._records(key))

    @staticmethod
    def _raise_if_void(records: ShareRecords) -> None:
        void = records.void()
        if void is not None:
            raise voided_error(void)

    @staticmethod
    @contextlib.contextmanager
    def _log_leftovers(key: CheckpointId) -> Any:
        try:
            yield
        except StoreError as error:
            _log.warning("%s: its share records stay for the next writer: %s", key, error)


_UNKNOWN = object()  # a checkpoint that was never begun here: it may have several shares


def upload_of(
    store: Store, start: ShareStart, layout: Layout, chunk_crcs: tuple[int, ...], share: ImageShare
) -> Upload:
    """Open the upload of an image whose shares are all sealed. Raises `StoreError`; `PeerLost`: parts are missing."""
    crcs = part_crcs(layout, share.shares, chunk_crcs)
    upload = store.resume(start.file, start.interrupted_upload(crcs))
    lost = sorted(crcs.keys() - upload.written())
    if lost:
        owner = share.shares.owner(lost[0] * share.shares.part_chunks)
        raise PeerLost(
            f"{store.url}/{start.file}: {len(lost)} parts that were sealed are not there as they were written (part "
            f"{lost[0]}, of share {owner + 1} of {share.shares.count}); the checkpoint is given up"
        )
    return upload
