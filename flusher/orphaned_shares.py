"""Ends checkpoints whose lead is gone while flushers of other shares may still write. Only the lease holder does so.

    records of an earlier attempt ─► all sealed ─► published, as the lead would have done
                                  ├► not yet    ─► polled up to a timeout ─► voided, and the upload is aborted
                                  └► the lead's own seal is missing ─► voided at once: nobody writes that share now

The lead's seal has everything that only the lead knew, so its machine is not needed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from flusher.share_jobs import PeerNotReady, upload_of
from holdfast.checkpoints.intents import undo_intent
from holdfast.checkpoints.publish import ManifestFacts, build_manifest, publish_manifest
from holdfast.checkpoints.share_records import (
    ShareRecords,
    ShareSeal,
    ShareStart,
    combine_seals,
    list_share_objects,
)
from holdfast.errors import DamageError, HoldfastError, PeerLost, ProtocolError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.image.shares import ImageShare, Shares
from holdfast.store.base import ObjectInfo, Store

if TYPE_CHECKING:
    from flusher.writer_lease import WriterLease

_log = logging.getLogger("holdfast.flusher")


class OrphanedShares:
    """Publishes or voids them, one call per poll. Any worker thread; one call for one checkpoint at a time."""

    def __init__(
        self,
        store: Store,
        lease: WriterLease,
        run: str,
        *,
        best: BestRule | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._lease, self._run = store, lease, run
        self._best, self._clock = best, clock
        self._seals: dict[CheckpointId, list[ShareSeal]] = {}

    def publish(self, key: CheckpointId) -> Manifest:
        """Publish a checkpoint whose shares are all sealed. Raises `PeerNotReady`, or another error if it cannot."""
        records = ShareRecords(self._store, key)
        start, layout = records.start(), records.layout()
        if start is None or layout is None:
            raise PeerLost(f"{key}: nothing says into which upload its shares were written")
        manifest = self._find_manifest(start)
        if manifest is None:
            shares = Shares(layout.chunks, start.part_bytes // layout.chunk_bytes, start.count)
            mismatch = start.describe_mismatch(layout, shares)
            if mismatch:
                raise ProtocolError(f"{key}: its upload began with {mismatch}")
            seals = self._read_seals(records, start)
            index = LayoutIndex(layout)
            image = combine_seals(start, seals, index, shares)
            upload = upload_of(self._store, start, layout, image.chunk_crc32s, ImageShare(shares, 0))
            if not upload.published:
                upload.publish()
                reach(Point.FILE_PUBLISHED)
            made = build_manifest(
                image,
                run=self._run,
                file=start.file,
                write_id=start.write_id,
                facts=ManifestFacts(seals[0].staged_at_unix, self._clock(), seals[0].record, best=self._best),
                writer_record={"shares": start.count},
            )
            manifest = publish_manifest(self._store, made)
            reach(Point.MANIFEST_WRITTEN)
            self._lease.remove_if_dangling(manifest)
        self._seals.pop(key, None)
        records.clear(start.count)
        return manifest

    def void(self, key: CheckpointId, error: HoldfastError) -> None:
        """Void a checkpoint and abort its upload. Raises `StoreError`, and `FencedError` if the run is another's."""
        self._lease.check()
        records = ShareRecords(self._store, key)
        records.put_void(0, str(error))
        start = records.start()
        if start is not None:
            with contextlib.suppress(StoreMissing):  # it is gone already
                self._store.resume(start.file, start.interrupted_upload()).abort()
            undo_intent(self._store, start.write_id)
            records.clear(start.count, keep_void=True)
        self._seals.pop(key, None)

    def _read_seals(self, records: ShareRecords, start: ShareStart) -> Sequence[ShareSeal]:
        seals = self._seals.setdefault(records.key, [])
        while len(seals) < start.count and (found := records.seal(start, len(seals))) is not None:
            seals.append(found)
        if not seals:
            raise PeerLost(
                f"{records.key}: the first stager's flusher, on {start.host}, is gone before it had written its share"
            )
        if len(seals) < start.count:
            raise PeerNotReady(
                f"share {len(seals) + 1} of {start.count} to be sealed, whose lead on {start.host} is gone"
            )
        return seals

    def _find_manifest(self, start: ShareStart) -> Manifest | None:
        name = manifest_name(start.file)
        try:
            found = Manifest.from_bytes(self._store.read(name), source=name)
        except (StoreMissing, DamageError):
            return None
        return found if found.write_id == start.write_id else None


def find_orphans(
    store: Store, objects: Sequence[ObjectInfo], attempt: int, kept: Collection[CheckpointId]
) -> dict[CheckpointId, str]:
    """Find checkpoints of attempts before `attempt` that others may still write, with their write-ids. Remove the
    records of those that have ended. `kept`: checkpoints that this flusher's own ring resumes. Only for the lease
    holder.

    Raises:
        StoreError: The store failed; may be called again.
    """
    names_in_store = {info.name for info in objects}
    found: dict[CheckpointId, str] = {}
    for key, names in list_share_objects(objects).items():
        if key.attempt >= attempt or key in kept:
            continue
        start = _read_start(store, key)
        is_void = any(name.endswith(".void") for name in names)
        if start is not None and not is_void and manifest_name(start.file) not in names_in_store:
            found[key] = start.write_id
            continue
        for name in sorted(names, key=lambda name: not name.endswith(".start")):
            store.delete(name)
    return found


def _read_start(store: Store, key: CheckpointId) -> ShareStart | None:
    try:
        return ShareRecords(store, key).start()
    except (ProtocolError, DamageError) as error:
        _log.warning("%s: the shares of other writers are not waited for: %s", key, error)
        return None
