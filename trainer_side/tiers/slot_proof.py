"""The proof of one slice: a digest of the step that its rank did next, in a small file beside the slot file.

    slot 1 of rank-00003-e289a332.slots is sealed ─► rank-00003-e289a332.1.proof, by rename
    the slot is used again, or its file is removed ─► the proof is removed

A proof names its slice and is ignored for any other: a slot may briefly have the proof of an earlier slice. A damaged
proof only leaves the resume unproven.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import Digest, ProofRecord
from trainer_side.tiers.tier import Order


class StepProof(NamedTuple):
    """The digest of the step after `order` on this rank."""

    order: Order
    digest: Digest


class KeptProof(NamedTuple):
    """The proof that was found for the slice of `rank` of `ranks`. `problem`: why it cannot be used."""

    rank: int
    ranks: int
    digest: Digest | None = None
    problem: str = ""


def proof_path(slots: Path, slot: int) -> Path:
    return slots.with_suffix(f".{slot}.proof")


def proofs_of(slots: Path) -> list[Path]:
    """Return all proofs of a slot file, unfinished ones included."""
    return sorted(slots.parent.glob(f"{slots.stem}.*.proof*"))


def slice_identity(run: str, rank: int, layout_digest: str, seal_crc32: int) -> dict[str, Any]:
    """Identify the slice of a proof, beside its attempt and step. `seal_crc32`: Of its seal, which names the job."""
    return {"run": run, "rank": rank, "layout": layout_digest, "seal_crc32": seal_crc32}


def read_proof(data: bytes, key: CheckpointId, names: Mapping[str, Any], *, source: str) -> Digest | None:
    """Return the digest in a proof of this slice; None for another slice. DamageError: the proof is torn or altered."""
    try:
        record = ProofRecord.from_bytes(data)
    except ValueError as error:
        raise DamageError(f"{source}: the proof is cut short or altered: {error}") from error
    return record.digests[0] if (record.key, record.of_slice) == (key, names) else None
