"""Writes the proof of each published checkpoint beside its manifest: what its ranks used in the step after it.

    proofs beside the ring ─┐
    published ──────────────┴─ both are known ─► step-000000123.proof.json

A checkpoint published by an earlier flusher is found by its name. A proof that cannot be written is retried with the
next one; without it the checkpoint is intact, but its resume is not proven.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flusher.flusher_context import FlusherContext
from holdfast.checkpoints.publish import candidate_names
from holdfast.errors import DamageError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.image.proof_record import ProofRecord, proof_name

_KNOWN_MAX = 64  # entries in each table


class ProofWriter:
    """Writes proofs. For the maintenance thread, except `update`."""

    def __init__(self, context: FlusherContext) -> None:
        self._store = context.store
        self._found: tuple[ProofRecord, ...] = ()
        self._files: dict[CheckpointId, str] = {}
        self._written: dict[CheckpointId, None] = {}

    def update(self, found: Sequence[ProofRecord]) -> bool:
        """Take all proofs beside the ring; return whether one is new. For the loop's thread."""
        before = {one.key for one in self._found}
        self._found = tuple(found)
        return any(one.key not in before for one in found)

    def write_for(self, key: CheckpointId, file: str) -> None:
        """Write the proof of a durable checkpoint, if it is known. Raises `StoreError`."""
        self._files[key] = file
        while len(self._files) > _KNOWN_MAX:
            del self._files[next(iter(self._files))]
        self._write([one for one in self._found if one.key == key])

    def delete(self, key: CheckpointId, file: str) -> None:
        """Delete the proof of a checkpoint that is about to be removed. Raises `StoreError`."""
        self._files.pop(key, None)
        self._written[key] = None
        self._store.delete(proof_name(file))

    def write_all(self, under_way: Collection[CheckpointId]) -> None:
        """Write the proofs of all checkpoints but those `under_way`, which are not published. Raises `StoreError`."""
        self._write([one for one in self._found if one.key not in under_way])

    def _write(self, found: Sequence[ProofRecord]) -> None:
        for record in found:
            if record.key in self._written:
                continue
            file = self._files.get(record.key) or self._find(record.key)
            if file is None:
                continue
            reach(Point.PROOF_HEARD)
            self._store.write(proof_name(file), record.to_bytes())
            self._written[record.key] = None
            while len(self._written) > _KNOWN_MAX:
                del self._written[next(iter(self._written))]

    def _find(self, key: CheckpointId) -> str | None:
        """Return the file of a checkpoint that another flusher has published, or this one long ago."""
        for file in candidate_names(key):
            name = manifest_name(file)
            try:
                manifest = Manifest.head_from_bytes(self._store.read(name), source=name)
            except (StoreMissing, DamageError):
                continue
            if manifest.order == key:
                return file
        return None
