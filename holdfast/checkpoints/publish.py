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
    """Facts about a checkpoint that its manifest states beside the bytes."""

    staged_at_unix: float  # when it was staged
    durable_at_unix: float  # when it became durable
    record: Mapping[str, Any]  # times and bytes of the ranks and the stager, for people
    writer: str = "flusher"  # key in the record with the times of the process that wrote the file
    doubt: str = ""  # why the checkpoint may be torn, as far as is known; empty where nobody doubts it
    best: BestRule | None = None  # the rule by which the writer keeps the best checkpoints; None: by none


@dataclass(frozen=True, slots=True)
class Finished:
    """The facts about the bytes of a checkpoint, all of which are in the store, for its manifest."""

    key: CheckpointId
    index: LayoutIndex
    image_crc32: int
    chunk_crc32s: tuple[int, ...]
    entry_crc32s: tuple[int, ...]


def choose_name(store: Store, key: CheckpointId, taken: Collection[str]) -> str:
    """The name under which a checkpoint is published; no other attempt ever writes it. `taken`: names that others on
    their way have chosen. The first attempt of a run has plain names, each later one carries its number. Raises
    `BusyError`: this step of this attempt is published, or foreign files stand at its names.
    """
    names = names_of(key)
    for name in names:
        # The manifest first: who asks for a step that is published is told so.
        if _is_manifest_there(store, name, key) or name in taken or exists(store, name):
            continue
        return name
    raise BusyError(
        f"{store.url}: {key} cannot be published: {' and '.join(names)} are there already; move away what was put "
        "there by hand"
    )


def names_of(key: CheckpointId) -> tuple[str, ...]:
    """The names that a checkpoint may have, in order; those behind the first are for where a stranger's file stands."""
    plain, numbered = step_file_name(key.step), step_file_name(key.step, attempt=key.attempt)
    zero = numbered.replace("-a", "-a0")
    return (plain, numbered, zero) if key.attempt == 1 else (numbered, zero)


def _is_manifest_there(store: Store, file: str, key: CheckpointId) -> bool:
    """Whether anything stands at the name of this file's manifest; raises `BusyError` if that is this checkpoint."""
    name = manifest_name(file)
    try:
        there = Manifest.from_bytes(store.read(name), source=name)
    except StoreMissing:
        return False
    except DamageError:
        return True
    if there.order == key and there.state is not State.BAD:
        raise BusyError(f"{store.url}: {key} is already published; a step is saved once per attempt")
    return True


def exists(store: Store, name: str) -> bool:
    try:
        store.size(name)
    except StoreMissing:
        return False
    return True


def publish_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Write the manifest of a published file, which makes it a checkpoint; returns it as it stands, of an earlier try
    if its answer was lost. Replaces nothing. Raises `BusyError`: the manifest of another write stands there.
    """
    name = manifest_name(manifest.file)
    if store.create(name, manifest.to_bytes()):
        return manifest
    try:
        there = Manifest.from_bytes(store.read(name), source=name)
    except StoreMissing as error:
        raise StoreError(f"{store.url}/{name}: was removed while it was written", retriable=True) from error
    except DamageError as error:
        raise BusyError(f"{store.url}/{name}: something else stands there already: {error}") from error
    if there.write_id != manifest.write_id:
        raise BusyError(
            f"{store.url}/{name}: is the manifest of write {there.write_id}, attempt {there.attempt}; this is write "
            f"{manifest.write_id}, attempt {manifest.attempt}, which stays unlisted"
        )
    return there


ASSEMBLY = "assemble-"
"""Begins the write-ids of files that are put together in the store, not flushed from a ring."""

_WRITER = re.compile(rf"(?:{ASSEMBLY})?w(\d{{6,19}})-")


def writer_id(attempt: int) -> str:
    """A write-id for an upload of the run's writer: a sweep sees by it of which attempt it is."""
    return f"w{attempt:06d}-{uuid.uuid4().hex}"


def writer_attempt(write_id: str) -> int:
    """The attempt of an upload, from its write-id or what begins with it; 0 for a write-id that tells none."""
    match = _WRITER.match(write_id)
    return int(match[1]) if match else 0


def build_manifest(
    image: Finished,
    *,
    run: str,
    file: str,
    write_id: str,
    facts: ManifestFacts,
    writer_record: Mapping[str, float],
) -> Manifest:
    """The commit record of a checkpoint whose bytes are all in the store."""
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
        # Clocks of two machines: a difference may come out below zero, a duration may not.
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
