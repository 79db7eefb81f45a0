"""Runs the pipeline's jobs in worker threads: the only place where a checkpoint's bytes meet the store.

    Open ─► choose a name, Store.begin, intent; or Store.resume with what a dead flusher recorded
    Verify, Patch ─► the slot's memory (holdfast/image/chunks.py)
    WritePart ─► Upload.write_part ─► recorded (flusher/progress.py)
    Publish ─► Upload.publish ─► manifest        the store checks the lease in each try (holdfast/store/guarded.py)
    the others ─► coordination of the flushers of one image (flusher/share_jobs.py)

Each method returns the event that answers its job, or raises a `HoldfastError`, or `PeerNotReady` if another flusher is
behind. In either case the job may be run again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flusher.orphaned_shares import OrphanedShares
from flusher.progress import Head, Progress, progress_path
from flusher.share_jobs import ShareJobs
from flusher.steps import (
    Assemble,
    AwaitPublished,
    CrcsPut,
    EndOrphan,
    Event,
    Job,
    Open,
    Opened,
    OrphanEnded,
    PartWritten,
    Patch,
    Patched,
    Publish,
    Published,
    PutCrcs,
    ReadCrcs,
    ReadSeal,
    SealShare,
    Verified,
    Verify,
    WritePart,
)
from holdfast.checkpoints.intents import Intent, undo_intent
from holdfast.checkpoints.publish import (
    ManifestFacts,
    build_manifest,
    candidate_names,
    choose_name,
    publish_manifest,
    writer_id,
)
from holdfast.crc import combine_all
from holdfast.errors import DamageError, HoldfastError, PeerLost, ProtocolError, StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import patch_chunk, verify_chunk
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.image.shares import WHOLE, ImageShare, ShareNumber
from holdfast.ring.ring import Ring
from holdfast.store.base import InterruptedUpload, Store, Upload

if TYPE_CHECKING:
    from flusher.writer_lease import WriterLease


_log = logging.getLogger("holdfast.flusher")


@dataclass(slots=True)
class _Target:
    """The upload to which one checkpoint goes."""

    upload: Upload
    file: str
    write_id: str
    progress: Progress | None  # None: the upload is not resumable


@dataclass(slots=True)
class _Tally:
    """The flusher's times for one checkpoint, summed over threads: they may exceed the elapsed time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        with self.lock:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 6)

    def count(self, name: str, number: int) -> None:
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + number


