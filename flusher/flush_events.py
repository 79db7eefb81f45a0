"""Entries in the event log about a flusher's checkpoints."""

from __future__ import annotations

from typing import Any

from flusher.progress import Progress
from flusher.verify_and_prune import ReadBack
from holdfast.checkpoints.share_records import ShareSeal
from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest
from holdfast.image.shares import ImageShare, ShareNumber
from holdfast.ring.ring import Ring
from holdfast.telemetry.events import EventLog


class FlushEvents:
    """Writes the entries. Any thread."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def _emit(self, event: str, key: CheckpointId, **fields: Any) -> None:
        self._log.emit(event, {"attempt": key.attempt, **fields}, step=key.step)

    def began(self, key: CheckpointId, image_bytes: int, share: ImageShare | None) -> None:
        fields = {} if share is None else {"share": str(share.number)}
        self._emit("flush_began", key, image_bytes=image_bytes, **fields)

    def taken_over(self, key: CheckpointId, progress: Progress) -> None:
        self._emit("flush_taken_over", key, file=progress.head.file, parts_done=len(progress.parts))

    def share_sealed(self, key: CheckpointId, share: ImageShare) -> None:
        """Emitted by each of several flushers; only the one that publishes emits `durable`."""
        self._emit("share_sealed", key, share=str(share.number), chunks=len(share.chunks))

    def seal_read(self, key: CheckpointId, seal: ShareSeal) -> None:
        """Emitted by the lead: another share is sealed."""
        self._emit("seal_read", key, share=str(ShareNumber(seal.index, seal.count)), host=seal.host)

    def published(self, key: CheckpointId, manifest: Manifest) -> None:
        """Emitted by the others: the lead has published, and emitted the checkpoint's only `durable`."""
        self._emit("published", key, file=manifest.file)

    def durable(self, key: CheckpointId, manifest: Manifest) -> None:
        self._emit(
            "durable",
            key,
            file=manifest.file,
            image_bytes=manifest.image_bytes,
            pgt2_seconds=manifest.pgt2_seconds,
            record=manifest.record,
        )

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        self._emit("flush_failed", key, code=error.code, message=str(error))

    def read_back(self, item: ReadBack) -> None:
        counted = {} if item.nonfinite is None else {"nonfinite": item.nonfinite}
        self._emit(item.event, item.key, note=item.note, seconds=item.seconds, **counted)
        if item.nonfinite:
            self._emit("nonfinite", item.key, values=item.nonfinite, message=item.nonfinite_text)

    def pruned(self, files: object) -> None:
        self._log.emit("pruned", {"files": files})

    def ring_grown(self, ring: Ring, note: str) -> None:
        self._log.emit("ring_grown", {"ring_bytes": ring.ring_chunks * ring.chunk_bytes, "message": note})
