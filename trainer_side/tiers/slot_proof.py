"""The proof of one slice: what its rank used in the step after it, in a small file beside the slot file.

    slot 1 of rank-00003-e289a332.slots is sealed ─► rank-00003-e289a332.1.proof, by rename
    the slot is used again, or its file is removed ─► so is the proof

It names the slice and counts for no other. A slot may have the proof of an earlier slice for a moment: that counts as
no proof. A damaged one only leaves the resume unproven.
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
    """The proof of one slice, that of `rank` of `ranks`, as it was found. `problem`: why it cannot be used."""

    rank: int
    ranks: int
    digest: Digest | None = None
    problem: str = ""


def proof_path(slots: Path, slot: int) -> Path:
    return slots.with_suffix(f".{slot}.proof")


def proofs_of(slots: Path) -> list[Path]:
    """All proofs of a slot file, unfinished ones included."""
    return sorted(slots.parent.glob(f"{slots.stem}.*.proof*"))


def slice_names(run: str, rank: int, layout_digest: str, seal_crc32: int) -> dict[str, Any]:
    """The slice of a proof, beside its attempt and step. `seal_crc32`: of its seal, which names the job as well."""
    return {"run": run, "rank": rank, "layout": layout_digest, "seal_crc32": seal_crc32}


def read_proof(data: bytes, key: CheckpointId, names: Mapping[str, Any], *, source: str) -> Digest | None:
    """The digest in a proof of this slice; None if it is of another one. Raises `DamageError`: torn or altered."""
    try:
        record = ProofRecord.from_bytes(data)
    except ValueError as error:
        raise DamageError(f"{source}: the proof is cut short or altered: {error}") from error
    return record.digests[0] if (record.key, record.of_slice) == (key, names) else None
