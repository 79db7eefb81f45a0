"""Does the jobs of the pipeline: the only place where a checkpoint's bytes meet the store. Runs in worker threads.

    Open ─► choose a name, Store.begin          Verify, Patch ─► the slot's memory (flusher/chunkwork.py)
    WritePart ─► Upload.write_part              Publish ─► claim still ours? ─► Upload.publish ─► manifest

Every method gives the event that answers its job, or raises an error of ours. A job that failed may be run again.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flusher.chunkwork import patch_chunk, verify_chunk
from flusher.publish import Times, build_manifest, choose_name
from flusher.steps import (
    Event,
    Job,
    Key,
    Open,
    Opened,
    PartWritten,
    Patch,
    Patched,
    Publish,
    Published,
    Verified,
    Verify,
    WritePart,
)
from holdfast.errors import ProtocolError
from holdfast.manifest import Manifest, manifest_name
from holdfast.ring import Ring
from holdfast.storage.base import Store, Upload

if TYPE_CHECKING:
    from flusher.tenure import Tenure

__all__ = ["Jobs"]


@dataclass(slots=True)
class _Target:
    """Where one checkpoint goes."""

    upload: Upload
    file: str
    write_id: str
    published: bool = False  # the file is in place, its manifest not yet


@dataclass(slots=True)
class _Tally:
    """What one checkpoint cost the flusher; sums over threads, so it may exceed the time that passed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        with self.lock:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 6)


class Jobs:
    """Args:
    ring: Where the chunks lie.
    store: Where they go.
    tenure: The claim, checked before anything becomes visible.
    clock: Unix seconds, for the manifest.
    """

    def __init__(
        self, ring: Ring, store: Store, tenure: Tenure, clock: Callable[[], float] = time.time
    ) -> None:
        self._ring, self._store, self._tenure, self._clock = ring, store, tenure, clock
        self._run = store.url.rstrip("/").rpartition("/")[2]
        self._naming = threading.Lock()
        self._targets: dict[Key, _Target] = {}
        self._names: dict[Key, str] = {}
        self._tallies: dict[Key, _Tally] = {}
        self.staged_at_unix: dict[Key, float] = {}
        self.manifests: dict[Key, Manifest] = {}

    def run(self, job: Job) -> Event:
        """Do one job. From any worker thread."""
        match job:
            case Open():
                return self._open(job)
            case Verify():
                with self._timed(job.key, "verify_seconds"):
                    crcs = verify_chunk(self._ring.slot_memory(job.slots[0]), job)
                return Verified(job.key, job.chunk, crcs)
            case Patch():
                with self._timed(job.key, "verify_seconds"):
                    patched = patch_chunk(self._ring.slot_memory(job.slots[0]), job)
                return Patched(job.key, job.chunk, patched)
            case WritePart():
                buffers = [self._ring.slot_memory(slot)[:nbytes] for slot, nbytes in job.pieces]
                with self._timed(job.key, "write_seconds"):
                    self._targets[job.key].upload.write_part(job.part, buffers, job.crc32)
                return PartWritten(job.key, job.part)
            case Publish():
                return self._publish(job)

    def discard(self, key: Key) -> None:
        """Take back what was written of a checkpoint that will not be published. Raises `StoreError`."""
        target = self._targets.get(key)
        self.forget(key)
        if target is not None:
            target.upload.abort()

    def forget(self, key: Key) -> None:
        """Nothing more will be asked about this checkpoint."""
        for table in (self._targets, self._names, self._tallies, self.staged_at_unix, self.manifests):
            table.pop(key, None)

    def record(self, key: Key) -> dict[str, Any]:
        """What the flusher did for this checkpoint so far, in seconds."""
        tally = self._tallies.get(key)
        return dict(tally.seconds) if tally else {}

    def _open(self, job: Open) -> Event:
        layout = job.index.layout
        with self._timed(job.key, "open_seconds"):
            with self._naming:
                taken = {name for key, name in self._names.items() if key != job.key}
                file = self._names[job.key] = choose_name(self._store, job.key, taken)
            write_id = uuid.uuid4().hex
            upload = self._store.begin(
                file, nbytes=layout.image_bytes, chunk_bytes=layout.chunk_bytes, write_id=write_id
            )
        if upload.part_bytes <= 0 or upload.part_bytes % layout.chunk_bytes:
            raise ProtocolError(
                f"{self._store.url}: parts of {upload.part_bytes} bytes are no multiple of {layout.chunk_bytes}"
            )
        self._targets[job.key] = _Target(upload, file, write_id)
        return Opened(job.key, upload.part_bytes // layout.chunk_bytes)

    def _publish(self, job: Publish) -> Event:
        target = self._targets[job.key]
        said = self._ring.checkpoint(*job.key)
        with self._timed(job.key, "publish_seconds"):
            if not target.published:
                self._tenure.check()
                target.upload.publish()
                target.published = True
            # Publishing a large file takes a while, and the manifest is what makes it count.
            self._tenure.check()
        now = self._clock()
        manifest = build_manifest(
            job,
            run=self._run,
            file=target.file,
            write_id=target.write_id,
            times=Times(self.staged_at_unix.get(job.key, now), now),
            record=said.record if said else {},
            flusher_record=self.record(job.key),
        )
        self._store.write(manifest_name(target.file), manifest.to_bytes())
        self.manifests[job.key] = manifest
        return Published(job.key)

    def _timed(self, key: Key, name: str) -> _Timed:
        return _Timed(self._tallies.setdefault(key, _Tally()), name)


class _Timed:
    def __init__(self, tally: _Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._tally.add(self._name, time.monotonic() - self._began)
