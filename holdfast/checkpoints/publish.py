"""The name of a checkpoint in the store, and the content of its manifest. No threads, no clock."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.errors import BusyError, DamageError, StoreError, StoreMissing
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import EntryRecord, Manifest, State, manifest_name, step_file_name
from holdfast.image.replicas import drift_of
from holdfast.image.save_record import StepRecord
from holdfast.image.split_record import SPLITS_MAX, SplitRecord
from holdfast.store.base import Store


@dataclass(frozen=True)
class ManifestFacts:
    """Facts about a checkpoint that its manifest states besides the bytes."""

    staged_at_unix: float  # when it was staged
    durable_at_unix: float  # when it became durable
    record: Mapping[str, Any]  # times and bytes of the ranks and the stager, for people
    writer: str = "flusher"  # key in the record with the times of the process that wrote the file
    doubt: str = ""  # why the checkpoint may be torn; empty if nobody doubts it
    best: BestRule | None = None  # the rule by which the writer keeps the best checkpoints; None: no rule


@dataclass(frozen=True, slots=True)
class FinishedImage:
    """The facts for the manifest about a checkpoint's bytes, all of which are in the store."""

    key: CheckpointId
    index: LayoutIndex
    image_crc32: int
    chunk_crc32s: tuple[int, ...]
    entry_crc32s: tuple[int, ...]


def choose_name(store: Store, key: CheckpointId, taken: Collection[str]) -> str:
    """Return the name under which to publish a checkpoint; no other attempt ever writes it. `taken`: names chosen for
    uploads in flight. The first attempt of a run has plain names, each later one carries its number. Raises
    `BusyError`: this step of this attempt is published, or foreign files have its names.
    """
    names = candidate_names(key)
    for name in names:
        # The manifest first: a published step gives an error of its own.
        if _has_manifest(store, name, key) or name in taken or exists(store, name):
            continue
        return name
    raise BusyError(
        f"{store.url}: {key} cannot be published: {' and '.join(names)} are there already; move away what was put "
        "there by hand"
    )


def candidate_names(key: CheckpointId) -> tuple[str, ...]:
    """Return the names that a checkpoint may have, in order; later ones are for when strangers have the first."""
    plain, numbered = step_file_name(key.step), step_file_name(key.step, attempt=key.attempt)
    zero = numbered.replace("-a", "-a0")
    return (plain, numbered, zero) if key.attempt == 1 else (numbered, zero)


def _has_manifest(store: Store, file: str, key: CheckpointId) -> bool:
    """Whether this file's manifest name is taken. Raises `BusyError` if the manifest is of this very checkpoint."""
    name = manifest_name(file)
    try:
        existing = Manifest.from_bytes(store.read(name), source=name)
    except StoreMissing:
        return False
    except DamageError:
        return True
    if existing.order == key and existing.state is not State.BAD:
        raise BusyError(f"{store.url}: {key} is already published; a step is saved once per attempt")
    return True


def exists(store: Store, name: str) -> bool:
    try:
        store.size(name)
    except StoreMissing:
        return False
    return True


def publish_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Write the manifest of a published file, which makes it a checkpoint; return it, or the one that an earlier try
    wrote if its answer was lost. Replaces nothing. Raises `BusyError` if another write's manifest is there.
    """
    name = manifest_name(manifest.file)
    if store.create(name, manifest.to_bytes()):
        return manifest
    try:
        existing = Manifest.from_bytes(store.read(name), source=name)
    except StoreMissing as error:
        raise StoreError(f"{store.url}/{name}: was removed while it was written", retriable=True) from error
    except DamageError as error:
        raise BusyError(f"{store.url}/{name}: something else stands there already: {error}") from error
    if existing.write_id != manifest.write_id:
        raise BusyError(
            f"{store.url}/{name}: is the manifest of write {existing.write_id}, attempt {existing.attempt}; this is "
            f"write {manifest.write_id}, attempt {manifest.attempt}, which stays unlisted"
        )
    return existing


ASSEMBLY = "assemble-"
"""Prefix of the write-ids of files that a tool put together, not flushed from a ring."""

_WRITER = re.compile(rf"(?:{ASSEMBLY})?w(\d{{6,19}})-")


def writer_id(attempt: int) -> str:
    """Return a write-id for an upload of the run's writer; it tells a sweep the attempt."""
    return f"w{attempt:06d}-{uuid.uuid4().hex}"


def writer_attempt(write_id: str) -> int:
    """Return the attempt of an upload, from its write-id or text that begins with it; 0 if it has no attempt."""
    match = _WRITER.match(write_id)
    return int(match[1]) if match else 0


def build_manifest(
    image: FinishedImage,
    *,
    run: str,
    file: str,
    write_id: str,
    facts: ManifestFacts,
    writer_record: Mapping[str, float],
) -> Manifest:
    """Return the commit record of a checkpoint whose bytes are all in the store."""
    layout = image.index.layout
    record = StepRecord.from_json(facts.record)
    saved = record.saved_at_unix
    began = facts.staged_at_unix if saved is None else saved
    return Manifest(
        run=run,
        attempt=image.key.attempt,
        step=image.key.step,
        file=file,
        drift=drift_of(record, image.key.step),
        doubt=facts.doubt,
        image_bytes=layout.image_bytes,
        image_crc32=image.image_crc32,
        chunk_bytes=layout.chunk_bytes,
        chunk_crc32s=image.chunk_crc32s,
        ranks=layout.ranks,
        layout_digest=layout.digest,
        write_id=write_id,
        created=datetime.fromtimestamp(facts.durable_at_unix, UTC).isoformat(timespec="milliseconds"),
        # Clocks of two machines may differ, but a duration must not be negative.
        pgt1_seconds=max(0.0, facts.staged_at_unix - began),
        pgt2_seconds=max(0.0, facts.durable_at_unix - began),
        metrics=record.metrics,
        best=facts.best,
        entries=tuple(
            EntryRecord(name=entry.name, offset=entry.offset, nbytes=entry.nbytes, crc32=crc)
            for entry, crc in zip(layout.entries, image.entry_crc32s, strict=True)
        ),
        tensors=image.index.tensor_records,
        splits=tuple(map(SplitRecord.of, layout.patterns[:SPLITS_MAX])),
        record={**facts.record, facts.writer: dict(writer_record)},
    )