class Jobs:
    """Moves chunks from the ring to the store. `clock`: Unix seconds, for the manifest."""

    def __init__(
        self,
        ring: Ring,
        store: Store,
        lease: WriterLease,
        clock: Callable[[], float] = time.time,
        *,
        best: BestRule | None = None,
        share: ShareNumber = WHOLE,
    ) -> None:
        self._ring, self._store, self._lease, self._clock = ring, store, lease, clock
        self._best = best
        self._leads, self._share_jobs = share.is_lead, ShareJobs(store, share.index, ring.writers)
        self._run = store.url.rstrip("/").rpartition("/")[2]
        self._orphans = OrphanedShares(store, lease, self._run, best=best, clock=clock)
        self._naming = threading.Lock()
        self._targets: dict[CheckpointId, _Target] = {}
        self._names: dict[CheckpointId, str] = {}
        self._progress: dict[CheckpointId, Progress] = {}  # of dead flushers
        self._tallies: dict[CheckpointId, _Tally] = {}
        self.staged_at_unix: dict[CheckpointId, float] = {}
        self.manifests: dict[CheckpointId, Manifest] = {}

    def run(self, job: Job) -> Event | OrphanEnded:
        """Run one job. Any worker thread."""
        try:
            return self._do(job)
        except StoreError as error:
            if error.begin_anew and self._share_jobs.is_shared(job.key):
                self._share_jobs.raise_if_void(job.key)  # the flusher that aborted the upload recorded why
            raise

    def _do(self, job: Job) -> Event | OrphanEnded:
        match job:
            case Open():
                return self._open(job)
            case Verify():
                with self._timed(job.key, "verify_seconds"):
                    memory = self._ring.slot_memory(job.slots[0])
                    crcs = verify_chunk(memory, job.index, job.chunk, job.sources, key=job.key)
                return Verified(job.key, job.chunk, crcs)
            case Patch():
                with self._timed(job.key, "verify_seconds"):
                    memory = self._ring.slot_memory(job.slots[0])
                    crcs_so_far = job.entry_crcs, job.verified_crcs
                    patched = patch_chunk(memory, job.index, job.chunk, *crcs_so_far, key=job.key)
                return Patched(job.key, job.chunk, patched)
            case WritePart():
                buffers = [self._ring.slot_memory(slot)[:nbytes] for slot, nbytes in job.pieces]
                reach(Point.PART_BEGUN)
                with self._timed(job.key, "write_seconds"):
                    target = self._targets[job.key]
                    target.upload.write_part(job.part, buffers, job.crc32)
                reach(Point.PART_WRITTEN)
                if target.progress is not None:
                    target.progress.add_part(job.part, job.segment_crcs)
                    reach(Point.PART_RECORDED)
                self._tally(job.key).count("parts_written", 1)
                return PartWritten(job.key, job.part)
            case Publish():
                return self._publish(job)
            case _:
                return self._run_share_job(job)

    def _run_share_job(
        self, job: PutCrcs | ReadCrcs | SealShare | ReadSeal | Assemble | AwaitPublished | EndOrphan
    ) -> Event | OrphanEnded:
        """Run a job by which the flushers of one image coordinate."""
        match job:
            case PutCrcs():
                self._share_jobs.put_crcs(job)
                reach(Point.CRCS_PUT)
                return CrcsPut(job.key)
            case ReadCrcs():
                return self._share_jobs.read_crcs(job)
            case SealShare():
                return self._seal(job)
            case ReadSeal():
                return self._share_jobs.read_seal(job)
            case Assemble():
                reach(Point.ALL_SEALED)
                sealed, upload = self._share_jobs.assemble(job)
                self._targets[job.key].upload = upload
                self._tally(job.key).count("shares", job.share.shares.count)
                return sealed
            case AwaitPublished():
                return self._check_published(job.key)
            case EndOrphan(key, error):
                if error is None:
                    return OrphanEnded(key, self._orphans.publish(key))
                self._orphans.void(key, error)
                return OrphanEnded(key, None)

    def discard(self, key: CheckpointId, error: HoldfastError) -> None:
        """Abort the upload of a checkpoint that will not be published. `error`: why. Raises `StoreError`, and
        `FencedError` if another writer owns the run.
        """
        target, dead = self._targets.get(key), self._progress.get(key)
        shared = self._share_jobs.is_shared(key)
        self.forget(key)
        if shared and self._leads:
            self._lease.check()  # another lease holder may be publishing it
        if shared:
            self._share_jobs.give_up(key, error)
        if self._leads:
            self._abort(target, dead)
        elif target is not None:
            target.upload.hand_over()  # only the lead aborts it
        if shared and self._leads:
            self._share_jobs.clear(key)

    def forget(self, key: CheckpointId) -> None:
        """Drop all state of a checkpoint that has ended."""
        self._share_jobs.forget(key)
        for table in (
            *(self._targets, self._names, self._progress),
            *(self._tallies, self.staged_at_unix, self.manifests),
        ):
            table.pop(key, None)

    def record(self, key: CheckpointId) -> dict[str, Any]:
        """Return this flusher's tally for a checkpoint so far: seconds, and parts."""
        tally = self._tallies.get(key)
        return {**tally.seconds, **tally.counts} if tally else {}

    def find_progress(self, key: CheckpointId) -> Progress | None:
        """Load a dead flusher's record of a checkpoint, and reserve its file name. For the loop's thread. Raises
        `ProtocolError` if the record is not readable.
        """
        found = Progress.load(progress_path(self._ring.directory, key))
        if found is not None:
            with self._naming:
                self._names[key] = found.head.file
            self._progress[key] = found
        return found

    def known_manifest(self, key: CheckpointId) -> Manifest | None:
        """Return the manifest of a checkpoint that the ring has forgotten; None if it was given up."""
        for file in candidate_names(key):
            found = self._manifest(file)
            if found is not None and found.order == key:
                return found
        return None

    def _open(self, job: Open) -> Event:
        self._share_jobs.set_share(job.key, job.share)
        if job.resume is not None:
            return self._resume(job)
        layout = job.index.layout
        if job.share is not None and not self._leads:
            return self._join(job, job.share)
        self._abort_previous(job.key)
        with self._timed(job.key, "open_seconds"):
            with self._naming:
                taken = {name for key, name in self._names.items() if key != job.key}
                file = self._names[job.key] = choose_name(self._store, job.key, taken)
            write_id = writer_id(self._lease.attempt)
            sizes = {"nbytes": layout.image_bytes, "chunk_bytes": layout.chunk_bytes}
            upload = self._store.begin(file, **sizes, write_id=write_id)
            target = self._targets[job.key] = _Target(upload, file, write_id, None)
            Intent.to_publish(file, upload, **sizes, write_id=write_id).write(self._store)
        if upload.part_bytes <= 0 or upload.part_bytes % layout.chunk_bytes:
            raise ProtocolError(
                f"{self._store.url}: the store uploads parts of {upload.part_bytes} bytes, expected a multiple of the "
                f"chunk size {layout.chunk_bytes}"
            )
        if upload.token is not None:
            target.progress = Progress.begin(
                progress_path(self._ring.directory, job.key),
                Head(
                    file=file,
                    write_id=write_id,
                    token=upload.token,
                    part_bytes=upload.part_bytes,
                    layout_digest=layout.digest,
                ),
            )
        if job.share is not None:
            self._share_jobs.record_start(job.key, layout, job.share, upload, file=file, write_id=write_id)
            reach(Point.SHARES_BEGUN)
        resumable = upload.token is not None
        return Opened(job.key, upload.part_bytes // layout.chunk_bytes, resumable)

    def _join(self, job: Open, share: ImageShare) -> Event:
        """Open the upload that the lead has begun."""
        layout = job.index.layout
        start = self._share_jobs.lead_start(job.key, layout, share)
        with self._timed(job.key, "open_seconds"):
            upload = self._store.resume(start.file, start.interrupted_upload())
        head = Head(
            file=start.file,
            write_id=start.write_id,
            token=start.token,
            part_bytes=start.part_bytes,
            layout_digest=start.layout_digest,
        )
        progress = Progress.begin(progress_path(self._ring.directory, job.key), head)
        self._targets[job.key] = _Target(upload, start.file, start.write_id, progress)
        self._share_jobs.record_start(
            job.key, layout, share, upload, file=start.file, write_id=start.write_id
        )
        return Opened(job.key, upload.part_bytes // layout.chunk_bytes)

    def _abort_previous(self, key: CheckpointId) -> None:
        """Abort the previous upload of a checkpoint that starts over, ours or a dead flusher's."""
        try:
            self._abort(self._targets.pop(key, None), self._progress.pop(key, None))
        except StoreError as error:
            _log.debug("%s: nothing to take back: %s", key, error)
        progress_path(self._ring.directory, key).unlink(missing_ok=True)

    def _abort(self, target: _Target | None, dead: Progress | None) -> None:
        """Abort an upload of this flusher, else one of a dead flusher, and remove its intent."""
        if target is not None:
            target.upload.abort()
            undo_intent(self._store, target.write_id)
        elif dead is not None:
            with contextlib.suppress(StoreMissing):  # it is gone already
                self._resume_upload(dead, self._ring.layout(dead.head.layout_digest)).abort()
            undo_intent(self._store, dead.head.write_id)

    def _resume(self, job: Open) -> Event:
        """Resume the upload of a dead flusher, and check that the store has the parts that the record names."""
        progress, layout = self._progress[job.key], job.index.layout
        head = progress.head
        manifest = self._manifest(head.file)
        if manifest is not None and manifest.write_id == head.write_id:
            self.manifests[job.key] = manifest
            if self._leads:
                self._share_jobs.clear_published(job.key)
            return Published(job.key)
        with self._timed(job.key, "open_seconds"):
            upload = self._resume_upload(progress, layout)
        lost = progress.parts.keys() - upload.written()
        if lost:
            shown = ", ".join(str(part) for part in sorted(lost)[:8])
            raise StoreError(
                f"{self._store.url}/{head.file}: {len(lost)} parts that were written are gone (part {shown}); another "
                "process removed them, or the store lost them",
                begin_anew=True,
            )
        self._targets[job.key] = _Target(upload, head.file, head.write_id, progress)
        if job.share is not None:
            self._share_jobs.record_start(
                job.key, layout, job.share, upload, file=head.file, write_id=head.write_id
            )
        self._tally(job.key).count("parts_resumed", len(progress.parts))
        return Opened(job.key, upload.part_bytes // layout.chunk_bytes)

    def _resume_upload(self, progress: Progress, layout: Layout) -> Upload:
        head = progress.head
        crc32s = _part_crcs(progress, layout)
        begun = InterruptedUpload(layout.image_bytes, head.part_bytes, head.write_id, head.token, crc32s)
        return self._store.resume(head.file, begun)

    def _manifest(self, file: str) -> Manifest | None:
        name = manifest_name(file)
        try:
            return Manifest.from_bytes(self._store.read(name), source=name)
        except (StoreMissing, DamageError):
            return None

    def _tally(self, key: CheckpointId) -> _Tally:
        return self._tallies.setdefault(key, _Tally())

    def _seal(self, job: SealShare) -> Event:
        self._targets[job.key].upload.hand_over()
        checkpoint = self._ring.checkpoint(*job.key) if self._leads else None
        sealed = self._share_jobs.seal(
            job,
            staged_at_unix=self.staged_at_unix.get(job.key, self._clock()),
            record=checkpoint.record if checkpoint else {},
        )
        reach(Point.SHARE_SEALED)
        return sealed

    def _check_published(self, key: CheckpointId) -> Event:
        """Learn the outcome from the manifest alone: the lead removes the share records after writing it."""
        self._share_jobs.check_ended(key)
        target = self._targets[key]
        manifest = self._manifest(target.file)
        if manifest is not None and manifest.write_id == target.write_id:
            self.manifests[key] = manifest
            return Published(key)
        self._share_jobs.raise_if_void(key)
        raise PeerLost(f"{key}: the first stager's flusher gave it up; its log says why")

    def _publish(self, job: Publish) -> Event:
        target = self._targets[job.key]
        checkpoint = self._ring.checkpoint(*job.key)
        reach(Point.PARTS_DONE)
        with self._timed(job.key, "publish_seconds"):
            if not target.upload.published:
                target.upload.publish()
                reach(Point.FILE_PUBLISHED)
            if target.progress is not None and not target.progress.published:
                target.progress.add_published()
        now = self._clock()
        manifest = build_manifest(
            job.image,
            run=self._run,
            file=target.file,
            write_id=target.write_id,
            facts=ManifestFacts(
                self.staged_at_unix.get(job.key, now),
                now,
                checkpoint.record if checkpoint else {},
                best=self._best,
            ),
            writer_record=self.record(job.key),
        )
        self.manifests[job.key] = publish_manifest(self._store, manifest)
        reach(Point.MANIFEST_WRITTEN)
        self._lease.remove_if_dangling(self.manifests[job.key])
        self._share_jobs.clear_published(job.key)
        return Published(job.key)

    def _timed(self, key: CheckpointId, name: str) -> _Timed:
        return _Timed(self._tally(key), name)


def _part_crcs(progress: Progress, layout: Layout) -> dict[int, int]:
    """Return the CRC-32 of each part that is recorded as written."""
    part_chunks = progress.head.part_bytes // layout.chunk_bytes
    found: dict[int, int] = {}
    for part, segment_crcs in progress.parts.items():
        segments = (
            (crc, segment.nbytes)
            for chunk, crcs in enumerate(segment_crcs, start=part * part_chunks)
            for crc, segment in zip(crcs, layout.segments(chunk), strict=True)
        )
        found[part] = combine_all(segments)
    return found


class _Timed:
    def __init__(self, tally: _Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._tally.add(self._name, time.monotonic() - self._began)
