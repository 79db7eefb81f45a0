"""What a checkpoint is called in the store, and what its manifest says. No threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from holdfast.errors import BusyError, DamageError, StoreMissing
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import (
    EntryRecord,
    Key,
    Manifest,
    State,
    TensorRecord,
    manifest_name,
    step_file_name,
)
from holdfast.image.replicas import drift_of
from holdfast.store.base import Store

_STALL_SECONDS_MAX = 1e9  # in a record from outside; longer is no stall of anything
_RANK_DIGITS_MAX = 9


@dataclass(frozen=True, slots=True)
class Times:
    """When a checkpoint was staged and when it became durable, in Unix seconds."""

    staged_at_unix: float
    durable_at_unix: float


@dataclass(frozen=True)
class ManifestFacts:
    """What a manifest tells of a checkpoint beside its bytes.

    Attributes:
        times: When it was staged and durable.
        record: Times and bytes of the ranks and the stager, for people.
        writer: Key in the record under which the times of whoever wrote the file stand.
    """

    times: Times
    record: Mapping[str, Any]
    writer: str = "flusher"


class Publishing(Protocol):
    """A checkpoint whose bytes are all in the store: what its manifest says of them."""

    @property
    def key(self) -> Key: ...

    @property
    def index(self) -> LayoutIndex: ...

    @property
    def image_crc32(self) -> int: ...

    @property
    def chunk_crc32s(self) -> tuple[int, ...]: ...

    @property
    def entry_crc32s(self) -> tuple[int, ...]: ...


def choose_name(store: Store, key: Key, taken: Collection[str]) -> str:
    """The name under which a checkpoint is published: the plain one, or with the attempt if that is taken.

    Args:
        store: The run.
        key: The checkpoint.
        taken: Names that other checkpoints on their way have chosen.

    Raises:
        BusyError: This step of this attempt is already published; nothing good is overwritten.
        StoreError: The store failed.
    """
    for name in (step_file_name(key.step), step_file_name(key.step, attempt=key.attempt)):
        if name not in taken and not _is_good(store, name):
            return name
    raise BusyError(f"{store.url}: {key} is already published; a step is saved once per attempt")


def _is_good(store: Store, file: str) -> bool:
    """Whether there is a checkpoint of this name that somebody may want to restore."""
    name = manifest_name(file)
    try:
        manifest = Manifest.from_bytes(store.read(name), source=name)
        return manifest.state is not State.BAD and store.size(manifest.file) == manifest.image_bytes
    except (StoreMissing, DamageError):
        return False


def saved_at_unix(record: Mapping[str, Any]) -> float | None:
    """The earliest `saved_at_unix` of the ranks; None if none says so. The record is input from outside."""
    ranks = record.get("ranks")
    found: list[float] = []
    for said in ranks.values() if isinstance(ranks, dict) else []:
        value = said.get("saved_at_unix") if isinstance(said, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found.append(float(value))
    return min(found, default=None)


def stall_seconds_of(record: Any) -> dict[int, float]:
    """What a checkpoint cost the training thread of each rank (CST). The record is input from outside."""
    ranks = record.get("ranks") if isinstance(record, Mapping) else None
    found: dict[int, float] = {}
    for rank, said in ranks.items() if isinstance(ranks, Mapping) else []:
        value = said.get("cst_seconds") if isinstance(said, Mapping) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        is_rank = len(str(rank)) <= _RANK_DIGITS_MAX and str(rank).isdecimal()
        if is_rank and 0 <= value < _STALL_SECONDS_MAX:
            found[int(rank)] = float(value)
    return found


def build_manifest(
    job: Publishing,
    *,
    run: str,
    file: str,
    write_id: str,
    facts: ManifestFacts,
    writer_record: Mapping[str, float],
) -> Manifest:
    """The commit record of a checkpoint whose bytes are all in the store."""
    layout = job.index.layout
    times, record = facts.times, facts.record
    saved = saved_at_unix(record)
    began = times.staged_at_unix if saved is None else saved
    return Manifest(
        run=run,
        attempt=job.key.attempt,
        step=job.key.step,
        file=file,
        drift=drift_of(record, job.key.step),
        image_bytes=layout.image_bytes,
        image_crc32=job.image_crc32,
        chunk_bytes=layout.chunk_bytes,
        chunk_crc32s=job.chunk_crc32s,
        ranks=layout.ranks,
        layout_digest=layout.digest,
        write_id=write_id,
        created=datetime.fromtimestamp(times.durable_at_unix, UTC).isoformat(timespec="milliseconds"),
        # Clocks of two machines: a difference may come out below zero, a duration may not.
        pgt1_seconds=max(0.0, times.staged_at_unix - began),
        pgt2_seconds=max(0.0, times.durable_at_unix - began),
        entries=tuple(
            EntryRecord(name=entry.name, offset=entry.offset, nbytes=entry.nbytes, crc32=crc)
            for entry, crc in zip(layout.entries, job.entry_crc32s, strict=True)
        ),
        tensors=tuple(
            TensorRecord(path=tensor.path, dtype=tensor.dtype, shape=tensor.shape, entry=tensor.entry)
            for tensor in layout.tensors
        ),
        record={**record, facts.writer: dict(writer_record)},
    )
